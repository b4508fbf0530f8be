"""The device step: three programs over the same state.

`prefill` stores keys and values of prompt tokens and samples nothing; it leaves a prompt's last token to `forward`,
which makes the logits of every request's newest token and its drafts. `sample` takes them, verifies the drafts and
writes the result into the batch. So the step from logits to tokens exists once, and its variants are no reason to
compile the model again.

Axes: S slots of the batch, B the leading slots a program runs over (a bucket), K drafts, N prefill tiles of Q
positions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from jaxserve.batch import BatchState
from jaxserve.sampling.logprobs import Logprobs
from jaxserve.sampling.sampler import Sampler, Window
from jaxserve.sampling.slots import deal_slots, use_of_emitted
from jaxserve.sampling.thinking import sections_of_window
from models.base import Array, ForwardInputs, Model, page_of


@struct.dataclass
class Cache:
    """The model's page pool and, where a proposer wants it, the hidden state at the end of each page.

    kv: whatever the model made. boundary: [pages, D] or None. block_size: positions in a page.
    """

    kv: Any
    boundary: Array | None
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


def view_of(state: BatchState) -> BatchView:
    return BatchView(state.tokens, state.active, state.block_tables, state.drafts, state.rows.num_tokens)


@struct.dataclass
class StepOutput:
    """What the host learns. tokens [B, 1+K] int32, -1 after the last; finite [B] bool; logprobs of [B, 1+K]."""

    tokens: Array
    finite: Array
    logprobs: Logprobs | None  # None once it is known that nobody asked


def prefill(
    model: Model,
    mesh: Mesh | None,
    tile: int,
    pages: int,
    params: Any,
    cache: Cache,
    view: BatchView,
    plan: PrefillPlan,
) -> Cache:
    """Store the KV of the planned tiles. `pages` bounds the context that attention runs over."""
    _, cache = _forward(model, mesh, params, cache, _tiles(tile, pages, view, replace(plan, stored=None)))
    return cache


def score(
    sampler: Sampler,
    model: Model,
    mesh: Mesh | None,
    tile: int,
    pages: int,
    params: Any,
    cache: Cache,
    view: BatchView,
    plan: PrefillPlan,
) -> tuple[Cache, Logprobs]:
    """`prefill`, and the log-probabilities [N, Q] of the token after each position. One tile's logits at a time."""
    inputs = _tiles(tile, pages, view, plan)
    hidden, cache = _forward(model, mesh, params, cache, inputs)
    following = view.tokens[plan.slot[:, None], jnp.clip(inputs.positions + 1, 0, view.tokens.shape[1] - 1)]

    def one_tile(tile: tuple[jax.Array, jax.Array, jax.Array]) -> Logprobs:
        hidden, tokens, number = tile
        return deal_slots(mesh, sampler.score, model.logits(params, hidden), (tokens, number))

    numbers = jnp.broadcast_to(plan.number[:, None], following.shape)
    return cache, jax.lax.map(one_tile, (hidden, following, numbers))


def _tiles(tile: int, pages: int, view: BatchView, plan: PrefillPlan) -> ForwardInputs:
    offset = jnp.arange(tile, dtype=jnp.int32)
    positions = jnp.where(offset < plan.count[:, None], plan.start[:, None] + offset, -1)  # [N, Q]
    tokens = view.tokens[plan.slot[:, None], jnp.maximum(positions, 0)]
    return ForwardInputs(tokens, positions, view.block_tables[plan.slot, :pages], plan.stored)


def forward(
    model: Model, mesh: Mesh | None, pages: int, params: Any, cache: Cache, view: BatchView, run: jax.Array
) -> tuple[Cache, jax.Array]:
    """Logits [B*(1+K), V] of the newest token and the drafts of every slot that runs (run [B] bool)."""
    b = len(run)
    used, positions = _positions(view, run)
    newest = jnp.take_along_axis(view.tokens[:b], view.num_tokens[:b, None] - 1, axis=1)
    inputs = ForwardInputs(
        tokens=jnp.concatenate([newest, jnp.maximum(view.drafts[:b], 0)], axis=1),
        positions=jnp.where(used, positions, -1),
        block_tables=view.block_tables[:b, :pages],
    )
    hidden, cache = _forward(model, mesh, params, cache, inputs)
    return cache, model.logits(params, hidden.reshape(positions.size, -1))


