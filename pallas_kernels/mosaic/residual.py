"""What is left of p when q is taken away, max(share * p - q, 0), without writing it down: its mass, or a draw from it.

Byte plan. Where p's survivors lie in at most 64 segments, as those of most filtered rows do, only these are read, of p
and of q: 8 KB an item, by TMA. Where nothing is filtered and nothing but the draft is taken away, the sums of tiles are
those of the statistics. Only an unfiltered p beside a q has to be read again, with q: the sums of both have to be known
before the first residual is. For a draw that is one row a slot, of the 1 + K that were read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.acceptance import Weighted
from pallas_kernels.block_shape import BlockShape
from pallas_kernels.compat import jit_kernel, mosaic_kernel
from pallas_kernels.draw import TILE
from pallas_kernels.mosaic.candidates import CANDIDATES, CandidateKernel, Scratch, scratch_types
from pallas_kernels.mosaic.pick import pick
from pallas_kernels.mosaic.row import Arrays, RowKernel, fold, fold_all, vector_size
from pallas_kernels.mosaic.statistics import ROWS, SEGMENT
from pallas_kernels.mosaic.weigh import Weighed
from pallas_kernels.threshold import Row, key


class Items(NamedTuple):
    """What is asked, [N] each. p, q: rows. share: float32. draft: int32, a token that p loses, -1 for none. rejected:
    bool, False to draw from p itself."""

    p: jax.Array
    q: jax.Array
    share: jax.Array
    draft: jax.Array
    rejected: jax.Array


class _Given(NamedTuple):
    """What the kernel gets. arrays: of p. segments_q, tiles_q: None without a q. floats, ints: [N, 5], and with a q
    [N, 9] and [N, 8], as `_Residual` reads them. words: [N, 8] int32, None where only the mass is asked for."""

    arrays: Arrays
    segments_q: Any
    tiles_q: Any
    floats: Any
    ints: Any
    words: Any


def residual_mass(p: Weighed, q: Weighed, items: Items, shape: BlockShape, interpret: Any) -> jax.Array:
    """[N] float32: the sum of max(share * p - q, 0)."""
    return _run("mass", jnp.float32, _give(p, q, items, None), shape, interpret)


def draw_residual(
    p: Weighed, q: Weighed | None, items: Items, words: jax.Array, shape: BlockShape, interpret: Any
) -> jax.Array:
    """[N] int32: a token of the residual where an item is rejected and the residual holds anything, else of p.

    words: [N, 8] uint32."""
    given = _give(p, q, items, jax.lax.bitcast_convert_type(words, jnp.int32))
    return _run("draw", jnp.int32, given, shape, interpret)


def _give(p: Weighed, q: Weighed | None, items: Items, words: jax.Array | None) -> _Given:
    floats = [*_floats(p.weighted, items.p), items.share]
    ints = [*_ints(p.weighted, items.p), items.p, items.draft, items.rejected]
    if q is not None:
        floats += _floats(q.weighted, items.q)
        ints += [*_ints(q.weighted, items.q), items.q]
    segments, tiles = (None, None) if q is None else (q.arrays.segments, q.arrays.tiles)
    columns = jnp.stack(floats, axis=1), jnp.stack([x.astype(jnp.int32) for x in ints], axis=1)
    return _Given(p.arrays, segments, tiles, *columns, words)


def _floats(rows: Weighted, at: jax.Array) -> list[jax.Array]:
    known = rows.distribution
    return [x[at] for x in (known.top, known.temperature, known.threshold.value, rows.total)]


def _ints(rows: Weighted, at: jax.Array) -> list[jax.Array]:
    threshold = rows.distribution.threshold
    return [threshold.id[at], key(threshold.value)[at]]


@jit_kernel("method", "dtype", "shape", "interpret")
def _run(method: str, dtype: Any, given: _Given, shape: BlockShape, interpret: Any) -> jax.Array:
    """The result of a method of `_Residual` for every item."""
    leaves, structure = jax.tree.flatten(given)
    items, slots = len(given.floats), given.arrays.maxima.shape[1]

    def body(*refs: Any) -> None:
        at = jax.lax.axis_index("item")
        given = jax.tree.unflatten(structure, refs[: len(leaves)])
        result, scratch = refs[len(leaves)], refs[len(leaves) + 1 :]
        result[at] = getattr(_Residual(given, at, scratch, shape, interpret), method)()

    kernel = mosaic_kernel(
        body,
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((items,), dtype),
        grid=(items,),
        grid_names=("item",),
        scratch_types=[
            *scratch_types(slots, shape),
            plgpu.SMEM((vector_size(slots),), jnp.float32),
            plgpu.SMEM((CANDIDATES, SEGMENT), jnp.float32),
            plgpu.Barrier(num_arrivals=CANDIDATES),
        ],
    )
    return kernel(*leaves)


class _Known(NamedTuple):
    """A row's scalars, the last survivor of its filters, and the sum of weights."""

    row: Row
    value: Any
    last: Any
    total: Any


