"""The few segments of a row that hold its largest values, found by bisection over maxima and fetched by TMA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_shape import BlockShape
from pallas_kernels.mosaic.row import Arrays, RowKernel, chunk_of, fold_all, vector_size
from pallas_kernels.mosaic.statistics import IN_TILE, ROWS, SEGMENT
from pallas_kernels.threshold import LOWEST, Function, Row, Window, find, key, middle

CANDIDATES = 64  # segments
ENOUGH = 56  # a cut that leaves so many of them is as good as one that leaves all


class Scratch(NamedTuple):
    """In shared memory. candidates [64, 16]; hits [slots] int32, which segments of a slot are candidates; sums [slots];
    maxima [slots, 16]; barriers of the copies to candidates and maxima."""

    candidates: Any
    hits: Any
    sums: Any
    maxima: Any
    fetched: Any
    staged: Any


def scratch_types(slots: int, shape: BlockShape) -> list[Any]:
    """Of the fields of `Scratch`."""
    vector = vector_size(slots)
    return [
        plgpu.SMEM((CANDIDATES, SEGMENT), jnp.float32),
        plgpu.SMEM((vector,), jnp.int32),
        plgpu.SMEM((vector,), jnp.float32),
        plgpu.SMEM((slots, IN_TILE), jnp.float32),
        plgpu.Barrier(num_arrivals=CANDIDATES),
        plgpu.Barrier(num_arrivals=slots // chunk_of(slots, shape)),
    ]


class CandidateKernel(RowKernel):
    """A row whose largest values can be brought to shared memory. top: key of the largest, for a kernel has no bitcast
    of a scalar."""

    def __init__(
        self, arrays: Arrays, at: Any, row: Row, top: Any, scratch: Scratch, shape: BlockShape, interpret: Any
    ) -> None:
        super().__init__(arrays, at, row, shape, interpret)
        self.top, self.scratch = top, scratch

    def search(self, by_candidates: Callable[[jax.Array, Any, Any], Any], by_row: Callable[[Any, Any], Any]) -> Any:
        """What follows from the last survivor of the row's filters: by_candidates(numbers, value, id) where candidates
        decide it, else by_row(value, id)."""
        window, numbers = self.gather()
        value, last, certain = find(self.row, window)

        def whole_row() -> Any:
            window = Window(self.fold_row, jnp.int32(LOWEST), jnp.bool_(True), jnp.float32(0.0), self.top)
            return by_row(*find(self.row, window)[:2])

        return jax.lax.cond(certain, lambda: by_candidates(numbers, value, last), whole_row)

    def gather(self) -> tuple[Window, jax.Array]:
        """Fetch the candidates; what is known of the rest, and the segments' numbers [64]."""
        self.stage()
        lowest = self.lowest_candidate()
        numbers = self.fetch(lowest)

        def among(kind: str, function: Function) -> Any:
            return fold_all(kind, function(*self.candidate_values(numbers)))

        def mass(maxima: jax.Array, sums: jax.Array, slot: jax.Array) -> jax.Array:
            return jnp.where(key(maxima) < lowest, sums * self.row.weight(maxima), 0.0)

        def alive(maxima: jax.Array, sums: jax.Array, slot: jax.Array) -> jax.Array:
            return jnp.where((key(maxima) < lowest) & self.row.alive(maxima), 1, 0)

        behind = self.fold_statistics("sum", mass) + among(
            "sum", lambda x, ids: jnp.where(key(x) < lowest, self.row.weight(x), 0.0)
        )
        others = self.fold_statistics("sum", alive) + among(
            "sum", lambda x, ids: jnp.where((key(x) < lowest) & self.row.alive(x), 1, 0)
        )
        return Window(among, lowest, others == 0, behind, self.top), numbers

    def stage(self) -> None:
        """Copy the maxima to shared memory, for a bisection that reads them some thirty times."""
        size = self.chunk()

        def copy(i: Any, carry: Any) -> Any:
            at = pl.ds(i * size, size)
            source = self.arrays.maxima.at[self.at, at]
            plgpu.copy_gmem_to_smem(source, self.scratch.maxima.at[at], self.scratch.staged)
            return carry

        jax.lax.fori_loop(0, self.slots // size, copy, jnp.int32(0))
        plgpu.barrier_wait(self.scratch.staged)

    def lowest_candidate(self) -> Any:
        """A key that at most 64 segments reach: the smallest, or one that nearly as many reach."""

        def step(bounds: tuple[Any, Any]) -> tuple[Any, Any]:
            low, high = bounds
            mid = middle(low, high)
            number = self.count_staged(mid)
            low = jnp.where((number > CANDIDATES) | (number >= ENOUGH), mid, low)
            return low, jnp.where(number > CANDIDATES, high, mid)

        bounds = (jnp.int32(LOWEST), self.top + 1)
        return jax.lax.while_loop(lambda b: middle(*b) > b[0], step, bounds)[1]

    def count_staged(self, lowest: Any) -> Any:
        """How many segments reach a key."""
        size = self.chunk()

        def add(i: Any, total: Any) -> Any:
            maxima = self.load(self.scratch.maxima, (pl.ds(i * size, size),), ROWS)
            return total + fold_all("sum", jnp.where(key(maxima) >= lowest, 1, 0))

        return jax.lax.fori_loop(0, self.slots // size, add, jnp.int32(0))

    def fetch(self, lowest: Any) -> jax.Array:
        """Copy every segment that reaches a key, at most 64, to shared memory in order of id; their numbers [64] int32,
        -1 where there is no more."""

        def mark(start: Any, maxima: jax.Array, sums: jax.Array) -> None:
            column = jax.lax.broadcasted_iota(jnp.int32, maxima.shape, 1)
            found = jnp.sum(jnp.where(key(maxima) >= lowest, jnp.int32(1) << column, 0), axis=1)
            self.scratch.hits[pl.ds(start, len(found))] = found

        self.for_statistics(mark)
        place, numbers = self.copy_hits()

        def fill(place: Any, carry: Any) -> Any:
            self.copy(place, 0)  # the barrier waits for 64 copies
            return carry

        jax.lax.fori_loop(place, CANDIDATES, fill, jnp.int32(0))
        self.wait()
        return numbers

    def copy_hits(self) -> tuple[Any, jax.Array]:
        """How many there are, and their numbers."""
        bits, ids = self.vector(self.scratch.hits)
        bits = jnp.where(ids < self.slots, bits, 0)
        places = jax.lax.broadcasted_iota(jnp.int32, (CANDIDATES,), 0)

        def one_slot(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            place, slot, numbers = state
            first = self.tile_of_slot(slot) * IN_TILE

            def one_segment(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
                place, left, numbers = state
                segment = first + 31 - jax.lax.clz(left & -left)
                self.copy(place, segment)
                return place + 1, left & (left - 1), jnp.where(places == place, segment, numbers)

            state = (place, self.scratch.hits[slot], numbers)
            place, _, numbers = jax.lax.while_loop(lambda s: s[1] != 0, one_segment, state)
            return place, jnp.min(jnp.where((bits != 0) & (ids > slot), ids, self.slots)), numbers

        state = (jnp.int32(0), jnp.min(jnp.where(bits != 0, ids, self.slots)), jnp.full((CANDIDATES,), -1, jnp.int32))
        place, _, numbers = jax.lax.while_loop(lambda s: s[1] < self.slots, one_slot, state)
        return place, numbers

    def copy(self, place: Any, segment: Any) -> None:
        source = self.arrays.segments.at[self.at, pl.ds(segment, 1)]
        plgpu.copy_gmem_to_smem(source, self.scratch.candidates.at[pl.ds(place, 1)], self.scratch.fetched)

    def wait(self) -> None:
        plgpu.barrier_wait(self.scratch.fetched)

    def candidate_values(self, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Values (-inf where there is none) and ids, [64, 16]."""
        x = self.load(self.scratch.candidates, (), ROWS)
        number = jax.lax.broadcast_in_dim(numbers, x.shape, (0,))
        ids = number * SEGMENT + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.where(number >= 0, x, -jnp.inf), ids

    def pick_segment(self, numbers: jax.Array, weights: jax.Array, pick: Callable[[jax.Array], Any]) -> Any:
        """The tile of a candidate by weights [64, 16]. Segments of one tile lie side by side, so a pick of a segment is
        one of its tile."""
        self.scratch.sums[pl.ds(0, CANDIDATES)] = jnp.sum(weights, axis=1)
        sums, ids = self.vector(self.scratch.sums)
        place = pick(jnp.where(ids < CANDIDATES, sums, 0.0))
        places = jax.lax.broadcasted_iota(jnp.int32, (CANDIDATES,), 0)
        return jnp.max(jnp.where(places == place, numbers, 0)) // IN_TILE
