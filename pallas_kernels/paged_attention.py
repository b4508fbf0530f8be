"""Attention over a paged KV cache: the definition, in plain jnp, and its kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.block_shape import AttentionShape
from pallas_kernels.implementation import choose

EVERYTHING = 1 << 30  # a window that hides nothing
CUDNN_MIN_ROWS = 64  # query positions in a group from which cuDNN's tiles are filled
NEVER = -1e30  # a masked score: finite, so that a row of padding gives numbers, not NaN

_HALF = (jnp.bfloat16, jnp.float16)


def paged_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_tables: jax.Array,
    positions: jax.Array,
    window: jax.Array | int = EVERYTHING,
    *,
    first_key: int = 0,
    platform: str | None = None,
    implementation: str | None = None,
    interpret: bool | None = None,
    block_shape: AttentionShape | None = None,
) -> jax.Array:
    """Causal grouped-query attention of N groups of query positions, each over pages of its own; [N, Q, H, G, E].

    q: [N, Q, H, G, E], H KV heads of width E, G query heads to each. k_pool, v_pool: [B, C, H, E], B pages of C
    positions, in q's dtype or as unsigned integers that hold its bits; they already hold the keys and values of the
    queries themselves. block_tables: [N, P] int32, the pages of a group in order; groups may share pages. positions:
    [N, Q] int32 of the queries, -1 for padding, whose result is finite and means nothing. window: keys older than this
    many positions are not seen. first_key: nor are those before this position. platform: "cpu" or "gpu", which program
    "xla" is; None: JAX's backend. On a GPU "xla" reads all P pages of every group; on a CPU, and as "mosaic", the time
    is that of the context there is.

    A key that nobody sees may hold anything; its value has to be finite.

    implementation, interpret: see implementation.choose; interpret is of "mosaic" alone, whatever implementation is
    named, for a model says it by its platform. "mosaic" is for windows of a few positions: up to 64 rows
    Q * G of a KV head cost what one does. block_shape: see block_shape.attention_shape, which is taken for None.
    Raises ValueError for shapes that do not fit, and where an implementation cannot run.
    """
    _check(q, k_pool, v_pool, block_tables, positions)
    interpret = interpret if implementation == "mosaic" else None
    choice = choose(implementation, interpret, block_shape, available=("xla", "mosaic"), shape_type=AttentionShape)
    check_attention(choice.name, q.dtype, q.shape[-1], k_pool.shape[1])
    if choice.name == "mosaic":
        from pallas_kernels.mosaic.attention import attend

        k, v = (decode(pool, q.dtype) for pool in (k_pool, v_pool))
        return attend(q, k, v, block_tables, positions, window, first_key, choice.block_shape, choice.interpret)
    attend_to = partial(_attend_to, q, k_pool, v_pool, positions, window, first_key)
    if (platform or jax.default_backend()) != "cpu":
        return attend_to(_attend, block_tables)
    # A program for each context would be compiled, and would map memory, anew for the rest of the model.
    counts = context_buckets(block_tables.shape[1], k_pool.shape[1])
    branches = [lambda tables, count=count: attend_to(_attend_cpu, tables[:, :count]) for count in counts]
    needed = jnp.max(positions) // k_pool.shape[1] + 1
    return jax.lax.switch(jnp.searchsorted(jnp.array(counts), needed), branches, block_tables)


def context_buckets(pages: int, size: int) -> tuple[int, ...]:
    """Numbers of leading pages, of `pages` of `size` positions, that are told apart: a factor of two between them."""
    first = max(1, 64 // size)
    return (*(first << i for i in range(pages.bit_length()) if first << i < pages), pages)


def check_attention(implementation: str, dtype: Any, width: int, size: int) -> None:
    """Raises ValueError where an implementation does not take heads of this dtype and width, or pages of this size."""
    if implementation != "mosaic":
        return
    name = "implementation 'mosaic' of paged_attention"
    if dtype not in _HALF:
        raise ValueError(f"{name} is for bfloat16 and float16, not {dtype}")
    if width not in (64, 128):
        raise ValueError(f"{name} is for heads of width 64 and 128, not {width}")
    if size not in (8, 16, 32) and size % 64:
        raise ValueError(f"{name} is for pages of 8, 16, 32 or k * 64 positions, not {size}")


def encode(x: jax.Array, dtype: Any, storage: Any) -> jax.Array:
    """x in `dtype`, as it is kept in a pool of dtype `storage`."""
    x = x.astype(dtype)
    return x if storage == dtype else jax.lax.bitcast_convert_type(x, storage)


def decode(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def _attend_to(
    q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, positions: jax.Array, window: jax.Array | int, first_key: int,
    attend: Callable[..., jax.Array], tables: jax.Array,
) -> jax.Array:  # fmt: skip
    """The definition: attention to the pages of `tables` alone."""
    keys, values = (decode(_gather(pool, tables), q.dtype) for pool in (k_pool, v_pool))  # [N, P*C, H, E]
    return attend(q, keys, values, _visible(positions, keys.shape[1], window, first_key))


def _gather(pool: jax.Array, tables: jax.Array) -> jax.Array:
    """The pages of each group, in order: [N, P*C, H, E]. Whole pages are gathered as flat rows, i.e. copied."""
    blocks, size, heads, width = pool.shape
    rows = pool.reshape(blocks, -1).at[tables].get(mode="promise_in_bounds")  # [N, P, C*H*E]
    return rows.reshape(tables.shape[0], tables.shape[1] * size, heads, width)


def _visible(positions: jax.Array, length: int, window: jax.Array | int, first_key: int) -> jax.Array:
    """[N, Q, P*C]: which keys a query sees, itself and `window - 1` before it."""
    key, query = jnp.arange(length), positions[..., None]
    return (key <= query) & (key > query - window) & (key >= first_key)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """On a GPU: cuDNN's fused attention for prefill tiles, which never writes the scores; XLA for the few positions of
    a decode, and for what cuDNN does not take."""
    n, length, heads, group, width = q.shape
    fused = length >= CUDNN_MIN_ROWS and q.dtype in _HALF and width % 8 == 0 and width <= 128
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
    stored = jnp.uint16 if dtype == jnp.bfloat16 else dtype  # XLA:CPU widens bfloat16 for a selection
    folded = decode(jnp.where(own, encode(q, dtype, stored)[:, :, :, :, None], 0), dtype)
    folded = folded.reshape(n, length * heads * group, wide)
    scores = jnp.einsum("nrd,ntd->nrt", folded, k.reshape(n, -1, wide), preferred_element_type=jnp.float32)
    seen = jnp.repeat(visible, heads * group, axis=1)
    probs = _softmax(scores / math.sqrt(width), seen)
    out = jnp.einsum("nrt,ntd->nrd", probs.astype(dtype), v.reshape(n, -1, wide), preferred_element_type=jnp.float32)
    out = out.reshape(n, length, heads, group, heads, width)
    return jnp.stack([out[:, :, h, :, h] for h in range(heads)], axis=2).astype(dtype)


def _softmax(scores: jax.Array, visible: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.where(visible, scores, NEVER), axis=-1)


def _check(q: jax.Array, k_pool: jax.Array, v_pool: jax.Array, block_tables: jax.Array, positions: jax.Array) -> None:
    n, length, heads, _, width = q.shape
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if pool.ndim != 4 or pool.shape[2:] != (heads, width):
            raise ValueError(f"{name} has shape {pool.shape}; with q {q.shape} it must be [B, C, {heads}, {width}]")
        if pool.dtype != q.dtype and pool.dtype != f"uint{8 * q.dtype.itemsize}":
            raise ValueError(f"{name} is {pool.dtype}; it must be {q.dtype} or uint{8 * q.dtype.itemsize} of its bits")
    if block_tables.ndim != 2 or block_tables.shape[0] != n:
        raise ValueError(f"block_tables has shape {block_tables.shape}; with q {q.shape} it must be [{n}, P]")
    if positions.shape != (n, length):
        raise ValueError(f"positions has shape {positions.shape}; it must be {(n, length)}")
