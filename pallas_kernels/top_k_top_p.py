"""Sampling rows of logits under temperature, min_p, top_k and top_p: the definition, in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.distribution import Filters, find_distribution, is_finite, largest
from pallas_kernels.draw import draw

__all__ = ["Drawn", "Filters", "top_k_top_p_sample"]


@struct.dataclass
class Drawn:
    """Of every row: token [R] int32, and finite [R] bool: False where the row held a NaN or nothing but -inf."""

    token: jax.Array
    finite: jax.Array


def top_k_top_p_sample(logits: jax.Array, filters: Filters, words: jax.Array, valid: jax.Array | None = None) -> Drawn:
    """One token a row.

    Order: temperature -> min_p -> top_k -> top_p -> draw; a greedy row takes the argmax, ties to the lowest id. A
    filter that no row asks for is not run.

    logits: [R, V] float32 or bfloat16, V at most draw.MAX_VOCAB. words: [R, 8] uint32 of draw.random_words.
    valid: [R] bool; a row that is not costs nothing, and its result means nothing.
    """
    logits = logits.astype(jnp.float32)
    top, greedy = largest(logits)
    finite = is_finite(top)
    random = (filters.temperature > 0) & finite
    if valid is not None:
        random &= valid
    token = jax.lax.cond(
        jnp.any(random),
        lambda: jnp.where(random, _sample_random(logits, top, filters, random, words), greedy),
        lambda: greedy,
    )
    return Drawn(token=token, finite=finite)


def _sample_random(
    logits: jax.Array, top: jax.Array, filters: Filters, random: jax.Array, words: jax.Array
) -> jax.Array:
    return draw(logits, find_distribution(logits, top, filters, random).weight, words)
