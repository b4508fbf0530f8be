"""Paged attention: store the new keys and values, attend over the request's pages.

One definition serves decode (N slots of Q = 1 + K positions) and prefill (N tiles of one prompt each), because
a tile of a prompt is a group of query positions over one block table like any other.

The pool is [L, B, C, H, E]: layers, pages, positions in a page, KV heads, head width. It is stored as unsigned
integers of the element's size on CPU: XLA's CPU backend widens a bfloat16 scatter into a float32 copy of the
whole pool, an integer scatter it does in place.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from models.base import Array, page_of
from models.sharding import partition_spec

_KV_AXES = ("layers", "pages", None, "kv_heads", None)
_CUDNN_MIN_ROWS = 64  # query positions in a group from which the fused kernel's tiles are filled
_NEVER = -1e30  # a masked score: finite, so that a row of padding gives numbers, not NaN


@struct.dataclass
class PagedKV:
    """Keys and values of every layer. k, v: [L, B, C, H, E]."""

    k: Array
    v: Array


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """How elements are kept in the pool: bfloat16 as its bits where the platform cannot scatter it in place."""
    return jnp.dtype(jnp.uint16) if platform == "cpu" and dtype == jnp.bfloat16 else jnp.dtype(dtype)


def _encode(x: jax.Array, dtype: jnp.dtype, storage: jnp.dtype) -> jax.Array:
    x = x.astype(dtype)
    return x if storage == dtype else jax.lax.bitcast_convert_type(x, storage)


def _decode(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def paged_attention(
    q: jax.Array,  # [N, Q, H, G, E] queries, G query heads to a KV head
    k: jax.Array,  # [N, Q, H, E]
    v: jax.Array,  # [N, Q, H, E]
    kv: PagedKV,
    layer: jax.Array | int,
    positions: jax.Array,  # [N, Q], -1 = padding
    block_tables: jax.Array,  # [N, P]
    window: jax.Array | int,  # keys older than this many positions are not seen
    dtype: jnp.dtype,
    platform: str,
    mesh: Mesh | None,
    written: jax.Array | None = None,  # [N, Q], the positions to store; -1 = not this one. None: all
    first_key: int = 0,  # keys before this position do not exist
) -> tuple[jax.Array, PagedKV]:
    """Causal grouped-query attention. Returns [N, Q, H, G, E] in `dtype` and the cache with k and v stored.

    With a mesh every device works on its own KV heads: nothing is exchanged.
    """

    def local(q, k, v, pool_k, pool_v, layer, positions, block_tables, window, written):
        # A masked score costs nothing, a masked value does: 0 * NaN is NaN. So values in the pool are always finite,
        # and one that is not makes its key NaN, which whoever sees that key notices, and nobody else.
        k, v = k.astype(dtype), v.astype(dtype)
        k, v = jnp.where(jnp.isfinite(v), k, jnp.nan), jnp.where(jnp.isfinite(v), v, 0)
        pool_k = _store(pool_k, k, layer, written, block_tables, dtype)
        pool_v = _store(pool_v, v, layer, written, block_tables, dtype)
        keys = _decode(_pages(pool_k, layer, block_tables), dtype)  # [N, P*C, H, E]
        values = _decode(_pages(pool_v, layer, block_tables), dtype)
        attend = _attend_cpu if platform == "cpu" else _attend
        visible = _visible(positions, keys.shape[1], window, first_key)
        return attend(q.astype(dtype), keys, values, visible), pool_k, pool_v

    written = positions if written is None else written
    args = (q, k, v, kv.k, kv.v, jnp.asarray(layer), positions, block_tables, jnp.asarray(window), written)
    if mesh is None or mesh.size == 1:
        out, new_k, new_v = local(*args)
    else:
        pool = partition_spec(_KV_AXES, kv.k.shape, mesh)
        heads = pool[3]
        rows, whole = PartitionSpec(None, None, heads), PartitionSpec()
        out, new_k, new_v = jax.shard_map(
            local, mesh=mesh, in_specs=(rows, rows, rows, pool, pool, whole, whole, whole, whole, whole),
            out_specs=(rows, pool, pool), check_vma=False,
        )(*args)  # fmt: skip
    return out, PagedKV(new_k, new_v)


def _store(
    pool: jax.Array, x: jax.Array, layer: jax.Array, positions: jax.Array, tables: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Write x [N, Q, H, E] at its positions. Padding lands in page 0, which nobody reads."""
    size = pool.shape[2]
    block = page_of(tables, positions, size)
    return pool.at[layer, block, positions % size].set(_encode(x, dtype, pool.dtype), mode="promise_in_bounds")


