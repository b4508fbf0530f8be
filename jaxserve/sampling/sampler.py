"""From logits to tokens: one function for every row of every program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.sampling.draw import draw, random_words
from jaxserve.sampling.filters import Threshold, find_threshold, keep_everything

STREAM_DRAW = 0  # randomness of (seed, position) is split into streams; speculation will use others


@struct.dataclass
class SamplingRows:
    """What one row needs to be sampled; every field [R] but seed."""

    temperature: jax.Array  # float32, 0 = greedy
    top_p: jax.Array  # float32
    min_p: jax.Array  # float32
    top_k: jax.Array  # int32
    seed: jax.Array  # [R, 2] uint32
    position: jax.Array  # int32, index of the token within the output
    want_logprob: jax.Array  # bool
    valid: jax.Array  # bool, False = padding: its result means nothing and must cost nothing


@struct.dataclass
class Sampled:
    """Of every row: token [R] int32; logprob [R] float32 of the raw distribution (0 where not asked for);
    finite [R] bool, False when the row held a NaN or nothing but -inf."""

    token: jax.Array
    logprob: jax.Array
    finite: jax.Array


def sample(logits: jax.Array, rows: SamplingRows) -> Sampled:
    """Sample every row of logits [R, V] (any float dtype).

    Order: float32 -> temperature -> min_p -> top_k -> top_p -> draw; greedy rows take the argmax, ties to the lowest
    id. A batch that is all greedy, has no filter, or wants no logprobs does not run that part.
    """
    logits = logits.astype(jnp.float32)
    top = jnp.max(logits, axis=-1)  # [R]; NaN wins over everything
    greedy = first_equal(logits, top)
    finite = ~(jnp.isnan(top) | (top == -jnp.inf))
    random = rows.valid & (rows.temperature > 0) & finite
    token = jax.lax.cond(
        jnp.any(random), lambda: jnp.where(random, _sample_random(logits, top, rows, random), greedy), lambda: greedy
    )
    logprob = jax.lax.cond(
        jnp.any(rows.want_logprob & rows.valid), lambda: _logprob(logits, token), lambda: jnp.zeros_like(top)
    )
    return Sampled(token=token, logprob=logprob, finite=finite)


def first_equal(logits: jax.Array, top: jax.Array) -> jax.Array:
    """Lowest id whose logit is the row's maximum; two plain reductions, which XLA vectorises and argmax is not."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    found = jnp.min(jnp.where(logits == top[:, None], ids, logits.shape[-1]), axis=-1)
    return jnp.minimum(found, logits.shape[-1] - 1)  # a row of NaN matches nothing


def _sample_random(logits: jax.Array, top: jax.Array, rows: SamplingRows, random: jax.Array) -> jax.Array:
    temperature = jnp.where(random, rows.temperature, 1.0)
    top = jnp.where(random, top, 0.0)

    def scaled(x: jax.Array) -> jax.Array:
        """Log-weight relative to the most probable token: 0 at the top, +inf logits win over everything else."""
        shape = (-1,) + (1,) * (x.ndim - 1)
        best = top.reshape(shape)
        return jnp.where(x == best, 0.0, (x - best) / temperature.reshape(shape))

    limited = (rows.top_k > 0) & (rows.top_k < logits.shape[1])
    filtered = random & (limited | (rows.top_p < 1) | (rows.min_p > 0))

    def filter_rows() -> Threshold:
        top_k = jnp.where(filtered & limited, rows.top_k, 0)
        top_p = jnp.where(filtered, rows.top_p, 1.0)
        return find_threshold(logits, scaled, top_k, top_p, jnp.where(filtered, rows.min_p, 0.0))

    threshold = jax.lax.cond(jnp.any(filtered), filter_rows, lambda: keep_everything(*logits.shape))

    def weight(x: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.where(threshold.keeps(x, ids), jnp.exp(scaled(x)), 0.0)

    return draw(logits, weight, random_words(rows.seed, rows.position, STREAM_DRAW))


def _logprob(logits: jax.Array, token: jax.Array) -> jax.Array:
    """log softmax(logits)[token]."""
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return jnp.where(chosen == jnp.inf, 0.0, chosen - jax.nn.logsumexp(logits, axis=-1))
