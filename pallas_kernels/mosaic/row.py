"""Rows of logits as kernels take them, and one of them inside a kernel: its statistics, its tiles, the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_shape import CHUNKS, BlockShape
from pallas_kernels.compat import load
from pallas_kernels.draw import TILE
from pallas_kernels.mosaic.statistics import (
    HEIGHT,
    IN_TILE,
    ROWS,
    SEGMENT,
    first_tile,
    segment_statistics,
    tile_of_slot,
)
from pallas_kernels.threshold import Function, Row


class Arrays(NamedTuple):
    """segments [R, n * 16, 16] and tiles [R, n, 256], views of the same rows; maxima and sums [R, slots, 16], of the
    segments."""

    segments: Any
    tiles: Any
    maxima: Any
    sums: Any


def read_rows(logits: jax.Array, temperature: jax.Array, shape: BlockShape, interpret: Any) -> tuple[Arrays, jax.Array]:
    """Of logits [R, V] and temperatures [R] > 0: what kernels take, and the maximum of every row, NaN where it has one.
    Where V is a multiple of 256 and at least 16384, and the logits are float32, nothing is copied."""
    vocab = logits.shape[1]
    tiles = max(-(-vocab // TILE), HEIGHT)
    x = jnp.pad(logits.astype(jnp.float32), ((0, 0), (0, tiles * TILE - vocab)), constant_values=-jnp.inf)
    segments = x.reshape(-1, tiles * IN_TILE, SEGMENT)
    maxima, sums = segment_statistics(segments, 1 / temperature, shape.tiles, interpret)
    # A maximum may lose a NaN on the way, a sum never does.
    top = jnp.where(jnp.any(jnp.isnan(sums), axis=1), jnp.nan, jnp.max(maxima, axis=1))
    slots = (-1, maxima.shape[1] // IN_TILE, IN_TILE)
    return Arrays(segments, x.reshape(-1, tiles, TILE), maxima.reshape(slots), sums.reshape(slots)), top


def vector_size(slots: int) -> int:
    """Entries of a vector in shared memory with room for `slots`: what a warpgroup reads at once."""
    return -(-slots // 128) * 128


class RowKernel:
    """Row `at` of arrays, whose scalars are `row`. n: tiles; slots: of statistics."""

    def __init__(self, arrays: Arrays, at: Any, row: Row, shape: BlockShape, interpret: Any) -> None:
        self.arrays, self.at, self.row, self.shape = arrays, at, row, shape
        self.load = partial(load, interpret=interpret)
        self.n, self.slots = arrays.tiles.shape[1], arrays.maxima.shape[1]

    def tile_of_slot(self, slot: Any) -> Any:
        return tile_of_slot(slot, self.n, self.shape.tiles)

    def tile(self, tile: Any) -> tuple[jax.Array, jax.Array]:
        """Values and ids of one tile, [256]."""
        layout = plgpu.Layout.WG_STRIDED((TILE,), vec_size=2)
        ids = tile * TILE + jax.lax.broadcasted_iota(jnp.int32, (TILE,), 0)
        return self.load(self.arrays.tiles, (self.at, tile), layout), ids

    def vector(self, ref: Any) -> tuple[jax.Array, jax.Array]:
        """A vector in shared memory that was just written, and its indices."""
        plgpu.commit_smem()
        x = self.load(ref, (), plgpu.Layout.WG_STRIDED(ref.shape, vec_size=1))
        return x, jax.lax.broadcasted_iota(jnp.int32, ref.shape, 0)

    def greedy(self) -> Any:
        """The lowest id of the largest value."""

        def slot(maxima: jax.Array, sums: jax.Array, slot: jax.Array) -> jax.Array:
            return jnp.where(maxima == self.row.top, slot, self.slots - 1)

        x, ids = self.tile(self.tile_of_slot(self.fold_statistics("min", slot)))
        return jnp.min(jnp.where(x == self.row.top, ids, self.n * TILE - 1))

    def kept(self, x: jax.Array, ids: jax.Array, value: Any, last: Any) -> jax.Array:
        """Weights of what is not behind the last survivor."""
        return jnp.where((x > value) | ((x == value) & (ids <= last)), self.row.weight(x), 0.0)

    # ---- statistics of segments, from L2 in chunks that fit in registers

    def for_statistics(self, function: Callable[[Any, jax.Array, jax.Array], None]) -> None:
        """function(first slot, maxima, sums [chunk, 16]) for all slots."""
        size = self.chunk()

        def chunk(i: Any, carry: Any) -> Any:
            function(i * size, *self.statistics(i * size, size))
            return carry

        jax.lax.fori_loop(0, self.slots // size, chunk, jnp.int32(0))

    def fold_statistics(self, kind: str, function: Callable[..., jax.Array]) -> Any:
        """The "sum", "min" or "max" of function(maxima, sums, slot) over all segments."""
        size = self.chunk()

        def chunk(i: Any) -> jax.Array:
            slot = i * size + jax.lax.broadcasted_iota(jnp.int32, (size, IN_TILE), 0)
            return function(*self.statistics(i * size, size), slot)

        return fold(kind, chunk, self.slots // size)

    def statistics(self, start: Any, size: int) -> tuple[jax.Array, jax.Array]:
        at = (self.at, pl.ds(start, size))
        return self.load(self.arrays.maxima, at, ROWS), self.load(self.arrays.sums, at, ROWS)

    def sum_statistics(self, sums: Any) -> None:
        """Write to sums [slots] the weights of the tiles, where nothing is filtered."""

        def write(start: Any, maxima: jax.Array, inside: jax.Array) -> None:
            weighted = jnp.sum(inside * self.row.weight(maxima), axis=1)
            sums[pl.ds(start, len(weighted))] = weighted

        self.for_statistics(write)

    def chunk(self) -> int:
        return chunk_of(self.slots, self.shape)

    # ---- the whole row, in parts of 64 tiles

    @property
    def num_blocks(self) -> int:
        return -(-self.n // HEIGHT)

    def fold_row(self, kind: str, function: Function) -> Any:
        parts = TILE // self.shape.part
        return fold(kind, lambda i: function(*self.block(i // parts, i % parts)), self.num_blocks * parts)

    def sum_tiles(self, function: Callable[[Any, Any], tuple[jax.Array, ...]], sums: tuple[Any, ...]) -> None:
        """Write to each of sums [slots] the sums over tiles of what function(block, part) returns for it, [64, part].
        The tile of a place is `tile_at`."""

        def one(block: Any, carry: Any) -> Any:
            def add(part: Any, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                weights = function(block, part)
                return tuple(total + jnp.sum(x, axis=1) for total, x in zip(totals, weights, strict=True))

            first = tuple(jnp.sum(x, axis=1) for x in function(block, 0))
            totals = jax.lax.fori_loop(1, TILE // self.shape.part, add, first)
            for ref, total in zip(sums, totals, strict=True):
                ref[pl.ds(block * HEIGHT, HEIGHT)] = total
            return carry

        jax.lax.fori_loop(0, self.num_blocks, one, jnp.int32(0))

    def tile_at(self, place: Any) -> Any:
        """The tile whose sum `sum_tiles` wrote to a place."""
        return tile_of_slot(place, self.n, HEIGHT)

    def block(self, i: Any, part: Any) -> tuple[jax.Array, jax.Array]:
        """Values and ids of a part of 64 tiles, [64, part]; -inf where the block before had them."""
        start, width = first_tile(i, self.n, HEIGHT), self.shape.part
        x = self.load(self.arrays.tiles, (self.at, pl.ds(start, HEIGHT), pl.ds(part * width, width)), ROWS)
        tile = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        ids = tile * TILE + part * width + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.where(tile >= i * HEIGHT, x, -jnp.inf), ids


def chunk_of(slots: int, shape: BlockShape) -> int:
    """Slots whose statistics are looked at together."""
    return next(size for size in reversed(CHUNKS) if size <= shape.chunk and slots % size == 0)


def fold(kind: str, part: Callable[[Any], jax.Array], count: int) -> Any:
    """The "sum", "min" or "max" over part(0) to part(count - 1), each [n, w]."""
    combine: Callable[[Any, Any], Any] = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[kind]
    return jax.lax.fori_loop(
        1, count, lambda i, carry: combine(carry, fold_all(kind, part(i))), fold_all(kind, part(0))
    )


def fold_all(kind: str, x: jax.Array) -> Any:
    """The sum, minimum or maximum of [n, w], in two steps: layouts of rows have no reduction in one."""
    reductions: dict[str, Callable[..., jax.Array]] = {"sum": jnp.sum, "min": jnp.min, "max": jnp.max}
    reduce = reductions[kind]
    return reduce(reduce(x, axis=1), axis=0)
