"""The device step: two programs over the same state.

`prefill` stores keys and values of prompt tokens and samples nothing; it leaves a prompt's last token to `decode`,
which runs every request's newest token (and its drafts), samples, verifies, and writes the result into the batch. So
the step from logits to tokens exists once.

Axes: S slots of the batch, B the leading slots a program runs over (a bucket), K drafts, N prefill tiles of Q
positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from jaxserve.batch import BatchState
from jaxserve.sampling.sampler import Sampled, SamplingRows, sample
from models.base import Array, ForwardInputs, Model, page_of
from models.sharding import constrain


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
    """Tiles of prompts. slot, start, count: [N] int32; a tile is positions start .. start + count - 1, count 0 none."""

    slot: Array
    start: Array
    count: Array


@struct.dataclass
class StepOutput:
    """What the host learns. tokens [B, 1+K] int32, -1 after the last; logprobs [B, 1+K] float32; finite [B] bool."""

    tokens: Array
    logprobs: Array
    finite: Array


def prefill(
    model: Model,
    mesh: Mesh | None,
    tile: int,
    pages: int,
    params: Any,
    cache: Cache,
    state: BatchState,
    plan: PrefillPlan,
) -> Cache:
    """Store the KV of the planned tiles. `pages` bounds the context that attention runs over."""
    offset = jnp.arange(tile, dtype=jnp.int32)
    positions = jnp.where(offset < plan.count[:, None], plan.start[:, None] + offset, -1)  # [N, Q]
    tokens = state.tokens[plan.slot[:, None], jnp.maximum(positions, 0)]
    inputs = ForwardInputs(tokens, positions, state.block_tables[plan.slot, :pages])
    _, cache = _forward(model, mesh, params, cache, inputs)
    return cache


def decode(
    model: Model,
    mesh: Mesh | None,
    vocab_limit: int,
    pages: int,
    params: Any,
    cache: Cache,
    state: BatchState,
    run: jax.Array,  # [B] bool, which of the leading slots take part
) -> tuple[Cache, BatchState, StepOutput]:
    """One token for every running request, or as many as its drafts were right about.

    vocab_limit: ids from here on are padding of the logits and never emitted.
    """
    b, k = run.shape[0], state.drafts.shape[1]
    rows = jax.tree.map(lambda x: x[:b], state.rows)
    run = run & state.active[:b]
    drafts = state.drafts[:b]
    n_drafts = jnp.sum(jnp.cumprod(drafts >= 0, axis=1), axis=1)  # [B]

    last = rows.num_tokens - 1
    offset = jnp.arange(1 + k, dtype=jnp.int32)
    used = run[:, None] & (offset <= n_drafts[:, None])  # [B, 1+K]
    newest = jnp.take_along_axis(state.tokens[:b], last[:, None], axis=1)
    inputs = ForwardInputs(
        tokens=jnp.concatenate([newest, jnp.maximum(drafts, 0)], axis=1),
        positions=jnp.where(used, last[:, None] + offset, -1),
        block_tables=state.block_tables[:b, :pages],
    )
    hidden, cache = _forward(model, mesh, params, cache, inputs)
    logits = model.logits(params, hidden.reshape(b * (1 + k), -1))  # [R, V]
    if vocab_limit < logits.shape[1]:
        logits = jnp.where(jnp.arange(logits.shape[1]) < vocab_limit, logits, -jnp.inf)
    with jax.named_scope("sample"):
        sampled = sample_rows(logits, _sampling_rows(rows, used), mesh)
    with jax.named_scope("commit"):
        tokens, finite = verify(sampled, drafts, used)
        tokens, done = _stop(tokens, rows, finite)
        state = _commit(state, tokens, rows, run & done)
    return cache, state, StepOutput(tokens, sampled.logprob.reshape(b, 1 + k), finite | ~run)


def _forward(
    model: Model, mesh: Mesh | None, params: Any, cache: Cache, inputs: ForwardInputs
) -> tuple[jax.Array, Cache]:
    hidden, kv = model.forward(params, cache.kv, inputs, mesh)
    if cache.boundary is None:
        return hidden, replace(cache, kv=kv)
    size = cache.block_size
    ends = (inputs.positions >= 0) & (inputs.positions % size == size - 1)
    page = page_of(inputs.block_tables, inputs.positions, size)
    boundary = cache.boundary.at[jnp.where(ends, page, 0)].set(hidden.astype(cache.boundary.dtype))
    return hidden, replace(cache, kv=kv, boundary=boundary)


def _sampling_rows(rows: Any, used: jax.Array) -> SamplingRows:
    """Per-slot parameters repeated for the 1+K rows of each slot."""
    b, width = used.shape

    def each(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, width, axis=0)

    position = (rows.num_tokens - rows.prompt_len)[:, None] + jnp.arange(width, dtype=jnp.int32)
    return SamplingRows(
        filters=jax.tree.map(each, rows.filters),
        seed=each(rows.seed),
        position=position.reshape(b * width),
        want_logprob=each(rows.want_logprob),
        valid=used.reshape(b * width),
    )


def sample_rows(logits: jax.Array, rows: SamplingRows, mesh: Mesh | None) -> Sampled:
    """`sample`, with the rows dealt out over the mesh.

    The logits come out of lm_head split by vocabulary; splitting them by row instead is one all-to-all, after which
    every device does the whole last step for its own rows. Only token ids are exchanged afterwards.
    """
    if mesh is None or mesh.size == 1:
        return sample(logits, rows)
    count = logits.shape[0]
    pad = -count % mesh.size
    if pad:
        logits, rows = jax.tree.map(lambda x: jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))), (logits, rows))

    def own_rows(logits: jax.Array, rows: SamplingRows) -> Sampled:
        own = logits.shape[0]
        first = jax.lax.axis_index("tp") * own
        mine = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, own), rows)
        return jax.tree.map(lambda x: jax.lax.all_gather(x, "tp", tiled=True), sample(logits, mine))

    # Only the logits are dealt out. The batch stays whole: a row sharding that leaked into the token
    # history would be undone by gathering the history.
    deal = jax.shard_map(
        own_rows, mesh=mesh, in_specs=(PartitionSpec("tp"), PartitionSpec()), out_specs=PartitionSpec(), check_vma=False
    )
    return jax.tree.map(lambda x: x[:count], deal(constrain(logits, (None, "vocab"), mesh), rows))


def verify(sampled: Sampled, drafts: jax.Array, used: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Coupled verification: a draft is accepted iff it is what was drawn at its position.

    Every position is drawn with its own (seed, position) randomness: the tokens are the same with and without drafts.
    drafts [B, K], used [B, 1+K]. Returns tokens [B, 1+K], -1 where nothing is emitted, and finite [B]: False where the
    first row that counts had no distribution.
    """
    b, width = used.shape
    drawn = sampled.token.reshape(b, width)
    fine = sampled.finite.reshape(b, width)
    right = jnp.cumprod((drafts == drawn[:, :-1]) & used[:, 1:], axis=1).astype(bool)  # [B, K]
    reached = used & jnp.concatenate([jnp.ones((b, 1), bool), right], axis=1)
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


def _commit(state: BatchState, tokens: jax.Array, rows: Any, done: jax.Array) -> BatchState:
    """Append the emitted tokens to the histories."""
    b, width = tokens.shape
    at = jnp.where(tokens >= 0, rows.num_tokens[:, None] + jnp.arange(width), state.tokens.shape[1])
    num_tokens = rows.num_tokens + jnp.sum(tokens >= 0, axis=1)
    return replace(
        state,
        tokens=state.tokens.at[jnp.arange(b)[:, None], at].set(tokens, mode="drop"),
        active=state.active.at[:b].set(state.active[:b] & ~done),
        drafts=state.drafts.at[:b].set(-1),
        rows=replace(state.rows, num_tokens=state.rows.num_tokens.at[:b].set(num_tokens)),
    )
