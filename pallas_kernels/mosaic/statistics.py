"""The one pass over the logits: maximum and sum of weights of every segment of 16.

HBM   V * 4 bytes a row read once, V / 16 * 8 bytes written (an eighth)
block up to 64 tiles of 256 entries, 64 KB, held in the registers of one warpgroup: 32 loads of 128 bits a thread in
      flight, no shared memory, so two blocks share a multiprocessor
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import jit_kernel, load, mosaic_kernel
from pallas_kernels.draw import TILE

SEGMENT = 16
HEIGHT = 64  # rows that a layout spreads over a warpgroup: of tiles, of slots, of segments
IN_TILE = TILE // SEGMENT  # segments

# Rows of 16 entries: four lanes take 16 bytes of a row each, a warp eight rows, so a load is 512 bytes in one piece and
# what is reduced along a row crosses two lanes twice.
ROWS = plgpu.Layout.TILED(plgpu.Tiling(((64, 16), (16, 16), (8, 16), (4,))), (-7,), (-3, -2), -1)


def num_slots(tiles: int) -> int:
    """A slot for every tile, and some that hold nothing: a multiple of 64, so of every block."""
    return -(-tiles // HEIGHT) * HEIGHT


def first_tile(block: Any, tiles: int, size: int) -> Any:
    """Of a block of `size` tiles; one that does not fit is moved back so that it ends with the row."""
    return jnp.minimum(block * size, tiles - size)


def tile_of_slot(slot: Any, tiles: int, size: int) -> Any:
    """The last blocks see some tiles a second time; their slots hold nothing."""
    return first_tile(slot // size, tiles, size) + slot % size


@jit_kernel("block", "interpret")
def segment_statistics(
    segments: jax.Array, inverse: jax.Array, block: int, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Maxima and sums of exp((x - maximum) * inverse), [R, slots * 16] float32; -inf and 0 in slots that hold nothing.

    segments: [R, tiles * 16, 16] float32, tiles >= 64. inverse: [R] float32, 1 / temperature. block: tiles.
    """
    rows, tiles = segments.shape[0], segments.shape[1] // IN_TILE
    slots, height = num_slots(tiles), block * IN_TILE

    def body(x_ref: Any, inverse_ref: Any, max_ref: Any, sum_ref: Any) -> None:
        row, at_block = jax.lax.axis_index("row"), jax.lax.axis_index("block")
        start = first_tile(at_block, tiles, block)
        x = load(x_ref, (row, pl.ds(start * IN_TILE, height)), ROWS, interpret)
        top = jnp.max(x, axis=1)
        over = jax.lax.broadcast_in_dim(top, x.shape, (0,))
        sums = jnp.sum(jnp.exp(jnp.where(x == over, 0.0, (x - over) * inverse_ref[row])), axis=1)
        seen = (at_block * block - start) * IN_TILE  # segments that the block before has had
        at = jax.lax.broadcasted_iota(jnp.int32, top.shape, 0)
        max_ref[row, pl.ds(at_block * height, height)] = jnp.where(at >= seen, top, -jnp.inf)
        sum_ref[row, pl.ds(at_block * height, height)] = jnp.where(at >= seen, sums, 0.0)

    shape = jax.ShapeDtypeStruct((rows, slots * IN_TILE), jnp.float32)
    kernel = mosaic_kernel(
        body, interpret=interpret, out_type=[shape, shape], grid=(rows, slots // block), grid_names=("row", "block")
    )
    return tuple(kernel(segments, inverse))