def sample(
    sampler: Sampler, mesh: Mesh | None, shaped: bool, state: BatchState, logits: jax.Array, run: jax.Array
) -> tuple[BatchState, StepOutput]:
    """One token for every slot that runs, or as many as its drafts were right about."""
    b = len(run)
    rows = jax.tree.map(lambda x: x[:b], state.rows)
    run = run & state.active[:b]
    used, _ = _positions(view_of(state), run)
    drafts = state.drafts[:b]
    window = Window(rows, state.tokens[:b], drafts, used, state.section[:b])
    with jax.named_scope("sample"):
        sampled = deal_slots(mesh, partial(sampler.sample, shaped=shaped), logits, window, state.use)
    with jax.named_scope("commit"):
        tokens, finite = verify(sampled.token, sampled.finite, drafts, used)
        tokens, done = _stop(tokens, rows, finite)
        state = _commit(sampler, mesh, state, tokens, rows, run & done)
    return state, StepOutput(tokens, finite | ~run, sampled.logprobs)


def _positions(view: BatchView, run: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which of the 1+K rows of each slot count, and their positions: [B, 1+K]."""
    b, k = len(run), view.drafts.shape[1]
    n_drafts = jnp.sum(jnp.cumprod(view.drafts[:b] >= 0, axis=1), axis=1)
    offset = jnp.arange(1 + k, dtype=jnp.int32)
    used = (run & view.active[:b])[:, None] & (offset <= n_drafts[:, None])
    return used, view.num_tokens[:b, None] - 1 + offset


def _forward(
    model: Model, mesh: Mesh | None, params: Any, cache: Cache, inputs: ForwardInputs
) -> tuple[jax.Array, Cache]:
    hidden, kv = model.forward(params, cache.kv, inputs, mesh)
    if cache.boundary is None:
        return hidden, replace(cache, kv=kv)
    size = cache.block_size
    ends = (inputs.written >= 0) & (inputs.written % size == size - 1)
    page = page_of(inputs.block_tables, inputs.written, size)
    boundary = cache.boundary.at[jnp.where(ends, page, 0)].set(hidden.astype(cache.boundary.dtype))
    return hidden, replace(cache, kv=kv, boundary=boundary)


def verify(drawn: jax.Array, fine: jax.Array, drafts: jax.Array, used: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Coupled verification: a draft is accepted iff it is what was drawn at its position.

    Every position is drawn with its own (seed, position) randomness: the tokens are the same with and without drafts.
    drawn, fine, used: [B, 1+K], the token of each row, whether it had a distribution, whether it counts; drafts [B, K].
    Returns tokens [B, 1+K], -1 where nothing is emitted, and finite [B]: False where the first row that counts had no
    distribution.
    """
    right = jnp.cumprod((drafts == drawn[:, :-1]) & used[:, 1:], axis=1).astype(bool)  # [B, K]
    reached = used & jnp.concatenate([used[:, :1], right], axis=1)
    sound = jnp.cumprod(fine | ~reached, axis=1).astype(bool)
    return jnp.where(reached & sound, drawn, -1), fine[:, 0] | ~used[:, 0]


def _stop(tokens: jax.Array, rows: Any, finite: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cut tokens [B, 1+K] after the first stop id and at the length limit; which slots are done."""
    width = tokens.shape[1]
    room = (rows.max_tokens_total - rows.num_tokens)[:, None]
    stops = jnp.any(tokens[:, :, None] == rows.stop_ids[:, None, :], axis=-1) & (tokens >= 0)  # [B, 1+K]
    stopped_before = jnp.cumsum(stops, axis=1) - stops > 0
    tokens = jnp.where(stopped_before | (jnp.arange(width) >= room), -1, tokens)
    full = jnp.sum(tokens >= 0, axis=1) >= room[:, 0]
    return tokens, jnp.any(stops & (tokens >= 0), axis=1) | full | ~finite


def _commit(
    sampler: Sampler, mesh: Mesh | None, state: BatchState, tokens: jax.Array, rows: Any, done: jax.Array
) -> BatchState:
    """Append the emitted tokens to the histories, and to what is kept of them."""
    b, width = tokens.shape
    at = jnp.where(tokens >= 0, rows.num_tokens[:, None] + jnp.arange(width), state.tokens.shape[1])
    emitted = jnp.sum(tokens >= 0, axis=1)
    history = state.tokens.at[jnp.arange(b)[:, None], at].set(tokens, mode="drop")
    section = state.section
    if sampler.markers is not None:
        sections = jax.vmap(partial(sections_of_window, sampler.markers), in_axes=(0, 0, 0, None))(
            section[:b], history[:b], rows.num_tokens, width
        )
        section = section.at[:b].set(jnp.take_along_axis(sections, emitted[:, None], axis=1)[:, 0])
    return replace(
        state,
        tokens=history,
        active=state.active.at[:b].set(state.active[:b] & ~done),
        drafts=state.drafts.at[:b].set(-1),
        section=section,
        use=use_of_emitted(mesh, state.use, tokens),
        rows=replace(state.rows, num_tokens=state.rows.num_tokens.at[:b].set(rows.num_tokens + emitted)),
    )
