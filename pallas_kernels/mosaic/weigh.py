"""What rows are drawn from, without drawing: the last survivor of the filters and the sum of weights of every row.

The first two of the sampling kernels' three steps. A row is read from HBM once, for its statistics; the kernel here
reads these, and 4 KB of candidates of a filtered row. It also sums the weights of all tokens but one, the row's draft:
1 - p(draft) has few digits where it is small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.acceptance import Weighted
from pallas_kernels.block_shape import BlockShape
from pallas_kernels.compat import jit_kernel, mosaic_kernel
from pallas_kernels.distribution import Distribution, Filters, is_finite
from pallas_kernels.draw import TILE
from pallas_kernels.filters import Threshold
from pallas_kernels.mosaic.candidates import CandidateKernel, Scratch, scratch_types
from pallas_kernels.mosaic.row import Arrays, fold_all, read_rows
from pallas_kernels.mosaic.sample import FILTERED, IDLE, row_of, scalars, temperature_of
from pallas_kernels.mosaic.statistics import IN_TILE, SEGMENT
from pallas_kernels.threshold import NOBODY


class Weighed(NamedTuple):
    """Of R rows. rest [R] float32: the sum of weights of all tokens but the row's draft. finite [R] bool."""

    arrays: Arrays
    weighted: Weighted
    rest: jax.Array
    finite: jax.Array


def weigh_rows(
    logits: jax.Array, filters: Filters, valid: jax.Array, drafts: jax.Array, shape: BlockShape, interpret: Any
) -> Weighed:
    """logits: [R, V] float32. valid: [R] bool; rows that are not have some distribution that means nothing. drafts: [R]
    int32, -1 where there is none. A greedy row has its argmax alone."""
    arrays, top = read_rows(logits, temperature_of(filters), shape, interpret)
    floats, ints = scalars(top, filters, valid, logits.shape[1])
    value, last, total, rest = _weigh_kernel(arrays, floats, ints, drafts, shape, interpret)
    finite = is_finite(top)
    distribution = Distribution(jnp.where(finite, top, 0.0), temperature_of(filters), Threshold(value, last))
    return Weighed(arrays, Weighted(logits, distribution, total), rest, finite)


@jit_kernel("shape", "interpret")
def _weigh_kernel(
    arrays: Arrays, floats: jax.Array, ints: jax.Array, drafts: jax.Array, shape: BlockShape, interpret: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rows, slots, _ = arrays.maxima.shape

    def body(*refs: Any) -> None:
        arrays, (floats, ints, drafts), results = Arrays(*refs[:4]), refs[4:7], refs[7:11]
        at = jax.lax.axis_index("row")
        row, task, top = row_of(floats, ints, at)
        kernel = _Weigher(arrays, at, row, top, Scratch(*refs[11:]), shape, interpret)
        kernel.draft = drafts[at]
        found = jax.lax.cond(task == IDLE, kernel.argmax, lambda: kernel.random(task))
        for ref, value in zip(results, found, strict=True):
            ref[at] = value

    number, identity = jax.ShapeDtypeStruct((rows,), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    kernel = mosaic_kernel(
        body,
        interpret=interpret,
        out_type=[number, identity, number, number],
        grid=(rows,),
        grid_names=("row",),
        scratch_types=scratch_types(slots, shape),
    )
    return tuple(kernel(*arrays, floats, ints, drafts))


class _Weigher(CandidateKernel):
    """Every method returns value and id of the last survivor, the sum of weights, and that without `draft`'s."""

    draft: Any

    def random(self, task: Any) -> Any:
        return jax.lax.cond(task == FILTERED, lambda: self.search(self.of_candidates, self.of_row), self.plain)

    def argmax(self) -> Any:
        token = self.greedy()
        return self.row.top, token, jnp.float32(1.0), jnp.where(token == self.draft, 0.0, 1.0)

    def plain(self) -> Any:
        total = self.fold_statistics("sum", lambda maxima, sums, slot: sums * self.row.weight(maxima))
        return jnp.float32(-jnp.inf), jnp.int32(NOBODY), total, self.without_draft()

    def without_draft(self) -> Any:
        """By the statistics of all segments but one, and that one by its entries."""

        def others(maxima: jax.Array, sums: jax.Array, slot: jax.Array) -> jax.Array:
            segment = self.tile_of_slot(slot) * IN_TILE + jax.lax.broadcasted_iota(jnp.int32, slot.shape, 1)
            return jnp.where(segment != self.draft // SEGMENT, sums * self.row.weight(maxima), 0.0)

        x, ids = self.tile(jnp.maximum(self.draft, 0) // TILE)
        beside = (ids // SEGMENT == self.draft // SEGMENT) & (ids != self.draft)
        return self.fold_statistics("sum", others) + jnp.sum(jnp.where(beside, self.row.weight(x), 0.0))

    def of_candidates(self, numbers: jax.Array, value: Any, last: Any) -> Any:
        return self.sums(lambda function: fold_all("sum", function(*self.candidate_values(numbers))), value, last)

    def of_row(self, value: Any, last: Any) -> Any:
        return self.sums(lambda function: self.fold_row("sum", function), value, last)

    def sums(self, fold: Any, value: Any, last: Any) -> Any:
        total = fold(lambda x, ids: self.kept(x, ids, value, last))
        rest = fold(lambda x, ids: jnp.where(ids == self.draft, 0.0, self.kept(x, ids, value, last)))
        return value, last, total, rest
