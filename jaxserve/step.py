"""The device step up to the logits; `last_step` is the rest.

`prefill` stores keys and values of prompt tokens and samples nothing; it leaves a prompt's last token to `forward`,
which makes the logits of every request's newest token and its drafts. So the step from logits to tokens exists once,
and its variants are no reason to compile the model again.

Axes: S slots of the batch, B the leading slots a program runs over (a bucket), K drafts, N prefill tiles of Q
positions, C positions in a page, D width of a hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from jaxserve.batch import BatchState
from jaxserve.sampling.logprobs import Logprobs
from jaxserve.sampling.sampler import Sampler
from jaxserve.sampling.slots import deal_slots
from jaxserve.speculative.proposer import PrefillContext, Proposer
from models.base import Array, ForwardInputs, Model, Params, page_of


@dataclass(frozen=True, eq=False)
class Parts:
    """What is compiled into the programs."""

    model: Model
    sampler: Sampler
    mesh: Mesh | None
    proposer: Proposer | None = None  # of drafts, where they are made on the device
    grammar_marker: tuple[int, ...] | None = None  # after which grammars begin, where they leave thinking alone
    skips_empty_drafts: bool = False  # a step in which nobody has a draft takes one row of each
    always_masks: bool = False  # also where no request has a grammar, in an engine whose requests may


@struct.dataclass
class Weights:
    """Of the model, and of the proposer where it has any."""

    model: Params
    proposer: Params


@struct.dataclass
class Cache:
    """The model's page pool; the proposer's, over the same pages; and, where the proposer wants it, the hidden state at
    the end of each page.

    kv, draft_kv: whatever their models made. boundary: [pages, D] or None. block_size: C.
    """

    kv: Any
    boundary: Array | None
    draft_kv: Any
    block_size: int = struct.field(pytree_node=False)


@struct.dataclass
class PrefillPlan:
    """Tiles of prompts, all [N] int32. A tile is positions start .. start + count - 1 of a slot; count 0 is none.

    stored: KV of positions before this one is there already, and only read. number: of log-probabilities that `score`
    is to give for the token after each position.
    """

    slot: Array
    start: Array
    count: Array
    stored: Array
    number: Array


@struct.dataclass
class BatchView:
    """The part of the batch that the forward pass reads."""

    tokens: Array  # [S, L]
    active: Array  # [S]
    block_tables: Array  # [S, P]
    drafts: Array  # [S, K]
    num_tokens: Array  # [S]


@struct.dataclass
class Hidden:
    """States of the model that a proposer reads. rows: [B, 1+K, D]. before: [B, D], of the position before the first
    row where that row begins a page, else anything."""

    rows: Array
    before: Array


def view_of(state: BatchState) -> BatchView:
    return BatchView(state.tokens, state.active, state.block_tables, state.drafts, state.rows.num_tokens)


def prefill(
    parts: Parts, tile: int, pages: int, weights: Weights, cache: Cache, view: BatchView, plan: PrefillPlan
) -> Cache:
    """Store the KV of the planned tiles. `pages` bounds the context that attention runs over."""
    inputs = _tiles(tile, pages, view, plan)
    return _run_tiles(parts, weights, cache, replace(inputs, stored=None), _following(view, plan, inputs))[1]


def score(
    parts: Parts, tile: int, pages: int, weights: Weights, cache: Cache, view: BatchView, plan: PrefillPlan
) -> tuple[Cache, Logprobs]:
    """`prefill`, and the log-probabilities [N, Q] of the token after each position. One tile's logits at a time."""
    inputs = _tiles(tile, pages, view, plan)
    following = _following(view, plan, inputs)
    hidden, cache = _run_tiles(parts, weights, cache, inputs, following)

    def one_tile(tile: tuple[jax.Array, jax.Array, jax.Array]) -> Logprobs:
        hidden, tokens, number = tile
        logits = parts.model.logits(weights.model, hidden)
        return deal_slots(parts.mesh, parts.sampler.score, logits, (tokens, number))

    numbers = jnp.broadcast_to(plan.number[:, None], following.shape)
    return cache, jax.lax.map(one_tile, (hidden, following, numbers))


