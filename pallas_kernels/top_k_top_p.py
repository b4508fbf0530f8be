"""Sampling rows of logits under temperature, min_p, top_k and top_p: the definition, in plain jnp, and its kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.block_shape import BlockShape
from pallas_kernels.checks import check_rows
from pallas_kernels.distribution import Filters, find_distribution, is_finite, largest
from pallas_kernels.draw import draw
from pallas_kernels.implementation import choose

__all__ = ["Drawn", "Filters", "apply_mask", "top_k_top_p_sample"]


@struct.dataclass
class Drawn:
    """Of every row: token [R] int32; finite [R] bool, False where the row held a NaN or nothing but -inf; logprob [R]
    float32, the token's log-probability before temperature and filters, None where it was not asked for."""

    token: jax.Array
    finite: jax.Array
    logprob: jax.Array | None = None


def top_k_top_p_sample(
    logits: jax.Array,
    filters: Filters,
    words: jax.Array,
    valid: jax.Array | None = None,
    *,
    mask: jax.Array | None = None,
    logprob: bool = False,
    implementation: str | None = None,
    interpret: bool | None = None,
    block_shape: BlockShape | None = None,
) -> Drawn:
    """One token a row.

    Order: mask -> temperature -> min_p -> top_k -> top_p -> draw; a greedy row takes the argmax, ties to the lowest id.
    A filter that no row asks for is not run.

    logits: [R, V] float32 or bfloat16, V at most draw.MAX_VOCAB. filters: [R]. words: [R, 8] uint32 of
        draw.random_words.
    valid: [R] bool; a row that is not costs nothing, and its result means nothing.
    mask: [R, ceil(V / 32)] uint32; token i is allowed where bit i % 32 of word i // 32 is set.
    logprob: also the log-probability of the token, after the mask and before temperature.
    implementation, interpret, block_shape: see implementation.choose. All are static: of a function under jit they are
        part of what is compiled.
    Raises ValueError for shapes that do not fit and an implementation that cannot run.
    """
    check_rows(logits, filters, words, valid, mask)
    choice = choose(implementation, interpret, block_shape)
    logits = logits.astype(jnp.float32)
    if mask is not None:
        logits = apply_mask(logits, mask)
    if choice.name == "mosaic":
        from pallas_kernels.mosaic.sample import sample_random

        token, top = sample_random(logits, filters, words, valid, choice.block_shape, choice.interpret)
    elif choice.name == "triton":
        from pallas_kernels.triton.sample import sample_random as sample_triton

        token, top = sample_triton(logits, filters, words, valid)
    else:
        token, top = _sample(logits, filters, words, valid)
    return Drawn(token, is_finite(top), _logprob(logits, token, top) if logprob else None)


def apply_mask(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """-inf where a packed mask [R, ceil(V / 32)] uint32 forbids a token of logits [R, V]; fused with what follows."""
    ids = jnp.arange(logits.shape[1], dtype=jnp.uint32)
    bits = jnp.repeat(mask, 32, axis=1, total_repeat_length=32 * mask.shape[1])[:, : logits.shape[1]] >> (ids % 32)
    return jnp.where(bits & 1 == 1, logits, -jnp.inf)


def _sample(
    logits: jax.Array, filters: Filters, words: jax.Array, valid: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    top, greedy = largest(logits)
    random = (filters.temperature > 0) & is_finite(top)
    if valid is not None:
        random &= valid
    token = jax.lax.cond(
        jnp.any(random),
        lambda: jnp.where(random, _sample_random(logits, top, filters, random, words), greedy),
        lambda: greedy,
    )
    return token, top


def _sample_random(
    logits: jax.Array, top: jax.Array, filters: Filters, random: jax.Array, words: jax.Array
) -> jax.Array:
    return draw(logits, find_distribution(logits, top, filters, random).weight, words)


def _logprob(logits: jax.Array, token: jax.Array, top: jax.Array) -> jax.Array:
    """log softmax(logits)[token], [R]; +inf wins over everything else."""
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)
    relative = jnp.where(logits == top[:, None], 0.0, logits - top[:, None])
    return jnp.where(chosen[:, 0] == top, 0.0, chosen[:, 0] - top) - jnp.log(jnp.sum(jnp.exp(relative), axis=1))