def _pages(pool: jax.Array, layer: jax.Array, tables: jax.Array) -> jax.Array:
    """The pages of each group, in order: [N, P*C, H, E]. Whole pages are gathered as flat rows, i.e. copied."""
    layers, blocks, size, heads, width = pool.shape
    flat = pool.reshape(layers * blocks, size * heads * width)
    rows = flat.at[layer * blocks + tables].get(mode="promise_in_bounds")  # [N, P, C*H*E]
    return rows.reshape(tables.shape[0], tables.shape[1] * size, heads, width)


def _visible(positions: jax.Array, length: int, window: jax.Array, first_key: int) -> jax.Array:
    """[N, Q, P*C]: which keys a query sees, itself and `window - 1` before it."""
    key, query = jnp.arange(length), positions[..., None]
    return (key <= query) & (key > query - window) & (key >= first_key)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """On a GPU: cuDNN's fused attention for prefill tiles, which never writes the scores; XLA for the few positions of
    a decode, and for what cuDNN does not take."""
    n, length, heads, group, width = q.shape
    fused = length >= _CUDNN_MIN_ROWS and q.dtype in (jnp.bfloat16, jnp.float16) and width % 8 == 0 and width <= 128
    if fused:  # it adds the mask to the scores: a NaN left in a page by an earlier owner would get through
        k = jnp.where(visible.any(1)[:, :, None, None], k, 0)
    out = jax.nn.dot_product_attention(
        q.reshape(n, length, heads * group, width),
        k,
        v,
        mask=visible[:, None],
        implementation="cudnn" if fused else "xla",
    )
    return out.reshape(q.shape)


def _attend_cpu(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """XLA:CPU's batched matmul wants few, wide operands: heads are folded into one contraction with zeros
    between them (H times the multiplications, and twice as fast from eight requests on)."""
    n, length, heads, group, width = q.shape
    dtype, wide = q.dtype, heads * width
    if length * group >= 32:  # a prefill tile: enough rows to a head for a matmul of its own
        scores = jnp.einsum("nqhge,nthe->nhgqt", q, k, preferred_element_type=jnp.float32)
        probs = _softmax(scores / math.sqrt(width), visible[:, None, None])
        return jnp.einsum("nhgqt,nthe->nqhge", probs.astype(dtype), v, preferred_element_type=jnp.float32).astype(dtype)
    own = jnp.eye(heads, dtype=bool)[:, None, :, None]
    bits = _encode(q, dtype, storage_dtype(dtype, "cpu"))  # XLA:CPU widens bfloat16 for a selection, too
    folded = _decode(jnp.where(own, bits[:, :, :, :, None], 0), dtype).reshape(n, length * heads * group, wide)
    scores = jnp.einsum("nrd,ntd->nrt", folded, k.reshape(n, -1, wide), preferred_element_type=jnp.float32)
    seen = jnp.repeat(visible, heads * group, axis=1)
    probs = _softmax(scores / math.sqrt(width), seen)
    out = jnp.einsum("nrt,ntd->nrd", probs.astype(dtype), v.reshape(n, -1, wide), preferred_element_type=jnp.float32)
    out = out.reshape(n, length, heads, group, heads, width)
    return jnp.stack([out[:, :, h, :, h] for h in range(heads)], axis=2).astype(dtype)


def _softmax(scores: jax.Array, visible: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.where(visible, scores, _NEVER), axis=-1)
