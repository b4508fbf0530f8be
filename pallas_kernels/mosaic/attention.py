"""paged_attention in one Mosaic GPU kernel: the pages of a group are read where they are, once, by TMA.

Byte plan for N groups of T keys, one KV head of width E in two bytes: 4 N T E bytes are read, K and V once; beside them
4 splits N Q G E are written and read once more, the parts of the result, where the keys of a group are split among
blocks (a decode of 64 requests x 2350 tokens with 8 query heads to a KV head: 77 MB and 1.3 MB each way). Gathering the
pages first, as the definition does, writes and reads the 77 MB another time.

A block is one warpgroup, one group of up to 64 query rows (Q * G; more take more blocks, whose pages then come from L2)
and one KV head. It keeps `stages` tiles of 64 keys and values in flight, and does for each what flash attention does
(Dao et al. 2022; splits as in Flash-Decoding, Dao et al. 2023): scores by the tensor cores, a running maximum and sum,
values by the tensor cores. These work on 64 rows however few there are, 64 products for every byte read where the GPU
has time for 295.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_shape import AttentionShape, attention_shape
from pallas_kernels.compat import jit_kernel, load, matmul, mosaic_kernel
from pallas_kernels.paged_attention import NEVER

ROWS = 64  # of a product of the tensor cores
TILE = 64  # keys
_SMALL = 1e-30  # a sum of weights is at least one unless there are no keys


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, tables: jax.Array, positions: jax.Array, window: jax.Array | int,
    first_key: int, shape: AttentionShape | None, interpret: Any,
) -> jax.Array:  # fmt: skip
    """pallas_kernels.paged_attention."""
    n, length, heads, group, width = q.shape
    size = k.shape[1]
    piece = min(size, TILE)  # a page of more positions is taken for several
    rows = length * group
    tiles = -(-rows // ROWS)
    height = ROWS if tiles > 1 else -(-rows // 8) * 8  # rows that are stored
    q = jnp.moveaxis(q, 2, 1).reshape(n, heads, rows, width)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, tiles * height - rows), (0, 0)))
    at = jnp.pad(jnp.repeat(positions, group, axis=1), ((0, 0), (0, tiles * ROWS - rows)), constant_values=-1)
    pages = tables[:, :, None] * (size // piece) + jnp.arange(size // piece)
    pages = jnp.pad(pages.reshape(n, -1), ((0, 0), (0, -pages[0].size % (TILE // piece))))
    shape = shape or attention_shape(n * heads * tiles, pages.shape[1] * piece // TILE)
    merged = [pool.reshape(-1, piece, heads * width) for pool in (k, v)]
    bounds = _bounds(positions, pages.shape[1] * piece, window, first_key)
    parts, sums = _attend(q, *merged, pages, at, bounds, height, shape, first_key, interpret)
    weight = jax.nn.softmax(sums, axis=0)  # [splits, N, H, rows]
    out = jnp.sum(parts * weight[..., None], axis=0)[:, :, :rows].astype(q.dtype)
    return jnp.moveaxis(out.reshape(n, heads, length, group, width), 1, 2)


def _bounds(positions: jax.Array, length: int, window: jax.Array | int, first_key: int) -> jax.Array:
    """[N, 3] int32: the first tile that any query of a group sees, the first that none sees any more, the window."""
    valid = positions >= 0
    last = jnp.max(jnp.where(valid, jnp.minimum(positions, length - 1), -1), axis=1)
    oldest = jnp.min(jnp.where(valid, positions, length), axis=1)
    first = jnp.maximum(oldest - window + 1, first_key) // TILE
    stop = (last + TILE) // TILE
    return jnp.stack([jnp.minimum(first, stop), stop, jnp.broadcast_to(window, stop.shape)], axis=1).astype(jnp.int32)


@jit_kernel("height", "shape", "first_key", "interpret")
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, positions: jax.Array, bounds: jax.Array,
    height: int, shape: AttentionShape, first_key: int, interpret: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Parts of the result [splits, N, H, rows, E] float32, each normalised, and the logarithms of their sums of weights
    [splits, N, H, rows].

    q: [N, H, rows, E], rows = tiles * height. k, v: [pages, C, H * E]. pages: [N, P]. positions: [N, tiles * 64].
    """
    n, heads, rows, width = q.shape
    size = k.shape[1]
    splits, stages = shape.splits, shape.stages
    scale = math.log2(math.e) / math.sqrt(width)  # weights are powers of two

    def body(
        q_ref, k_ref, v_ref, pages_ref, positions_ref, bounds_ref, out_ref, sum_ref,
        q_tile, k_tiles, v_tiles, out_tile, sums, q_arrived, kv_arrived,
    ):  # fmt: skip
        split, head, tile, at = (lax.axis_index(name) for name in ("split", "head", "tile", "group"))
        first, end, window = (bounds_ref[at, i] for i in range(3))
        share = (end - first + splits - 1) // splits
        start = first + split * share
        stop = jnp.minimum(start + share, end)

        def fetch(t):
            slot = (t - start) % stages
            for i in range(TILE // size):
                page = pages_ref[at, t * (TILE // size) + i]
                for pool, tiles in ((k_ref, k_tiles), (v_ref, v_tiles)):
                    plgpu.copy_gmem_to_smem(
                        pool.at[page, :, pl.ds(head * width, width)],
                        tiles.at[slot, pl.ds(i * size, size)],
                        kv_arrived.at[slot],
                    )

        mine = pl.ds(tile * height, height)
        plgpu.copy_gmem_to_smem(q_ref.at[at, head, mine], q_tile.at[pl.ds(0, height)], q_arrived)
        for i in range(stages):
            pl.when(start + i < stop)(partial(fetch, start + i))
        plgpu.barrier_wait(q_arrived)
        by_row = plgpu.Layout.WGMMA.reduce(1)
        position = load(positions_ref, (at, pl.ds(tile * ROWS, ROWS)), by_row, interpret)

        def step(t, carry):
            out, top, total = carry
            slot = (t - start) % stages
            plgpu.barrier_wait(kv_arrived.at[slot])
            x = matmul(q_tile, k_tiles.at[slot], interpret, transposed=True) * scale
            key = lax.broadcasted_iota(jnp.int32, (ROWS, TILE), 1) + t * TILE
            query = lax.broadcast_in_dim(position, (ROWS, TILE), (0,))
            seen = (key <= query) & (key > query - window) & (key >= first_key)
            x = jnp.where(seen, x, NEVER)
            higher = jnp.maximum(top, jnp.max(x, axis=1))
            kept = jnp.exp2(top - higher)
            weights = jnp.exp2(x - lax.broadcast_in_dim(higher, x.shape, (0,)))
            values = matmul(weights.astype(q.dtype), v_tiles.at[slot], interpret)
            plgpu.commit_smem()  # every warp has read the slot, which is filled again
            pl.when(t + stages < stop)(partial(fetch, t + stages))
            out = out * lax.broadcast_in_dim(kept, out.shape, (0,)) + values
            return out, higher, total * kept + jnp.sum(weights, axis=1)

        nothing = (jnp.zeros((ROWS, width)), jnp.full(ROWS, NEVER), jnp.zeros(ROWS))
        out, top, total = lax.fori_loop(start, stop, step, nothing)
        total = jnp.maximum(total, _SMALL)
        out_tile[...] = out / lax.broadcast_in_dim(total, out.shape, (0,))
        sums[...] = top * math.log(2) + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(0, height)], out_ref.at[split, at, head, mine])
        plgpu.copy_smem_to_gmem(sums.at[pl.ds(0, height)], sum_ref.at[split, at, head, mine])
        plgpu.wait_smem_to_gmem(0)

    def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
        columns = 128 // jnp.dtype(dtype).itemsize  # as many bytes as the tensor cores' layout swizzles
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))

    kernel = mosaic_kernel(
        body,
        interpret=interpret,
        out_type=[
            jax.ShapeDtypeStruct((splits, n, heads, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((splits, n, heads, rows), jnp.float32),
        ],
        grid=(splits, heads, rows // height, n),
        grid_names=("split", "head", "tile", "group"),
        scratch_types=[
            tiled((ROWS, width), q.dtype),
            tiled((stages, TILE, width), q.dtype),
            tiled((stages, TILE, width), q.dtype),
            tiled((ROWS, width), jnp.float32),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2 * (TILE // size), num_barriers=stages),
        ],
    )
    return tuple(kernel(q, k, v, pages, positions, bounds))
