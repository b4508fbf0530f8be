"""The paged KV cache of a model: store the new keys and values, attend over the request's pages.

One definition serves decode (N slots of Q = 1 + K positions) and prefill (N tiles of one prompt each), because
a tile of a prompt is a group of query positions over one block table like any other.

A layer's pool is [B, C, H, E]: pages, positions in a page, KV heads, head width. Layers have pools of their own: with
the number of a layer in it, XLA would compile the same gather again for each. A pool is stored as unsigned integers of
the element's size on CPU: XLA's CPU backend widens a bfloat16 scatter into a float32 copy of the whole pool, an integer
scatter it does in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from models.base import Array, page_of
from models.sharding import partition_spec
from pallas_kernels.paged_attention import CUDNN_MIN_ROWS, encode, paged_attention

KV_AXES = ("pages", None, "kv_heads", None)


@struct.dataclass
class PagedKV:
    """Keys and values of one layer. k, v: [B, C, H, E]."""

    k: Array
    v: Array


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """How elements are kept in the pool: bfloat16 as its bits where the platform cannot scatter it in place."""
    return jnp.dtype(jnp.uint16) if platform == "cpu" and dtype == jnp.bfloat16 else jnp.dtype(dtype)


def store_and_attend(
    q: jax.Array,  # [N, Q, H, G, E] queries, G query heads to a KV head
    k: jax.Array,  # [N, Q, H, E]
    v: jax.Array,  # [N, Q, H, E]
    kv: PagedKV,
    positions: jax.Array,  # [N, Q], -1 = padding
    block_tables: jax.Array,  # [N, P]
    window: jax.Array | int,  # keys older than this many positions are not seen
    dtype: jnp.dtype,
    platform: str,
    mesh: Mesh | None,
    written: jax.Array | None = None,  # [N, Q], the positions to store; -1 = not this one. None: all
    first_key: int = 0,  # keys before this position do not exist
    implementation: str | None = None,  # of pallas_kernels.paged_attention, for windows of a decode
) -> tuple[jax.Array, PagedKV]:
    """Causal grouped-query attention. Returns [N, Q, H, G, E] in `dtype` and the cache with k and v stored.

    With a mesh every device works on its own KV heads: nothing is exchanged.
    """

    def local(q, k, v, pool_k, pool_v, positions, block_tables, window, written):
        # A masked score costs nothing, a masked value does: 0 * NaN is NaN. So values in the pool are always finite,
        # and one that is not makes its key NaN, which whoever sees that key notices, and nobody else.
        k, v = k.astype(dtype), v.astype(dtype)
        k, v = jnp.where(jnp.isfinite(v), k, jnp.nan), jnp.where(jnp.isfinite(v), v, 0)
        pool_k = _store(pool_k, k, written, block_tables, dtype)
        pool_v = _store(pool_v, v, written, block_tables, dtype)
        out = paged_attention(
            q.astype(dtype), pool_k, pool_v, block_tables, positions, window, first_key=first_key,
            platform=platform, implementation=implementation, interpret=platform == "cpu",
        )  # fmt: skip
        return out, pool_k, pool_v

    if q.shape[1] >= CUDNN_MIN_ROWS:
        implementation = None  # a prefill tile
    written = positions if written is None else written
    args = (q, k, v, kv.k, kv.v, positions, block_tables, jnp.asarray(window), written)
    if mesh is None or mesh.size == 1:
        out, new_k, new_v = local(*args)
    else:
        pool = partition_spec(KV_AXES, kv.k.shape, mesh)
        heads = pool[2]
        rows, whole = PartitionSpec(None, None, heads), PartitionSpec()
        out, new_k, new_v = jax.shard_map(
            local, mesh=mesh, in_specs=(rows, rows, rows, pool, pool, whole, whole, whole, whole),
            out_specs=(rows, pool, pool), check_vma=False,
        )(*args)  # fmt: skip
    return out, PagedKV(new_k, new_v)


def _store(pool: jax.Array, x: jax.Array, positions: jax.Array, tables: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Write x [N, Q, H, E] at its positions. Padding lands in page 0, which nobody reads."""
    size = pool.shape[1]
    block = page_of(tables, positions, size)
    return pool.at[block, positions % size].set(encode(x, dtype, pool.dtype), mode="promise_in_bounds")
