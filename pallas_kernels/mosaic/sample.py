"""top_k_top_p_sample in two Mosaic GPU kernels.

Byte plan for one row of V float32 logits (V = 128256: 513 KB), where the ideal is to read it once:

1. `statistics`: the row is read from HBM once; of every segment of 16 entries the maximum and the sum of weights are
   written, V / 2 bytes (64 KB).
2. `sample`, one block a row.
   - No filter: the sums of tiles are sums of statistics. The tile that is drawn is read again: 1 KB.
   - Filters: a bisection over the maxima, copied to shared memory once, finds a value that at most 64 segments reach;
     these hold everything from there up. They are fetched by TMA, 4 KB, and searched in shared memory. If they show
     where top_k or the nucleus ends (top_k <= 56 always does but for ties; a nucleus of real text does), the draw needs
     nothing else.
   - A row that they do not decide, a flat nucleus or a large top_k, is searched whole: 20 to 60 passes over 513 KB in
     L2, the only case in which the row is read more than once.

So 64 rows of 128256 take 33 MB of reads from HBM, 10 us at 3.35 TB/s, and 4 MB each way in L2 for the statistics. A
radix sort moves 0.3 to 0.6 GB. Nothing of the size of the logits is written, but where V is not a multiple of 256, or
less than 16384, or the logits are not float32: then XLA makes a padded copy, fused into what makes the logits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_shape import BlockShape, block_shape
from pallas_kernels.compat import jit_kernel, mosaic_kernel
from pallas_kernels.distribution import Filters, is_finite
from pallas_kernels.draw import TILE
from pallas_kernels.mosaic.candidates import CandidateKernel, Scratch, scratch_types
from pallas_kernels.mosaic.pick import pick
from pallas_kernels.mosaic.row import Arrays, read_rows
from pallas_kernels.threshold import NOBODY, Row, key

IDLE, PLAIN, FILTERED = 0, 1, 2  # what a row asks for


def sample_random(
    logits: jax.Array,
    filters: Filters,
    words: jax.Array,
    valid: jax.Array | None,
    shape: BlockShape | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Token [R] int32 and top [R] float32, the row's maximum (NaN where it holds one). logits: [R, V]."""
    rows, vocab = logits.shape
    shape = shape or block_shape(rows)
    arrays, top = read_rows(logits, temperature_of(filters), shape, interpret)
    floats, ints = scalars(top, filters, valid, vocab)
    words = jax.lax.bitcast_convert_type(words, jnp.int32)
    return _sample_kernel(arrays, floats, ints, words, shape, interpret), top


def temperature_of(filters: Filters) -> jax.Array:
    """[R], 1 for greedy rows."""
    return jnp.where(filters.temperature > 0, filters.temperature, 1.0).astype(jnp.float32)


def scalars(top: jax.Array, filters: Filters, valid: jax.Array | None, vocab: int) -> tuple[jax.Array, jax.Array]:
    """What a kernel knows of each row: [R, 4] float32 and [R, 3] int32, as `row_of` reads them."""
    limited = (filters.top_k > 0) & (filters.top_k < vocab)
    filtered = limited | (filters.top_p < 1) | (filters.min_p > 0)
    random = (filters.temperature > 0) & is_finite(top)
    if valid is not None:
        random &= valid
    task = jnp.where(random, jnp.where(filtered, FILTERED, PLAIN), IDLE)
    floats = jnp.stack([top, temperature_of(filters), jnp.log(filters.min_p), filters.top_p], axis=1)
    ints = jnp.stack([task, jnp.where(limited, filters.top_k, 0), key(top)], axis=1)
    return floats.astype(jnp.float32), ints.astype(jnp.int32)


def row_of(floats: Any, ints: Any, at: Any) -> tuple[Row, Any, Any]:
    """The row's scalars, its task, and the key of its maximum."""
    top, temperature, floor, top_p = (floats[at, i] for i in range(4))
    return Row(top, temperature, floor, ints[at, 1], top_p), ints[at, 0], ints[at, 2]


@jit_kernel("shape", "interpret")
def _sample_kernel(
    arrays: Arrays, floats: jax.Array, ints: jax.Array, words: jax.Array, shape: BlockShape, interpret: Any
) -> jax.Array:
    rows, slots, _ = arrays.maxima.shape

    def body(*refs: Any) -> None:
        arrays, (floats, ints, words, token) = Arrays(*refs[:4]), refs[4:8]
        at = jax.lax.axis_index("row")
        row, task, top = row_of(floats, ints, at)
        kernel = _Sampler(arrays, at, row, top, Scratch(*refs[8:]), shape, interpret)
        kernel.words = tuple(words[at, i] for i in range(8))
        token[at] = jax.lax.cond(task == IDLE, kernel.greedy, lambda: kernel.random(task))

    kernel = mosaic_kernel(
        body,
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((rows,), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        scratch_types=scratch_types(slots, shape),
    )
    return kernel(*arrays, floats, ints, words)


class _Sampler(CandidateKernel):
    """Draws one token. words: eight int32."""

    words: tuple[Any, ...]

    def random(self, task: Any) -> Any:
        value, last, tile = jax.lax.cond(
            task == FILTERED, lambda: self.search(self.draw_candidate, self.draw_of_row), self.plain
        )
        x, ids = self.tile(tile)
        return tile * TILE + pick(self.kept(x, ids, value, last), self.words[4:])

    def plain(self) -> tuple[Any, Any, Any]:
        self.sum_statistics(self.scratch.sums)
        return jnp.float32(-jnp.inf), jnp.int32(NOBODY), self.tile_of_slot(self.pick_sum())

    def pick_sum(self) -> Any:
        sums, ids = self.vector(self.scratch.sums)
        return pick(jnp.where(ids < self.slots, sums, 0.0), self.words[:4])

    def draw_candidate(self, numbers: jax.Array, value: Any, last: Any) -> tuple[Any, Any, Any]:
        x, ids = self.candidate_values(numbers)
        weights = self.kept(x, ids, value, last)
        return value, last, self.pick_segment(numbers, weights, lambda sums: pick(sums, self.words[:4]))

    def draw_of_row(self, value: Any, last: Any) -> tuple[Any, Any, Any]:
        def weights(block: Any, part: Any) -> tuple[jax.Array]:
            return (self.kept(*self.block(block, part), value, last),)

        self.sum_tiles(weights, (self.scratch.sums,))
        return value, last, self.tile_at(self.pick_sum())