def _known(floats: Any, ints: Any, at: Any, first: int) -> _Known:
    """From columns `first` and following."""
    top, temperature, value, total = (floats[at, first + i] for i in range(4))
    return _Known(Row(top, temperature, -jnp.inf, 0, 1.0), value, ints[at, first], total)


class _Residual(CandidateKernel):
    """One item. Scratch beside that of p: sums of p's tiles, where `sums` has the residual's; candidates of q and the
    barrier of their copies."""

    def __init__(self, given: _Given, at: Any, scratch: Any, shape: BlockShape, interpret: Any) -> None:
        floats, ints = given.floats, given.ints
        self.known, self.lowest = _known(floats, ints, at, 0), ints[at, 1]
        self.share, self.draft, self.rejected = floats[at, 4], ints[at, 3], ints[at, 4] == 1
        super().__init__(
            given.arrays, ints[at, 2], self.known.row, self.lowest, Scratch(*scratch[:6]), shape, interpret
        )
        self.words = () if given.words is None else tuple(given.words[at, i] for i in range(8))
        self.whole, self.candidates_of_q, self.fetched_of_q = scratch[6:]
        self.q: RowKernel | None = None
        if given.tiles_q is not None:
            self.known_of_q = _known(floats, ints, at, 5)
            arrays = given.arrays._replace(segments=given.segments_q, tiles=given.tiles_q)
            self.q = RowKernel(arrays, ints[at, 7], self.known_of_q.row, shape, interpret)

    def mass(self) -> Any:
        return jax.lax.cond(self.few(), self.mass_of_candidates, self.mass_of_row)

    def mass_of_candidates(self) -> Any:
        return fold_all("sum", self.left(*self.values_of_candidates(self.fetch(self.lowest))))

    def mass_of_row(self) -> Any:
        parts = TILE // self.shape.part
        return fold("sum", lambda i: self.left(*self.values_of_block(i // parts, i % parts)), self.num_blocks * parts)

    def draw(self) -> Any:
        tile, remains = jax.lax.cond(self.few(), self.tile_by_candidates, self.tile_by_sums)
        x, ids = self.tile(tile)
        y = x if self.q is None else self.q.tile(tile)[0]
        weights = either(remains, self.left(x, y, ids), self.p(x, ids))
        return tile * TILE + pick(weights, self.words[4:])

    # ---- weights

    def p(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        return self.kept(x, ids, self.known.value, self.known.last)

    def left(self, x: jax.Array, y: jax.Array, ids: jax.Array) -> jax.Array:
        """The residual, from logits of p and q; without a q, weights of p but the draft's."""
        if self.q is None:
            return jnp.where(ids == self.draft, 0.0, self.p(x, ids))
        q = self.q.kept(y, ids, self.known_of_q.value, self.known_of_q.last) / self.known_of_q.total
        return jnp.maximum(self.share * (self.p(x, ids) / self.known.total) - q, 0.0)

    def remains(self, mass: Any) -> Any:
        """Whether to draw from the residual, of this mass. p and q that agree but for rounding may leave nothing; then
        every token of p is as good."""
        return self.rejected & (mass > 0)

    # ---- the candidates: all that p keeps

    def few(self) -> Any:
        """Whether p's survivors lie in at most 64 segments."""
        number = self.fold_statistics("sum", lambda maxima, sums, slot: jnp.where(key(maxima) >= self.lowest, 1, 0))
        return number <= CANDIDATES

    def copy(self, place: Any, segment: Any) -> None:
        super().copy(place, segment)
        if self.q is not None:
            source = self.q.arrays.segments.at[self.q.at, pl.ds(segment, 1)]
            plgpu.copy_gmem_to_smem(source, self.candidates_of_q.at[pl.ds(place, 1)], self.fetched_of_q)

    def wait(self) -> None:
        super().wait()
        if self.q is not None:
            plgpu.barrier_wait(self.fetched_of_q)

    def values_of_candidates(self, numbers: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logits of p (-inf where there is no candidate) and of q, and ids: [64, 16]."""
        x, ids = self.candidate_values(numbers)
        return x, (x if self.q is None else self.load(self.candidates_of_q, (), ROWS)), ids

    def tile_by_candidates(self) -> tuple[Any, Any]:
        numbers = self.fetch(self.lowest)
        x, y, ids = self.values_of_candidates(numbers)
        left = self.left(x, y, ids)
        remains = self.remains(fold_all("sum", left))
        weights = either(remains, left, self.p(x, ids))
        return self.pick_segment(numbers, weights, lambda sums: pick(sums, self.words[:4])), remains

    # ---- sums of tiles

    def tile_by_sums(self) -> tuple[Any, Any]:
        """By the statistics where nothing is filtered and no q has a say."""
        plain = self.known.value == -jnp.inf
        if self.q is not None:
            plain &= ~self.rejected
        return jax.lax.cond(plain, self.tile_by_statistics, self.tile_by_row)

    def tile_by_statistics(self) -> tuple[Any, Any]:
        self.sum_statistics(self.scratch.sums)
        sums, slots = self.vector(self.scratch.sums)
        whole = jnp.where(slots < self.slots, sums, 0.0)
        x, ids = self.tile(jnp.maximum(self.draft, 0) // TILE)
        without = jnp.sum(jnp.where(ids == self.draft, 0.0, self.row.weight(x)))
        # Of two slots of a tile one holds nothing.
        tile = jnp.where(self.draft >= 0, self.draft // TILE, -1)
        cut = (self.tile_of_slot(slots) == tile) & (whole > 0)
        place, remains = self.pick_place(jnp.where(cut, without, whole), whole)
        return self.tile_of_slot(place), remains

    def tile_by_row(self) -> tuple[Any, Any]:
        def weights(block: Any, part: Any) -> tuple[jax.Array, jax.Array]:
            x, y, ids = self.values_of_block(block, part)
            return self.left(x, y, ids), self.p(x, ids)

        self.sum_tiles(weights, (self.scratch.sums, self.whole))
        left, places = self.vector(self.scratch.sums)
        whole, _ = self.vector(self.whole)
        inside = places < self.slots
        place, remains = self.pick_place(jnp.where(inside, left, 0.0), jnp.where(inside, whole, 0.0))
        return self.tile_at(place), remains

    def pick_place(self, left: jax.Array, whole: jax.Array) -> tuple[Any, Any]:
        remains = self.remains(jnp.sum(left))
        return pick(either(remains, left, whole), self.words[:4]), remains

    def values_of_block(self, block: Any, part: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logits of p and of q, and ids: [64, part]."""
        x, ids = self.block(block, part)
        return x, (x if self.q is None else self.q.block(block, part)[0]), ids


def either(condition: Any, a: jax.Array, b: jax.Array) -> jax.Array:
    """a or b, arrays of weights, by a scalar: a kernel has no select for that."""
    share = jnp.where(condition, 1.0, 0.0)
    return a * share + b * (1 - share)
