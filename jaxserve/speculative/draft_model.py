"""Drafts from a smaller model of the same vocabulary, run K times inside the step (Leviathan et al. 2023).

Its keys and values lie in a pool of its own under the target's page numbers, and prompts are prefilled into it too.
Then each step runs the newest two tokens first: the newest one, and the one before it, which is new to the draft model
too when all its drafts were accepted (the last draft is never run) or when the prompt has just ended. Every other
committed token was run as a draft, or in an earlier step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.speculative.drafting import fit_vocabulary, pick, replicate
from jaxserve.speculative.proposer import PrefillContext, Proposal, ProposeContext, cut
from models.base import ForwardInputs, Model, Params


@dataclass(frozen=True)
class DraftModelProposer:
    """K serial decodes of a draft model.

    model: any model whose token ids are the target's (`check_vocabularies`). vocab_size: V of the target, the width of
    draft_logits. probabilistic: draw drafts from the model's distribution at the request's temperature.
    replicated: the whole model on every device, instead of sharded like the target.
    """

    model: Model
    num_speculative_tokens: int
    vocab_size: int
    probabilistic: bool = False
    replicated: bool = False

    needs_hidden = False
    stores_kv = True

    def with_num_speculative_tokens(self, count: int) -> DraftModelProposer:
        return replace(self, num_speculative_tokens=count)

    def load_params(self, target_params: Params, mesh: Mesh | None) -> Params:
        params = self.model.load_params(self._mesh(mesh))
        return replicate(params, mesh) if self.replicated else params

    def init_kv(self, num_blocks: int, block_size: int, mesh: Mesh | None) -> Any:
        kv = self.model.init_kv(num_blocks, block_size, self._mesh(mesh))
        return replicate(kv, mesh) if self.replicated else kv

    def prefill(self, params: Params, kv: Any, context: PrefillContext, mesh: Mesh | None) -> Any:
        with jax.named_scope("draft_prefill"):
            inputs = ForwardInputs(context.tokens, context.positions, context.block_tables, context.stored)
            return self.model.forward(params, kv, inputs, self._mesh(mesh))[1]

    def propose(self, params: Params, kv: Any, context: ProposeContext, mesh: Mesh | None) -> Proposal:
        with jax.named_scope("draft_model"):
            hidden, kv = self.model.forward(params, kv, newest(context), self._mesh(mesh))
            return self._draft(params, kv, hidden[:, -1], context, mesh)

    def _draft(
        self, params: Params, kv: Any, hidden: jax.Array, context: ProposeContext, mesh: Mesh | None
    ) -> Proposal:
        """K drafts, the first from the hidden states [B, D] of the newest tokens."""
        count = self.num_speculative_tokens
        if count == 0:
            return Proposal(jnp.full((len(hidden), 0), -1, jnp.int32), None, kv)

        def choose(hidden: jax.Array, index: jax.Array | int) -> tuple[jax.Array, jax.Array | None]:
            logits = fit_vocabulary(self.model.logits(params, hidden), self.vocab_size)
            return pick(logits, context, index, self.probabilistic)

        def step(carry: tuple[jax.Array, Any], index: jax.Array) -> tuple[Any, Any]:
            token, kv = carry
            inputs = ForwardInputs(token[:, None], draft_positions(context, index)[:, None], context.block_tables)
            hidden, kv = self.model.forward(params, kv, inputs, self._mesh(mesh))
            token, q = choose(hidden[:, 0], index)
            return (token, kv), (token, q)

        first = choose(hidden, 0)
        (_, kv), rest = jax.lax.scan(step, (first[0], kv), jnp.arange(1, count, dtype=jnp.int32))
        drafts, q = join(first, rest)
        return Proposal(cut(drafts, context), q, kv)

    def _mesh(self, mesh: Mesh | None) -> Mesh | None:
        return None if self.replicated else mesh


def newest(context: ProposeContext) -> ForwardInputs:
    """Of every slot that got a token in this step, what may lack KV: the newest; the one before it, which was the last
    draft if all were accepted, or the end of the prompt; and, after these, what others drafted."""
    count = 2 + context.num_foreign
    positions = context.num_tokens[:, None] - count + jnp.arange(count, dtype=jnp.int32)  # [B, count]
    live = (context.run & (context.n_emitted > 0))[:, None]
    live &= positions >= (context.num_tokens - context.n_emitted - 1)[:, None]
    tokens = jnp.take_along_axis(context.tokens, jnp.maximum(positions, 0), axis=1)
    return ForwardInputs(tokens, jnp.where(live, positions, -1), context.block_tables)


def draft_positions(context: ProposeContext, index: jax.Array) -> jax.Array:
    """[B] int32, where the draft before `index` goes; -1 where no draft can be emitted there."""
    position = context.num_tokens + index - 1
    live = context.run & (context.n_emitted > 0) & (position < context.max_tokens_total)
    return jnp.where(live, position, -1)


def join(first: Any, rest: Any) -> Any:
    """One draft's arrays [B, ...] and those of the ones after it [K-1, B, ...] as [B, K, ...]."""
    return jax.tree.map(lambda a, b: jnp.moveaxis(jnp.concatenate([a[None], b]), 0, 1), first, rest)


def check_vocabularies(target: Model, draft: Model, target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raises ValueError unless ids mean the same to both models.

    Where both tokenizers can list their vocabulary, every token must have the same id; the widths of the logits may
    then differ by padding. Otherwise the widths must be equal.
    """
    vocabularies = [_vocabulary(t) for t in (target_tokenizer, draft_tokenizer)]
    if None in vocabularies:
        if target.vocab_size != draft.vocab_size:
            raise ValueError(
                f"model of speculative_config has vocab_size {draft.vocab_size}; it must be the target's, "
                f"{target.vocab_size}"
            )
        return
    theirs, ours = vocabularies
    assert theirs is not None
    assert ours is not None
    if differing := sorted(t for t in theirs.keys() | ours.keys() if theirs.get(t) != ours.get(t)):
        token = differing[0]
        raise ValueError(
            f"model of speculative_config has another vocabulary than the target: {len(differing)} tokens differ, "
            f"{token!r} is {ours.get(token)} there and {theirs.get(token)} here"
        )


def _vocabulary(tokenizer: Any) -> Mapping[str, int] | None:
    return tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else None
