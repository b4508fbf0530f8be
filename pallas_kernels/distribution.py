"""What a row of logits is sampled from under its filters, as a weight function that is never written to memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.draw import tile_width
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
class Distribution:
    """The distribution of every row, not normalised: a function of the logits that it was made of. Every field [R].

    A greedy row is one that keeps a single token.
    """

    top: jax.Array  # float32, the largest logit
    temperature: jax.Array  # float32 > 0
    threshold: Threshold

    def scaled(self, logits: jax.Array) -> jax.Array:
        """Log-weights relative to the most probable token, [R, ...] float32: 0 at the top, where +inf wins over all."""
        shape = (-1,) + (1,) * (logits.ndim - 1)
        top = self.top.reshape(shape)
        return jnp.where(logits == top, 0.0, (logits - top) / self.temperature.reshape(shape))

    def weight(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """logits [R, n, w], ids [n, w] or [R, 1, w] -> weights in [0, 1] of logits' shape."""
        return jnp.where(self.threshold.keeps(logits, ids), jnp.exp(self.scaled(logits)), 0.0)

    def weight_of(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """[R]: the weight of one token a row. logits [R, V] float32, ids [R] int32 in [0, V)."""
        at = ids[:, None]
        return self.weight(jnp.take_along_axis(logits, at, axis=1)[:, None], at[:, None])[:, 0, 0]


def largest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest of logits [R, V] and its id, the lowest among equals: [R] float32, [R] int32. NaN wins over all.

    By the maxima of tiles, a plain reduction that XLA vectorises, and then inside one tile; argmax and comparisons of
    the whole row take ten times as long on a CPU.
    """
    width = tile_width(logits.shape[1])
    if over := -logits.shape[1] % width:
        logits = jax.lax.optimization_barrier(jnp.pad(logits, ((0, 0), (0, over)), constant_values=-jnp.inf))
    tiles = logits.reshape(logits.shape[0], -1, width)
    maxima = jnp.max(tiles, axis=-1)
    top = jnp.where(_has_nan(tiles), jnp.nan, jnp.max(maxima, axis=-1))
    tile = jnp.argmax(maxima == top[:, None], axis=-1)
    inside = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    return top, (tile * width + jnp.argmax(inside == top[:, None], axis=-1)).astype(jnp.int32)


def _has_nan(tiles: jax.Array) -> jax.Array:
    """[R] bool, of [R, n, w]. On a CPU a maximum loses a NaN that is not the first it meets; a sum never does."""
    suspect = jnp.isnan(jnp.sum(jnp.sum(tiles, axis=-1), axis=-1))  # so is the sum of infinities of either sign
    return jax.lax.cond(jnp.any(suspect), lambda: jnp.any(tiles != tiles, axis=(1, 2)), lambda: jnp.zeros_like(suspect))


def is_finite(top: jax.Array) -> jax.Array:
    """bool of top's shape: False where the row's maximum says that nothing can be drawn."""
    return ~(jnp.isnan(top) | (top == -jnp.inf))


def find_distribution(logits: jax.Array, top: jax.Array, filters: Filters, random: jax.Array) -> Distribution:
    """The distribution of the rows that are `random` [R] bool; of the others the result means nothing.

    logits: [R, V] float32. top: [R], its maximum. A filter that no row asks for is not run.
    """
    everything = keep_everything(*logits.shape)
    unfiltered = Distribution(
        top=jnp.where(random, top, 0.0),
        temperature=jnp.where(random & (filters.temperature > 0), filters.temperature, 1.0),
        threshold=everything,
    )
    limited = (filters.top_k > 0) & (filters.top_k < logits.shape[1])
    filtered = random & (limited | (filters.top_p < 1) | (filters.min_p > 0))

    def filter_rows() -> Threshold:
        top_k = jnp.where(filtered & limited, filters.top_k, 0)
        top_p = jnp.where(filtered, filters.top_p, 1.0)
        min_p = jnp.where(filtered, filters.min_p, 0.0)
        return find_threshold(logits, unfiltered.scaled, top_k, top_p, min_p)

    threshold = jax.lax.cond(jnp.any(filtered), filter_rows, lambda: everything)
    return Distribution(unfiltered.top, unfiltered.temperature, threshold)


def distribution_of_rows(logits: jax.Array, filters: Filters, valid: jax.Array) -> tuple[Distribution, jax.Array]:
    """The distribution of every `valid` row, greedy rows with their argmax alone; and finite [R] bool.

    logits: [R, V] float32. Rows that are not finite or not valid have some distribution that means nothing.
    """
    top, greedy = largest(logits)
    finite = is_finite(top)
    random = valid & finite & (filters.temperature > 0)
    found = find_distribution(logits, top, filters, random)
    threshold = Threshold(
        value=jnp.where(random, found.threshold.value, top),
        id=jnp.where(random, found.threshold.id, greedy),
    )
    return Distribution(jnp.where(finite, top, 0.0), found.temperature, threshold), finite
