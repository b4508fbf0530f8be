"""What the engine asks of a proposer: pure functions that draft the tokens the next step verifies.

A proposer is static: it is compiled into the step, hashable, and holds no arrays. What it needs on the device are its
parameters and, for proposers that run a model of their own, a KV pool laid out over the target's page numbers and block
tables: whoever owns a page of the target owns the same page here, so prefix caching and preemption need no second
bookkeeping.

Axes: B slots of a step, K drafts to make, J drafts verified in the step before, N prefill tiles of Q positions, L
history, P pages, D width of the target's hidden states, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from models.base import Array, Params

STREAM_DRAFT = 16  # of the randomness of (seed, position): the first of K streams, one for each draft of a window


@struct.dataclass
class PrefillContext:
    """Tiles of prompt tokens that the target has just run.

    Every position's successor is known, since the last known token is left to the next decode.
    """

    tokens: Array  # [N, Q] int32
    next_tokens: Array  # [N, Q] int32, the token after each position
    positions: Array  # [N, Q] int32, -1 = padding, which comes last
    block_tables: Array  # [N, P] int32
    hidden: Array | None  # [N, Q, D] the target's; None unless the proposer needs it
    previous_hidden: Array | None  # [N, D] of the position before the tile where the tile begins a page, else anything
    stored: Array | None = None  # [N] int32: what is stored of positions before this one stays as it is


@struct.dataclass
class ProposeContext:
    """The batch after a step's tokens were committed.

    A slot with run True took part in the step. It may have ended with it: its committed positions are to be written all
    the same, as its pages may be shared later; its drafts are not used.
    """

    tokens: Array  # [B, L] int32, committed history
    num_tokens: Array  # [B] int32, committed, with the newest
    n_emitted: Array  # [B] int32, how many of them this step added (0 where nothing could be drawn)
    run: Array  # [B] bool
    block_tables: Array  # [B, P] int32, covering num_tokens + K - 1 positions
    hidden: Array | None  # [B, 1+J, D] row j: position num_tokens - n_emitted - 1 + j; None unless needed
    previous_hidden: Array | None  # [B, D] of the position before row 0 where row 0 begins a page, else anything
    seed: Array  # [B, 2] uint32
    prompt_len: Array  # [B] int32
    max_tokens_total: Array  # [B] int32, the request ends when it holds this many
    temperature: Array  # [B] float32, 0 = greedy
    # How many of the drafts just verified may be others' (a grammar's): a draft model has no KV of those.
    num_foreign: int = struct.field(pytree_node=False, default=0)


@struct.dataclass
class Proposal:
    """Drafts of the next step.

    drafts: [B, K] int32, -1 after the last. draft_logits: [B, K, V] float32, draft i being drawn from
    softmax(draft_logits[:, i]), temperature included; None where drafts are deterministic (one-hot).
    kv: the proposer's.
    """

    drafts: Array
    draft_logits: Array | None
    kv: Any


@runtime_checkable
class Proposer(Protocol):
    """A source of drafts. Hashable and comparable: it is a static argument of the compiled step.

    The engine calls `prefill` after each of the target's prefills and `propose` after each of its decodes, also with
    num_speculative_tokens = 0 where the batch is too large for drafts: a proposer with KV must not miss a token.
    """

    @property
    def num_speculative_tokens(self) -> int:
        """K of `propose`."""

    @property
    def needs_hidden(self) -> bool:
        """Whether contexts must carry the target's hidden states (and pages their boundary hidden state)."""

    def with_num_speculative_tokens(self, count: int) -> Proposer:
        """The same proposer with another K, 0 included."""

    def load_params(self, target_params: Params, mesh: Mesh | None) -> Params:
        """Weights on `mesh`, or {}. Tables shared with the target (embedding, lm_head) are its own arrays."""

    def init_kv(self, num_blocks: int, block_size: int, mesh: Mesh | None) -> Any:
        """A zeroed page pool of its own, or None."""

    @property
    def stores_kv(self) -> bool:
        """Whether it has one, and writes up to K positions ahead."""

    def prefill(self, params: Params, kv: Any, context: PrefillContext, mesh: Mesh | None) -> Any:
        """Store KV of the tiles; returns the pool. Traced."""

    def propose(self, params: Params, kv: Any, context: ProposeContext, mesh: Mesh | None) -> Proposal:
        """Store KV of the newly committed tokens and draft what may follow. Traced."""


class Stateless:
    """Base of proposers without weights and KV: what is left to write is `propose`."""

    needs_hidden: bool = False
    stores_kv: bool = False

    def load_params(self, target_params: Params, mesh: Mesh | None) -> Params:
        return {}

    def init_kv(self, num_blocks: int, block_size: int, mesh: Mesh | None) -> Any:
        return None

    def prefill(self, params: Params, kv: Any, context: PrefillContext, mesh: Mesh | None) -> Any:
        return kv


def useful_drafts(context: ProposeContext) -> jax.Array:
    """[B] int32, how many drafts can still be emitted: the last place is that of the verifying draw itself."""
    room = context.max_tokens_total - context.num_tokens - 1
    return jnp.where(context.run & (context.n_emitted > 0), jnp.maximum(room, 0), 0)


def cut(drafts: jax.Array, context: ProposeContext) -> jax.Array:
    """drafts [B, K] without those that could not be emitted, and without any that come after a -1."""
    index = jnp.arange(drafts.shape[1], dtype=jnp.int32)
    present = jnp.cumprod(drafts >= 0, axis=1).astype(bool)
    return jnp.where(present & (index < useful_drafts(context)[:, None]), drafts, -1)
