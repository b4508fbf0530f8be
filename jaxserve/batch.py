"""The batch as it lives on the device.

Slot s of every array belongs to the s-th running request; the host keeps the same order and sends only what
changes: a slot filled, a slot moved, a row of the block table. Nothing here grows with the length of an output
but the token history, which the device writes itself.

Axes: S slots, K drafts a slot, L history, P pages a slot, E stop ids, M listed ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from jaxserve.sampling.penalties import Penalties, TokenUse, empty_use
from jaxserve.sampling.processor import LogitsProcessor
from jaxserve.sampling.slots import move_own, use_of_history
from jaxserve.sampling.thinking import Markers, section_start
from jaxserve.sampling_params import MAX_STOP_IDS
from jaxserve.structured.device import FREE, NO_TABLE, GrammarRow
from models.base import Array
from pallas_kernels import Filters


@struct.dataclass
class SlotRow:
    """What the host knows of one request when it takes a slot. Scalars but for stop_ids."""

    num_tokens: Array  # int32, tokens known: prompt and, after a preemption, earlier output
    prompt_len: Array  # int32
    max_tokens_total: Array  # int32, the request ends when it holds this many
    stop_ids: Array  # [E] int32, -1 = none
    seed: Array  # [2] uint32
    filters: Filters
    penalties: Penalties
    thinking_budget: Array  # int32, -1 = none
    grammar: GrammarRow  # given when it is compiled, by `set_grammars`
    num_logprobs: Array  # int32, of the most probable tokens; 0: of the sampled one alone; -1: none
    logprob_ids: Array  # [M] int32, -1 = none
    uses: Array  # [processors] bool
    processors: tuple[Any, ...]  # the parameters of each logits processor


@struct.dataclass
class BatchState:
    """All slots. Every field of `rows` carries a leading S axis here."""

    tokens: Array  # [S, L] int32, prompt and output
    active: Array  # [S] bool, running and not yet stopped
    block_tables: Array  # [S, P] int32
    drafts: Array  # [S, K] int32, -1 = none
    section: Array  # [S] int32, where the open thinking section began, -1 = none
    grammar_state: Array  # [S] int32, FREE = anything may follow
    use: TokenUse  # [S, ...], under tensor parallelism dealt out over the devices, as are
    draft_logits: Array | None  # [S, K, V] float32, what the drafts were drawn from; None where they are deterministic
    rows: SlotRow


def empty_row(processors: Sequence[LogitsProcessor], listed: int) -> SlotRow:
    """The row of a slot with nobody in it; NumPy, so that nothing is compiled to make it."""
    return SlotRow(
        num_tokens=np.int32(1),
        prompt_len=np.int32(1),
        max_tokens_total=np.int32(0),
        stop_ids=np.full(MAX_STOP_IDS, -1, np.int32),
        seed=np.zeros(2, np.uint32),
        filters=Filters(np.float32(0), np.float32(0), np.int32(0), np.float32(1)),
        penalties=Penalties(np.float32(1), np.float32(0), np.float32(0)),
        thinking_budget=np.int32(-1),
        grammar=GrammarRow(np.int32(NO_TABLE), np.int32(FREE)),
        num_logprobs=np.int32(-1),
        logprob_ids=np.full(listed, -1, np.int32),
        uses=np.zeros(len(processors), bool),
        processors=tuple(p.empty_row() for p in processors),
    )


def empty_batch(
    num_slots: int, history: int, pages: int, drafts: int, row: SlotRow, vocab: int, draft_logits: bool = False
) -> BatchState:
    """A batch with nobody in it."""

    def full(value: float, dtype: Any, *shape: int) -> jax.Array:
        return jnp.full((num_slots, *shape), value, dtype)

    return BatchState(
        tokens=full(0, jnp.int32, history),
        active=full(False, jnp.bool_),
        block_tables=full(0, jnp.int32, pages),
        drafts=full(-1, jnp.int32, drafts),
        section=full(-1, jnp.int32),
        grammar_state=full(FREE, jnp.int32),
        use=empty_use(num_slots, vocab, history),
        draft_logits=full(0, jnp.float32, drafts, vocab) if draft_logits else None,
        rows=jax.tree.map(lambda x: jnp.broadcast_to(x, (num_slots, *np.shape(x))), row),
    )


def fill_slot(
    mesh: Mesh | None, markers: Markers | None, state: BatchState, slot: jax.Array, tokens: jax.Array, row: SlotRow
) -> BatchState:
    """Give `slot` to a request. tokens: [l] int32, its history padded to a length bucket l <= L."""
    section = jnp.int32(-1) if markers is None else section_start(markers, tokens, row.num_tokens)
    return replace(
        state,
        tokens=jax.lax.dynamic_update_slice(state.tokens, tokens[None], (slot, 0)),
        active=state.active.at[slot].set(True),
        drafts=state.drafts.at[slot].set(-1),
        section=state.section.at[slot].set(section),
        grammar_state=state.grammar_state.at[slot].set(FREE),
        use=use_of_history(mesh, state.use, slot, tokens, row.num_tokens, row.prompt_len),
        rows=jax.tree.map(lambda all_, one: all_.at[slot].set(one), state.rows, row),
    )


def move_slot(mesh: Mesh | None, state: BatchState, source: jax.Array, target: jax.Array) -> BatchState:
    """Copy slot `source` over `target`: a request left and the last one closes the gap."""
    use, draft_logits = move_own(mesh, (state.use, state.draft_logits), source, target)
    nothing: Any = None  # an empty subtree, while the rest moves
    rest = replace(state, use=nothing, draft_logits=None)
    moved = jax.tree.map(lambda x: x.at[target].set(x[source]), rest)
    return replace(moved, use=use, draft_logits=draft_logits)


def set_grammars(state: BatchState, slots: jax.Array, grammars: GrammarRow, states: jax.Array) -> BatchState:
    """Hold slots to grammars, in which their texts stand at `states`. slots: [M] int32, past the end = nothing;
    grammars: of [M]; states: [M] int32."""

    def put(every: jax.Array, some: jax.Array) -> jax.Array:
        return every.at[slots].set(some, mode="drop")

    rows = jax.tree.map(put, state.rows.grammar, grammars)
    return replace(state, rows=replace(state.rows, grammar=rows), grammar_state=put(state.grammar_state, states))


def set_block_tables(state: BatchState, slots: jax.Array, tables: jax.Array) -> BatchState:
    """Replace whole rows. slots: [M] int32, past the end = nothing; tables: [M, P]."""
    return replace(state, block_tables=state.block_tables.at[slots].set(tables, mode="drop"))
