"""Drafts from a head that reads the target's hidden states: EAGLE, EAGLE-3, MTP (models.heads).

Each step first stores the entries of the tokens it committed, with the target's true hidden states; they replace what
the head wrote there when it drafted. The last entry's state gives the first draft, and the head goes on with its own
states. A tile of prompt tokens stores the entries one position to the right, whose tokens are known, so that the entry
of the last known token is there when decoding begins. The exception is an entry that begins the page behind a tile: the
tile, or the decode, that begins there makes it from the hidden state that is kept with the page before. So it is made
just the same when that page came from the prefix cache, and every entry of a prefill is written once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.speculative.draft_model import draft_positions, join
from jaxserve.speculative.drafting import pick, replicate
from jaxserve.speculative.proposer import PrefillContext, Proposal, ProposeContext, cut
from models.base import ForwardInputs, Params
from models.heads import HiddenStateHead


@dataclass(frozen=True)
class HiddenStateProposer:
    """K serial steps of a head.

    vocab_size: V of the target, the width of draft_logits. probabilistic: draw drafts from the head's distribution at
    the request's temperature. replicated: the head, its KV and the tables it uses whole on every device.
    """

    head: HiddenStateHead
    num_speculative_tokens: int
    vocab_size: int
    block_size: int
    probabilistic: bool = False
    replicated: bool = False

    needs_hidden = True
    stores_kv = True

    def with_num_speculative_tokens(self, count: int) -> HiddenStateProposer:
        return replace(self, num_speculative_tokens=count)

    def load_params(self, target_params: Params, mesh: Mesh | None) -> Params:
        params = self.head.load_params(target_params, None if self.replicated else mesh)
        return replicate(params, mesh) if self.replicated else params

    def init_kv(self, num_blocks: int, block_size: int, mesh: Mesh | None) -> Any:
        if block_size != self.block_size:
            raise ValueError(f"block_size is {block_size}; the proposer was made for {self.block_size}")
        kv = self.head.init_kv(num_blocks, block_size, None if self.replicated else mesh)
        return replicate(kv, mesh) if self.replicated else kv

    def prefill(self, params: Params, kv: Any, context: PrefillContext, mesh: Mesh | None) -> Any:
        assert context.hidden is not None
        assert context.previous_hidden is not None
        with jax.named_scope("head_prefill"):
            positions = context.positions
            last = positions == jnp.max(positions, axis=1, keepdims=True)
            begins_next = last & ((positions + 1) % self.block_size == 0)
            shifted = jnp.where((positions >= 0) & ~begins_next, positions + 1, -1)
            inputs = ForwardInputs(
                tokens=jnp.concatenate([context.tokens[:, :1], context.next_tokens], axis=1),
                positions=jnp.concatenate([self._page_starts(positions[:, :1]), shifted], axis=1),
                block_tables=context.block_tables,
                stored=context.stored,
            )  # [N, 1+Q]
            hidden = jnp.concatenate([context.previous_hidden[:, None], context.hidden], axis=1)
            return self._forward(params, kv, inputs, self.head.features(params, hidden), mesh)[1]

    def propose(self, params: Params, kv: Any, context: ProposeContext, mesh: Mesh | None) -> Proposal:
        assert context.hidden is not None
        assert context.previous_hidden is not None
        with jax.named_scope("head"):
            hidden = jnp.concatenate([context.previous_hidden[:, None], context.hidden], axis=1)
            inputs = self._emitted(context, hidden.shape[1])
            states, kv = self._forward(params, kv, inputs, self.head.features(params, hidden), mesh)
            newest = jnp.take_along_axis(states, context.n_emitted[:, None, None], axis=1)[:, 0]
            return self._draft(params, kv, newest, context, mesh)

    def _emitted(self, context: ProposeContext, width: int) -> ForwardInputs:
        """The last token of before, where it begins a page, and those that the step committed: [B, 2+J]."""
        offset = jnp.arange(width, dtype=jnp.int32)
        positions = (context.num_tokens - context.n_emitted - 1)[:, None] + offset
        wanted = jnp.concatenate([self._page_starts(positions[:, :1]), positions[:, 1:]], axis=1)
        live = (context.run & (context.n_emitted > 0))[:, None] & (offset <= context.n_emitted[:, None])
        tokens = jnp.take_along_axis(context.tokens, jnp.clip(positions, 0, context.tokens.shape[1] - 1), axis=1)
        return ForwardInputs(tokens, jnp.where(live, wanted, -1), context.block_tables)

    def _page_starts(self, positions: jax.Array) -> jax.Array:
        """Those positions that begin a page, but for the first; -1 for others."""
        return jnp.where((positions > 0) & (positions % self.block_size == 0), positions, -1)

    def _draft(self, params: Params, kv: Any, state: jax.Array, context: ProposeContext, mesh: Mesh | None) -> Proposal:
        """K drafts, the first from the states [B, D] of the newest tokens."""
        count = self.num_speculative_tokens
        if count == 0:
            return Proposal(jnp.full((len(state), 0), -1, jnp.int32), None, kv)

        def step(carry: tuple[jax.Array, jax.Array, Any], index: jax.Array) -> tuple[Any, Any]:
            token, state, kv = carry
            inputs = ForwardInputs(token[:, None], draft_positions(context, index)[:, None], context.block_tables)
            states, kv = self._forward(params, kv, inputs, state[:, None], mesh)
            token, q = self._choose(params, states[:, 0], context, index)
            return (token, states[:, 0], kv), (token, q)

        first = self._choose(params, state, context, 0)
        rest_of = jnp.arange(1, count, dtype=jnp.int32)
        (_, _, kv), rest = jax.lax.scan(step, (first[0], state, kv), rest_of)
        drafts, q = join(first, rest)
        return Proposal(cut(drafts, context), q, kv)

    def _choose(
        self, params: Params, state: jax.Array, context: ProposeContext, index: jax.Array | int
    ) -> tuple[jax.Array, jax.Array | None]:
        token, q = pick(self.head.logits(params, state), context, index, self.probabilistic)
        ids = self.head.target_ids(params)
        if ids is None:
            return token, q
        if q is not None:
            q = jnp.full((len(q), self.vocab_size), -jnp.inf).at[:, ids].set(q)
        return ids[token], q

    def _forward(
        self, params: Params, kv: Any, inputs: ForwardInputs, hidden: jax.Array, mesh: Mesh | None
    ) -> tuple[jax.Array, Any]:
        return self.head.forward(params, kv, inputs, hidden, None if self.replicated else mesh)
