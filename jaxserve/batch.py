"""The batch as it lives on the device.

Slot s of every array belongs to the s-th running request; the host keeps the same order and sends only what
changes: a slot filled, a slot moved, a row of the block table. Nothing here grows with the length of an output
but the token history, which the device writes itself.

Axes: S slots, K drafts a slot, L history, P pages a slot, E stop ids.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from models.base import Array
from pallas_kernels import Filters

MAX_STOP_IDS = 16  # what the device checks; the host checks all of them, a step later


@struct.dataclass
class SlotRow:
    """What the host knows of one request when it takes a slot. Scalars but for stop_ids."""

    num_tokens: Array  # int32, tokens known: prompt and, after a preemption, earlier output
    prompt_len: Array  # int32
    max_tokens_total: Array  # int32, the request ends when it holds this many
    stop_ids: Array  # [E] int32, -1 = none
    seed: Array  # [2] uint32
    filters: Filters
    want_logprob: Array  # bool


@struct.dataclass
class BatchState:
    """All slots. Every field of `rows` carries a leading S axis here."""

    tokens: Array  # [S, L] int32, prompt and output
    active: Array  # [S] bool, running and not yet stopped
    block_tables: Array  # [S, P] int32
    drafts: Array  # [S, K] int32, -1 = none
    rows: SlotRow


def empty_batch(num_slots: int, history: int, pages: int, drafts: int) -> BatchState:
    """A batch with nobody in it."""

    def full(value: float, dtype: jnp.dtype, *shape: int) -> jax.Array:
        return jnp.full((num_slots, *shape), value, dtype)

    rows = SlotRow(
        num_tokens=full(1, jnp.int32),
        prompt_len=full(1, jnp.int32),
        max_tokens_total=full(0, jnp.int32),
        stop_ids=full(-1, jnp.int32, MAX_STOP_IDS),
        seed=full(0, jnp.uint32, 2),
        filters=Filters(
            temperature=full(0, jnp.float32),
            min_p=full(0, jnp.float32),
            top_k=full(0, jnp.int32),
            top_p=full(1, jnp.float32),
        ),
        want_logprob=full(False, jnp.bool_),
    )
    return BatchState(
        tokens=full(0, jnp.int32, history),
        active=full(False, jnp.bool_),
        block_tables=full(0, jnp.int32, pages),
        drafts=full(-1, jnp.int32, drafts),
        rows=rows,
    )


def fill_slot(state: BatchState, slot: jax.Array, tokens: jax.Array, row: SlotRow) -> BatchState:
    """Give `slot` to a request. tokens: [l] int32, its history padded to a length bucket l <= L."""
    return replace(
        state,
        tokens=jax.lax.dynamic_update_slice(state.tokens, tokens[None], (slot, 0)),
        active=state.active.at[slot].set(True),
        drafts=state.drafts.at[slot].set(-1),
        rows=jax.tree.map(lambda all_, one: all_.at[slot].set(one), state.rows, row),
    )


def move_slot(state: BatchState, source: jax.Array, target: jax.Array) -> BatchState:
    """Copy slot `source` over `target`: a request left and the last one closes the gap."""
    return jax.tree.map(lambda x: x.at[target].set(x[source]), state)


def set_block_tables(state: BatchState, slots: jax.Array, tables: jax.Array) -> BatchState:
    """Replace whole rows. slots: [M] int32, past the end = nothing; tables: [M, P]."""
    return replace(state, block_tables=state.block_tables.at[slots].set(tables, mode="drop"))
