"""Sampling over a mesh of devices, whose logits leave the model split by vocabulary.

By rows: one all-to-all deals the rows out, every device does the whole last step for its own, and only tokens are
exchanged. By vocabulary, for fewer rows than devices: every device keeps its part of every row, and small sums and
candidates are exchanged. Both give the tokens of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.checks import check_rows
from pallas_kernels.distribution import Distribution, Filters, is_finite
from pallas_kernels.draw import TILE, WORDS, pick
from pallas_kernels.filters import CANDIDATES, Threshold, most_probable
from pallas_kernels.threshold import LOWEST, NOBODY, Function, Row, Window, find, key
from pallas_kernels.top_k_top_p import Drawn, apply_mask, top_k_top_p_sample

_WHOLE = PartitionSpec()


def by_rows(mesh: Mesh, axis: str, function: Callable[..., Any], logits: jax.Array, rows: Any) -> Any:
    """function(logits [n, V], rows [n, ...]) of every device's rows, put together: a pytree of [R, ...] on all devices.

    logits: [R, V], split by vocabulary over `axis` (where the axis divides V; whole where not). rows: a pytree of
    [R, ...], the same on all devices. Row r belongs to device r mod G, so that the devices are equally busy when only
    the first few rows count. R is padded to a multiple of G with copies of the last row.
    """
    size, (count, vocab) = mesh.shape[axis], logits.shape
    split = PartitionSpec(None, axis) if vocab % size == 0 else _WHOLE
    missing = -count % size
    logits, rows = jax.tree.map(lambda x: jnp.pad(x, _more(x, missing), mode="edge"), (logits, rows))

    def own(logits: jax.Array, rows: Any) -> Any:
        device = jax.lax.axis_index(axis)
        mine, rows = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x.reshape(-1, size, *x.shape[1:]), device, 1, False), (logits, rows)
        )
        if split is not _WHOLE:
            mine = jax.lax.all_to_all(logits.reshape(-1, size, logits.shape[1]), axis, 1, 2, tiled=True)[:, 0]
        return jax.tree.map(lambda x: _interleave(jax.lax.all_gather(x, axis)), function(mine, rows))

    dealt = jax.shard_map(own, mesh=mesh, in_specs=(split, _WHOLE), out_specs=_WHOLE, check_vma=False)
    logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, split))
    return jax.tree.map(lambda x: x[:count], dealt(logits, rows))


def sample_by_rows(
    mesh: Mesh,
    axis: str,
    logits: jax.Array,
    filters: Filters,
    words: jax.Array,
    valid: jax.Array | None = None,
    *,
    mask: jax.Array | None = None,
    **options: Any,
) -> Drawn:
    """`top_k_top_p_sample` with the rows dealt out over `axis`; everything but mesh and axis is as there."""
    check_rows(logits, filters, words, valid, mask)

    def sample(logits: jax.Array, rows: Any) -> Drawn:
        filters, words, valid, mask = rows
        return top_k_top_p_sample(logits, filters, words, valid, mask=mask, **options)

    return by_rows(mesh, axis, sample, logits, (filters, words, valid, mask))


def sample_by_vocabulary(
    mesh: Mesh,
    axis: str,
    logits: jax.Array,
    filters: Filters,
    words: jax.Array,
    valid: jax.Array | None = None,
    *,
    mask: jax.Array | None = None,
) -> Drawn:
    """`top_k_top_p_sample` with every row split over `axis`, which must divide V.

    Exchanged are, of every row, a few scalars, 64 candidates a device, the sums of V / 256 tiles and one tile. A row
    that the candidates do not decide takes some 60 sums more. Sums have another order than on one device, so where the
    draw falls within rounding (1e-7) of a boundary between tokens, the token may be the neighbour. The other arguments,
    and what is raised, are as of `top_k_top_p_sample`; there is no log-probability.
    """
    check_rows(logits, filters, words, valid, mask)
    size, (rows, vocab) = mesh.shape[axis], logits.shape
    if vocab % size:
        raise ValueError(f"vocabulary has {vocab} entries; axis {axis!r} of {size} devices must divide it")
    own = partial(_sample_part, axis, vocab)
    split = PartitionSpec(None, axis)
    sample = jax.shard_map(own, mesh=mesh, in_specs=(split, _WHOLE, _WHOLE, _WHOLE), out_specs=_WHOLE, check_vma=False)
    logits = logits.astype(jnp.float32)
    if mask is not None:
        logits = apply_mask(logits, mask)
    logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, split))
    return sample(logits, filters, words, jnp.ones(rows, bool) if valid is None else valid)


def _sample_part(
    axis: str, vocab: int, logits: jax.Array, filters: Filters, words: jax.Array, valid: jax.Array
) -> Drawn:
    """On one device: logits [R, V / G], everything else as a whole."""
    start = jax.lax.axis_index(axis) * logits.shape[1]
    ids = start + jnp.arange(logits.shape[1], dtype=jnp.int32)
    bad = jax.lax.psum(jnp.any(jnp.isnan(logits), axis=1).astype(jnp.int32), axis) > 0
    top = jnp.where(bad, jnp.nan, jax.lax.pmax(jnp.max(logits, axis=1), axis))
    greedy = jax.lax.pmin(jnp.min(jnp.where(logits == top[:, None], ids, vocab - 1), axis=1), axis)
    random = is_finite(top) & (filters.temperature > 0) & valid
    best, temperature = jnp.where(random, top, 0.0), jnp.where(random, filters.temperature, 1.0)

    def draw() -> jax.Array:
        threshold = _threshold(axis, vocab, logits, ids, best, temperature, filters, random)
        return _draw_part(axis, vocab, logits, start, Distribution(best, temperature, threshold), words)

    token = jax.lax.cond(jnp.any(random), lambda: jnp.where(random, draw(), greedy), lambda: greedy)
    return Drawn(token, is_finite(top))


def _threshold(
    axis: str,
    vocab: int,
    logits: jax.Array,
    ids: jax.Array,
    top: jax.Array,
    temperature: jax.Array,
    filters: Filters,
    random: jax.Array,
) -> Threshold:
    """The last survivors: by candidates of all devices, and, for rows that these do not decide, by the whole row."""
    limited = (filters.top_k > 0) & (filters.top_k < vocab)
    off = ~random | ~(limited | (filters.top_p < 1) | (filters.min_p > 0))
    rows = Row(top, temperature, jnp.log(filters.min_p), jnp.where(limited, filters.top_k, 0), filters.top_p)
    size = min(CANDIDATES, logits.shape[1])
    values, at = most_probable(jnp.where(logits == 0, 0.0, logits), size)
    keys = key(values[:, -1])
    lowest = jax.lax.pmax(keys, axis) + 1 if size < logits.shape[1] else jnp.full_like(keys, LOWEST)
    values, at = (jax.lax.all_gather(x, axis, axis=1, tiled=True) for x in (values, ids[at]))

    def among_candidates(
        row: Row, x: jax.Array, lowest: jax.Array, values: jax.Array, at: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        below = key(x) < lowest
        behind = jax.lax.psum(jnp.sum(jnp.where(below, row.weight(x), 0.0)), axis)
        alive = jax.lax.psum(jnp.sum(below & row.alive(x)), axis)
        return find(row, Window(partial(_fold, values, at, None), lowest, alive == 0, behind, key(row.top)))

    def whole_row(row: Row, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        fold = partial(_fold, x, ids, axis)
        return find(row, Window(fold, jnp.int32(LOWEST), jnp.bool_(True), jnp.float32(0), key(row.top)))[:2]

    value, last, known = jax.vmap(among_candidates)(rows, logits, lowest, values, at)
    value, last = jax.lax.cond(
        jnp.all(known | off),
        lambda: (value, last),
        lambda: jax.tree.map(lambda a, b: jnp.where(known, a, b), (value, last), jax.vmap(whole_row)(rows, logits)),
    )
    return Threshold(jnp.where(off, -jnp.inf, value), jnp.where(off, NOBODY, last))


def _fold(x: jax.Array, ids: jax.Array, axis: str | None, kind: str, function: Function) -> jax.Array:
    """`Window.fold` over entries of one row, [n], here or, with an axis, on all devices."""
    reductions: dict[str, tuple[Any, Any]] = {
        "sum": (jnp.sum, jax.lax.psum),
        "min": (jnp.min, jax.lax.pmin),
        "max": (jnp.max, jax.lax.pmax),
    }
    reduce, across = reductions[kind]
    result = reduce(function(x, ids))
    return result if axis is None else across(result, axis)


def _draw_part(
    axis: str, vocab: int, logits: jax.Array, start: jax.Array, distribution: Distribution, words: jax.Array
) -> jax.Array:
    """`draw` where every device has a part of each row: tiles that a boundary cuts through are summed by two."""
    rows, width = logits.shape
    count, base = -(-vocab // TILE), start // TILE
    room = (-(-width // TILE) + 1) * TILE  # for the part at any offset in its first tile
    part = jax.lax.dynamic_update_slice(jnp.full((rows, room), -jnp.inf), logits, (0, start % TILE))
    tiles = part.reshape(rows, -1, TILE)
    ids = base * TILE + jnp.arange(room, dtype=jnp.int32).reshape(-1, TILE)
    sums = distribution.weight(tiles, ids).sum(-1)
    everywhere = jnp.zeros((rows, count + tiles.shape[1]))
    sums = jax.lax.psum(jax.lax.dynamic_update_slice(everywhere, sums, (0, base)), axis)[:, :count]
    tile = pick(sums, words[:, :WORDS])[:, None]
    here = (tile >= base) & (tile < base + tiles.shape[1])
    local = jnp.clip(tile - base, 0, tiles.shape[1] - 1)
    chosen = jnp.where(here, jnp.take_along_axis(tiles, local[:, :, None], axis=1)[:, 0], -jnp.inf)
    chosen = jax.lax.pmax(chosen, axis)
    at = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
    return tile[:, 0] * TILE + pick(distribution.weight(chosen[:, None], at[:, None])[:, 0], words[:, WORDS:])


def _interleave(x: jax.Array) -> jax.Array:
    """[G, n, ...] -> [n * G, ...] in order of rows."""
    return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])


def _more(x: jax.Array, missing: int) -> list[tuple[int, int]]:
    return [(0, missing)] + [(0, 0)] * (x.ndim - 1)
