"""top_k_top_p_sample through jax-triton."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.distribution import Filters
from pallas_kernels.draw import TILE

BLOCK = 2048  # entries looked at together; with 4096 the nucleus spills registers
WARPS = 16
# PTX of CUDA 12.8, for XLA's assembler may be older than Triton's; no fused multiply-add, as the definition has none.
OPTIONS: dict[str, Any] = {"ptx_version": 87, "enable_fp_fusion": False}


def sample_random(
    logits: jax.Array, filters: Filters, words: jax.Array, valid: jax.Array | None, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Token [R] int32 and top [R] float32, the row's maximum (NaN where it holds one). logits: [R, V].

    options: of jax_triton's triton_call; compute_capability, where no GPU is there to be asked.
    """
    from pallas_kernels.triton.kernel import sample_kernel

    rows, vocab = logits.shape
    constants = kernel_constants(vocab)
    arrays, shape = scalars(filters, valid, vocab), jax.ShapeDtypeStruct
    out = [shape((rows,), jnp.int32), shape((rows,), jnp.float32), shape((rows, constants["TILES"]), jnp.float32)]
    token, top, _ = compat.jax_triton().triton_call(
        logits, *arrays, words, vocab, kernel=sample_kernel, out_shape=out, grid=(rows,), num_warps=WARPS,
        **_backend_options(), **constants, **options,
    )  # fmt: skip
    return token, top


def _backend_options() -> dict[str, Any]:
    """As the installed jax-triton takes them: before 0.4 it knows of no PTX version."""
    if "backend_options" in inspect.signature(compat.jax_triton().triton_call).parameters:
        return {"backend_options": OPTIONS}
    return {"enable_fp_fusion": OPTIONS["enable_fp_fusion"]}


def kernel_constants(vocab: int) -> dict[str, int]:
    return {"TILES": max(16, 1 << (-(-vocab // TILE) - 1).bit_length()), "BLOCK": BLOCK}


def scalars(filters: Filters, valid: jax.Array | None, vocab: int) -> tuple[jax.Array, jax.Array]:
    """floats [R, 3] and ints [R] of the kernel. A row that is not valid is greedy: that costs the least."""
    temperature = jnp.asarray(filters.temperature, jnp.float32)
    if valid is not None:
        temperature = jnp.where(valid, temperature, 0.0)
    limited = (filters.top_k > 0) & (filters.top_k < vocab)
    floats = jnp.stack([temperature, jnp.log(filters.min_p), filters.top_p], axis=1)
    return floats.astype(jnp.float32), jnp.where(limited, filters.top_k, 0).astype(jnp.int32)
