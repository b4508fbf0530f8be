"""Sampling rows of logits under temperature, min_p, top_k and top_p: the definition, in plain jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.draw import draw
from pallas_kernels.filters import Threshold, find_threshold, keep_everything

Array = Any  # of JAX, or of NumPy


@struct.dataclass
class Filters:
    """What a row is sampled under; every field [R]."""

    temperature: Array  # float32, 0 = greedy
    min_p: Array  # float32, 0 = off
    top_k: Array  # int32, <= 0 or >= V = off
    top_p: Array  # float32, 1 = off


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
    top = jnp.max(logits, axis=-1)  # [R]; NaN wins over everything
    greedy = first_equal(logits, top)
    finite = ~(jnp.isnan(top) | (top == -jnp.inf))
    random = (filters.temperature > 0) & finite
    if valid is not None:
        random &= valid
    token = jax.lax.cond(
        jnp.any(random),
        lambda: jnp.where(random, _sample_random(logits, top, filters, random, words), greedy),
        lambda: greedy,
    )
    return Drawn(token=token, finite=finite)


def first_equal(logits: jax.Array, top: jax.Array) -> jax.Array:
    """Lowest id whose logit is the row's maximum; two plain reductions, which XLA vectorises and argmax is not."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    found = jnp.min(jnp.where(logits == top[:, None], ids, logits.shape[-1]), axis=-1)
    return jnp.minimum(found, logits.shape[-1] - 1)  # a row of NaN matches nothing


def _sample_random(
    logits: jax.Array, top: jax.Array, filters: Filters, random: jax.Array, words: jax.Array
) -> jax.Array:
    temperature = jnp.where(random, filters.temperature, 1.0)
    top = jnp.where(random, top, 0.0)

    def scaled(x: jax.Array) -> jax.Array:
        """Log-weight relative to the most probable token: 0 at the top, +inf logits win over everything else."""
        shape = (-1,) + (1,) * (x.ndim - 1)
        best = top.reshape(shape)
        return jnp.where(x == best, 0.0, (x - best) / temperature.reshape(shape))

    limited = (filters.top_k > 0) & (filters.top_k < logits.shape[1])
    filtered = random & (limited | (filters.top_p < 1) | (filters.min_p > 0))

    def filter_rows() -> Threshold:
        top_k = jnp.where(filtered & limited, filters.top_k, 0)
        top_p = jnp.where(filtered, filters.top_p, 1.0)
        return find_threshold(logits, scaled, top_k, top_p, jnp.where(filtered, filters.min_p, 0.0))

    threshold = jax.lax.cond(jnp.any(filtered), filter_rows, lambda: keep_everything(*logits.shape))

    def weight(x: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.where(threshold.keeps(x, ids), jnp.exp(scaled(x)), 0.0)

    return draw(logits, weight, words)
