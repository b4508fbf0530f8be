"""top_k_top_p_sample in two Mosaic GPU kernels.

Byte plan for one row of V float32 logits (V = 128256: 513 KB), where the ideal is to read it once:

1. `statistics`: the row is read from HBM once; of every segment of 16 entries the maximum and the sum of weights are
   written, V / 2 bytes (64 KB).
2. `sample`, one block a row: the statistics are read from L2, once for each step of a bisection.
   - No filter: the sums of tiles are sums of statistics. The tile that is drawn is read again: 1 KB.
   - Filters: a bisection over the maxima finds a value that at most 64 segments reach; these hold everything from there
     up. They are fetched by TMA, 4 KB, and searched in shared memory. If they show where top_k or the nucleus ends
     (top_k <= 56 always does but for ties; a nucleus of real text does), the draw needs nothing else.
   - A row that they do not decide, a flat nucleus or a large top_k, is searched whole: 20 to 60 passes over 513 KB in
     L2, the only case in which the row is read more than once.

So 64 rows of 128256 take 33 MB of reads from HBM, 10 us at 3.35 TB/s, and 4 MB each way in L2 for the statistics. A
radix sort moves 0.3 to 0.6 GB. Nothing of the size of the logits is written, but where V is not a multiple of 256, or
less than 16384, or the logits are not float32: then XLA makes a padded copy, fused into what makes the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import load, mosaic_kernel
from pallas_kernels.distribution import Filters, is_finite
from pallas_kernels.draw import TILE
from pallas_kernels.mosaic.pick import pick
from pallas_kernels.mosaic.statistics import (
    BLOCK,
    IN_TILE,
    ROWS,
    SEGMENT,
    first_tile,
    num_blocks,
    segment_statistics,
    tile_of_slot,
)
from pallas_kernels.threshold import LOWEST, NOBODY, Function, Row, Window, find, key, middle

CANDIDATES = 64  # segments
ENOUGH = 56  # a cut that leaves so many of them is as good as one that leaves all
PART = 64  # entries of a tile that are looked at together: 32 registers a thread
IDLE, PLAIN, FILTERED = 0, 1, 2  # what a row asks for


def sample_random(
    logits: jax.Array, filters: Filters, words: jax.Array, valid: jax.Array | None, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Token [R] int32 and top [R] float32, the row's maximum (NaN where it holds one). logits: [R, V]."""
    vocab = logits.shape[1]
    tiles = max(-(-vocab // TILE), BLOCK)
    x = jnp.pad(logits.astype(jnp.float32), ((0, 0), (0, tiles * TILE - vocab)), constant_values=-jnp.inf)
    temperature = jnp.where(filters.temperature > 0, filters.temperature, 1.0)
    segments = x.reshape(-1, tiles * IN_TILE, SEGMENT)
    maxima, sums = segment_statistics(segments, 1 / temperature, interpret)
    # A maximum may lose a NaN on the way, a sum never does.
    top = jnp.where(jnp.any(jnp.isnan(sums), axis=1), jnp.nan, jnp.max(maxima, axis=1))
    limited = (filters.top_k > 0) & (filters.top_k < vocab)
    filtered = limited | (filters.top_p < 1) | (filters.min_p > 0)
    random = (filters.temperature > 0) & is_finite(top)
    if valid is not None:
        random &= valid
    task = jnp.where(random, jnp.where(filtered, FILTERED, PLAIN), IDLE)
    floats = jnp.stack([top, temperature, jnp.log(filters.min_p), filters.top_p], axis=1)
    ints = jnp.stack([task, jnp.where(limited, filters.top_k, 0), key(top)], axis=1).astype(jnp.int32)
    words = jax.lax.bitcast_convert_type(words, jnp.int32)
    shape = (-1, num_blocks(tiles) * BLOCK, IN_TILE)
    arrays = (segments, x.reshape(-1, tiles, TILE), maxima.reshape(shape), sums.reshape(shape))
    return _sample_kernel(arrays, floats.astype(jnp.float32), ints, words, interpret), top


def _sample_kernel(
    arrays: tuple[jax.Array, ...], floats: jax.Array, ints: jax.Array, words: jax.Array, interpret: Any
) -> jax.Array:
    rows, slots, _ = arrays[2].shape
    vector = -(-slots // 128) * 128  # what a warpgroup reads at once

    def body(*refs: Any) -> None:
        _Kernel(refs, interpret).run()

    kernel = mosaic_kernel(
        body,
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((rows,), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        scratch_types=[
            plgpu.SMEM((CANDIDATES, SEGMENT), jnp.float32),
            plgpu.SMEM((vector,), jnp.int32),
            plgpu.SMEM((vector,), jnp.float32),
            plgpu.Barrier(num_arrivals=CANDIDATES),
        ],
    )
    return kernel(*arrays, floats, ints, words)


class _Kernel:
    """One row. Refs: segments [R, n * 16, 16], tiles [R, n, 256], maxima and sums of slots [R, slots, 16], parameters;
    the token [R]; shared memory: candidate segments [64, 16], which segments of a slot are candidates [slots], sums of
    tiles [slots]."""

    def __init__(self, refs: tuple[Any, ...], interpret: Any) -> None:
        self.segments, self.tiles, self.maxima, self.sums, floats, ints, words, self.token = refs[:8]
        self.candidates, self.hits, self.tile_sums, self.barrier = refs[8:]
        self.load = partial(load, interpret=interpret)
        self.at = jax.lax.axis_index("row")
        self.n, self.slots = self.tiles.shape[1], self.maxima.shape[1]
        self.task = ints[self.at, 0]
        self.words = tuple(words[self.at, i] for i in range(8))
        top, temperature, floor, top_p = (floats[self.at, i] for i in range(4))
        self.top = ints[self.at, 2]  # its key: a kernel has no bitcast of a scalar
        self.row = Row(top, temperature, floor, ints[self.at, 1], top_p)

    def run(self) -> None:
        self.token[self.at] = jax.lax.cond(self.task == IDLE, self.greedy, self.random)

    def greedy(self) -> Any:
        def slot(maxima: jax.Array, sums: jax.Array, slot: jax.Array) -> jax.Array:
            return jnp.where(maxima == self.row.top, slot, self.slots - 1)

        tile = tile_of_slot(self.fold_statistics("min", slot), self.n)
        x, ids = self.tile(tile)
        return tile * TILE + jnp.min(jnp.where(x == self.row.top, ids, TILE - 1))

    def random(self) -> Any:
        value, last, tile = jax.lax.cond(self.task == FILTERED, self.filtered, self.plain)
        x, ids = self.tile(tile)
        kept = (x > value) | ((x == value) & (tile * TILE + ids <= last))
        return tile * TILE + pick(jnp.where(kept, self.row.weight(x), 0.0), self.words[4:])

    def tile(self, tile: Any) -> tuple[jax.Array, jax.Array]:
        """Values and positions of one tile, [256]."""
        layout = plgpu.Layout.WG_STRIDED((TILE,), vec_size=2)
        return self.load(self.tiles, (self.at, tile), layout), jax.lax.broadcasted_iota(jnp.int32, (TILE,), 0)

    # ---- no filter

    def plain(self) -> tuple[Any, Any, Any]:
        def sums(start: Any, maxima: jax.Array, sums: jax.Array) -> None:
            weighted = jnp.sum(sums * self.row.weight(maxima), axis=1)
            self.tile_sums[pl.ds(start, len(weighted))] = weighted

        self.for_statistics(sums)
        return jnp.float32(-jnp.inf), jnp.int32(NOBODY), self.pick_tile()

    def pick_tile(self) -> Any:
        sums, ids = self.vector(self.tile_sums)
        return tile_of_slot(pick(jnp.where(ids < self.slots, sums, 0.0), self.words[:4]), self.n)

    def vector(self, ref: Any) -> tuple[jax.Array, jax.Array]:
        """A vector in shared memory that was just written, and its indices."""
        plgpu.commit_smem()
        x = self.load(ref, (), plgpu.Layout.WG_STRIDED(ref.shape, vec_size=1))
        return x, jax.lax.broadcasted_iota(jnp.int32, ref.shape, 0)

    # ---- statistics of segments, from L2 in chunks that fit in registers

    def for_statistics(self, function: Callable[[Any, jax.Array, jax.Array], None]) -> None:
        """function(first slot, maxima, sums [chunk, 16]) for all slots."""
        size = chunk_of(self.slots)

        def chunk(i: Any, carry: Any) -> Any:
            at = (self.at, pl.ds(i * size, size))
            function(i * size, self.load(self.maxima, at, ROWS), self.load(self.sums, at, ROWS))
            return carry

        jax.lax.fori_loop(0, self.slots // size, chunk, jnp.int32(0))

    def fold_statistics(self, kind: str, function: Callable[..., jax.Array]) -> Any:
        """The "sum", "min" or "max" of function(maxima, sums, slot) over all segments."""
        size = chunk_of(self.slots)

        def chunk(i: Any) -> jax.Array:
            at = (self.at, pl.ds(i * size, size))
            slot = i * size + jax.lax.broadcasted_iota(jnp.int32, (size, IN_TILE), 0)
            return function(self.load(self.maxima, at, ROWS), self.load(self.sums, at, ROWS), slot)

        return _fold(kind, chunk, self.slots // size)

    # ---- filters, by the segments that hold the largest values

    def filtered(self) -> tuple[Any, Any, Any]:
        window, numbers = self.gather()
        value, last, certain = find(self.row, window)
        return jax.lax.cond(certain, lambda: self.draw_candidate(numbers, value, last), self.whole_row)

    def gather(self) -> tuple[Window, jax.Array]:
        """Fetch the segments; what is known of the rest, and the segments' numbers [64]."""
        lowest = self.lowest_candidate()

        def hits(start: Any, maxima: jax.Array, sums: jax.Array) -> None:
            column = jax.lax.broadcasted_iota(jnp.int32, maxima.shape, 1)
            found = jnp.sum(jnp.where(key(maxima) >= lowest, jnp.int32(1) << column, 0), axis=1)
            self.hits[pl.ds(start, len(found))] = found

        self.for_statistics(hits)
        numbers = self.fetch()

        def fold(kind: str, function: Function) -> Any:
            return _all(kind, function(*self.candidate_values(numbers)))

        def mass_behind(maxima: jax.Array, sums: jax.Array, slot: jax.Array) -> jax.Array:
            return jnp.where(key(maxima) < lowest, sums * self.row.weight(maxima), 0.0)

        def alive_behind(maxima: jax.Array, sums: jax.Array, slot: jax.Array) -> jax.Array:
            return jnp.where((key(maxima) < lowest) & self.row.alive(maxima), 1, 0)

        behind = self.fold_statistics("sum", mass_behind) + fold(
            "sum", lambda x, ids: jnp.where(key(x) < lowest, self.row.weight(x), 0.0)
        )
        alive = self.fold_statistics("sum", alive_behind) + fold(
            "sum", lambda x, ids: jnp.where((key(x) < lowest) & self.row.alive(x), 1, 0)
        )
        return Window(fold, lowest, alive == 0, behind, self.top), numbers

    def lowest_candidate(self) -> Any:
        """A key that at most 64 segments reach: the smallest, or one that nearly as many reach."""

        def step(bounds: tuple[Any, Any]) -> tuple[Any, Any]:
            low, high = bounds
            mid = middle(low, high)
            number = self.fold_statistics("sum", lambda maxima, sums, slot: jnp.where(key(maxima) >= mid, 1, 0))
            low = jnp.where((number > CANDIDATES) | (number >= ENOUGH), mid, low)
            return low, jnp.where(number > CANDIDATES, high, mid)

        bounds = (jnp.int32(LOWEST), self.top + 1)
        return jax.lax.while_loop(lambda b: middle(*b) > b[0], step, bounds)[1]

    def fetch(self) -> jax.Array:
        """Copy every hit into `candidates`, in order; their numbers [64] int32, -1 where there is no more."""
        bits, ids = self.vector(self.hits)
        bits = jnp.where(ids < self.slots, bits, 0)
        places = jax.lax.broadcasted_iota(jnp.int32, (CANDIDATES,), 0)

        def copy(place: Any, segment: Any) -> None:
            source = self.segments.at[self.at, pl.ds(segment, 1)]
            plgpu.copy_gmem_to_smem(source, self.candidates.at[pl.ds(place, 1)], self.barrier)

        def one_slot(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            place, slot, numbers = state
            first = tile_of_slot(slot, self.n) * IN_TILE

            def one_segment(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
                place, left, numbers = state
                segment = first + 31 - jax.lax.clz(left & -left)
                copy(place, segment)
                return place + 1, left & (left - 1), jnp.where(places == place, segment, numbers)

            place, _, numbers = jax.lax.while_loop(lambda s: s[1] != 0, one_segment, (place, self.hits[slot], numbers))
            return place, jnp.min(jnp.where((bits != 0) & (ids > slot), ids, self.slots)), numbers

        def fill(place: Any, carry: Any) -> Any:
            copy(place, 0)  # the barrier waits for 64 copies
            return carry

        state = (jnp.int32(0), jnp.min(jnp.where(bits != 0, ids, self.slots)), jnp.full((CANDIDATES,), -1, jnp.int32))
        place, _, numbers = jax.lax.while_loop(lambda s: s[1] < self.slots, one_slot, state)
        jax.lax.fori_loop(place, CANDIDATES, fill, jnp.int32(0))
        plgpu.barrier_wait(self.barrier)
        return numbers

    def candidate_values(self, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Values (-inf where there is none) and ids, [64, 16]."""
        x = self.load(self.candidates, (), ROWS)
        number = jax.lax.broadcast_in_dim(numbers, x.shape, (0,))
        ids = number * SEGMENT + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.where(number >= 0, x, -jnp.inf), ids

    def draw_candidate(self, numbers: jax.Array, value: Any, last: Any) -> tuple[Any, Any, Any]:
        """Segments of one tile lie side by side, so a pick of a segment is one of its tile."""
        x, ids = self.candidate_values(numbers)
        kept = (x > value) | ((x == value) & (ids <= last))
        self.tile_sums[pl.ds(0, CANDIDATES)] = jnp.sum(jnp.where(kept, self.row.weight(x), 0.0), axis=1)
        sums, ids = self.vector(self.tile_sums)
        place = pick(jnp.where(ids < CANDIDATES, sums, 0.0), self.words[:4])
        places = jax.lax.broadcasted_iota(jnp.int32, (CANDIDATES,), 0)
        return value, last, jnp.max(jnp.where(places == place, numbers, 0)) // IN_TILE

    # ---- filters, by the whole row

    def whole_row(self) -> tuple[Any, Any, Any]:
        window = Window(self.fold_row, jnp.int32(LOWEST), jnp.bool_(True), jnp.float32(0.0), self.top)
        value, last, _ = find(self.row, window)

        def kept_sums(i: Any, carry: Any) -> Any:
            def kept(part: Any) -> jax.Array:
                x, ids = self.block(i, part)
                weight = jnp.where((x > value) | ((x == value) & (ids <= last)), self.row.weight(x), 0.0)
                return jnp.sum(weight, axis=1)

            total = jax.lax.fori_loop(1, TILE // PART, lambda part, total: total + kept(part), kept(0))
            self.tile_sums[pl.ds(i * BLOCK, BLOCK)] = total
            return carry

        jax.lax.fori_loop(0, num_blocks(self.n), kept_sums, jnp.int32(0))
        return value, last, self.pick_tile()

    def fold_row(self, kind: str, function: Function) -> Any:
        parts = TILE // PART
        return _fold(kind, lambda i: function(*self.block(i // parts, i % parts)), num_blocks(self.n) * parts)

    def block(self, i: Any, part: Any) -> tuple[jax.Array, jax.Array]:
        """Values and ids of a part of 64 tiles, [64, 64]; -inf where the block before had them."""
        start = first_tile(i, self.n)
        x = self.load(self.tiles, (self.at, pl.ds(start, BLOCK), pl.ds(part * PART, PART)), ROWS)
        tile = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        ids = tile * TILE + part * PART + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.where(tile >= i * BLOCK, x, -jnp.inf), ids


def chunk_of(slots: int) -> int:
    """Slots whose statistics are looked at together: 32 registers a thread, or fewer."""
    return next(size for size in (256, 128, 64) if slots % size == 0)


def _fold(kind: str, part: Callable[[Any], jax.Array], count: int) -> Any:
    combine: Callable[[Any, Any], Any] = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[kind]
    return jax.lax.fori_loop(1, count, lambda i, carry: combine(carry, _all(kind, part(i))), _all(kind, part(0)))


def _all(kind: str, x: jax.Array) -> Any:
    """The sum, minimum or maximum of [n, w], in two steps: layouts of rows have no reduction in one."""
    reductions: dict[str, Callable[..., jax.Array]] = {"sum": jnp.sum, "min": jnp.min, "max": jnp.max}
    reduce = reductions[kind]
    return reduce(reduce(x, axis=1), axis=0)