def forward(
    parts: Parts, drafts: int, pages: int, weights: Weights, cache: Cache, view: BatchView, run: jax.Array
) -> tuple[Cache, jax.Array, Hidden | None]:
    """Logits [B*(1+K), V] of the newest token and the first `drafts` drafts of every slot that runs (run [B] bool)."""

    def with_drafts(count: int, cache: Cache) -> tuple[Cache, jax.Array, Hidden | None]:
        """Of the first `count` drafts only; zeros for the others."""
        cache, logits, hidden = _forward_rows(parts, count, pages, weights, cache, view, run)
        more = ((0, 0), (0, drafts - count), (0, 0))
        logits = jnp.pad(logits, more).reshape(len(run) * (1 + drafts), -1)
        return cache, logits, None if hidden is None else replace(hidden, rows=jnp.pad(hidden.rows, more))

    if not drafts or not parts.skips_empty_drafts:
        return with_drafts(drafts, cache)
    drafted = jnp.any(run & (view.drafts[: len(run), 0] >= 0)).astype(jnp.int32)
    shapes = jax.eval_shape(partial(with_drafts, 0), cache)[1:]
    made = (cache, *jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    # Loops of one turn or none, which change the pages in place: `cond` copies what it is given.
    made = jax.lax.fori_loop(0, drafted, lambda _, made: with_drafts(drafts, made[0]), made)
    return jax.lax.fori_loop(0, 1 - drafted, lambda _, made: with_drafts(0, made[0]), made)


def _forward_rows(
    parts: Parts, drafts: int, pages: int, weights: Weights, cache: Cache, view: BatchView, run: jax.Array
) -> tuple[Cache, jax.Array, Hidden | None]:
    """`forward` with logits [B, 1+K, V]."""
    b = len(run)
    used, positions = window_positions(view, run, drafts)
    newest = jnp.take_along_axis(view.tokens[:b], view.num_tokens[:b, None] - 1, axis=1)
    inputs = ForwardInputs(
        tokens=jnp.concatenate([newest, jnp.maximum(view.drafts[:b, :drafts], 0)], axis=1),
        positions=jnp.where(used, positions, -1),
        block_tables=view.block_tables[:b, :pages],
    )
    before = _states_before(cache, inputs)
    states, cache = _forward(parts, weights, cache, inputs)
    logits = parts.model.logits(weights.model, states.reshape(positions.size, -1))
    return cache, logits.reshape(b, 1 + drafts, -1), None if before is None else Hidden(states, before)


def window_positions(view: BatchView, run: jax.Array, drafts: int) -> tuple[jax.Array, jax.Array]:
    """Which of the 1 + `drafts` rows of each slot count, and their positions: [B, 1+K]."""
    b = len(run)
    n_drafts = jnp.sum(jnp.cumprod(view.drafts[:b, :drafts] >= 0, axis=1), axis=1)
    offset = jnp.arange(1 + drafts, dtype=jnp.int32)
    used = (run & view.active[:b])[:, None] & (offset <= n_drafts[:, None])
    return used, view.num_tokens[:b, None] - 1 + offset


def _tiles(tile: int, pages: int, view: BatchView, plan: PrefillPlan) -> ForwardInputs:
    offset = jnp.arange(tile, dtype=jnp.int32)
    positions = jnp.where(offset < plan.count[:, None], plan.start[:, None] + offset, -1)  # [N, Q]
    tokens = view.tokens[plan.slot[:, None], jnp.maximum(positions, 0)]
    return ForwardInputs(tokens, positions, view.block_tables[plan.slot, :pages], plan.stored)


def _following(view: BatchView, plan: PrefillPlan, inputs: ForwardInputs) -> jax.Array:
    """[N, Q] the token after each position. It is known: prefill leaves the last known token alone."""
    last = view.tokens.shape[1] - 1
    return view.tokens[plan.slot[:, None], jnp.clip(inputs.positions + 1, 0, last)]


def _run_tiles(
    parts: Parts, weights: Weights, cache: Cache, inputs: ForwardInputs, following: jax.Array
) -> tuple[jax.Array, Cache]:
    before = _states_before(cache, inputs)
    hidden, cache = _forward(parts, weights, cache, inputs)
    if parts.proposer is None:
        return hidden, cache
    context = PrefillContext(
        tokens=inputs.tokens,
        next_tokens=following,
        positions=inputs.positions,
        block_tables=inputs.block_tables,
        hidden=None if before is None else hidden,
        previous_hidden=before,
        stored=inputs.stored,
    )
    draft_kv = parts.proposer.prefill(weights.proposer, cache.draft_kv, context, parts.mesh)
    return hidden, replace(cache, draft_kv=draft_kv)


def _forward(parts: Parts, weights: Weights, cache: Cache, inputs: ForwardInputs) -> tuple[jax.Array, Cache]:
    hidden, kv = parts.model.forward(weights.model, cache.kv, inputs, parts.mesh)
    if cache.boundary is None:
        return hidden, replace(cache, kv=kv)
    size = cache.block_size
    ends = (inputs.written >= 0) & (inputs.written % size == size - 1)
    page = page_of(inputs.block_tables, inputs.written, size)
    boundary = cache.boundary.at[jnp.where(ends, page, 0)].set(hidden.astype(cache.boundary.dtype))
    return hidden, replace(cache, kv=kv, boundary=boundary)


def _states_before(cache: Cache, inputs: ForwardInputs) -> jax.Array | None:
    """[N, D] of the position before each group's first, as kept for the page that it ends; None where none is kept."""
    if cache.boundary is None:
        return None
    page = page_of(inputs.block_tables, inputs.positions[:, :1] - 1, cache.block_size)
    return cache.boundary[page[:, 0]]
