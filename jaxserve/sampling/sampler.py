"""From logits to tokens: one function for every row of every program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.draw import random_words
from pallas_kernels.top_k_top_p import Filters, top_k_top_p_sample

STREAM_DRAW = 0  # randomness of (seed, position) is split into streams; speculation will use others


@struct.dataclass
class SamplingRows:
    """What one row needs to be sampled; every field [R] but seed."""

    filters: Filters
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

    A batch that is all greedy, has no filter, or wants no logprobs does not run that part.
    """
    logits = logits.astype(jnp.float32)
    words = random_words(rows.seed, rows.position, STREAM_DRAW)
    drawn = top_k_top_p_sample(logits, rows.filters, words, rows.valid)
    logprob = jax.lax.cond(
        jnp.any(rows.want_logprob & rows.valid),
        lambda: _logprob(logits, drawn.token),
        lambda: jnp.zeros(len(logits), jnp.float32),
    )
    return Sampled(token=drawn.token, logprob=logprob, finite=drawn.finite)


def _logprob(logits: jax.Array, token: jax.Array) -> jax.Array:
    """log softmax(logits)[token]."""
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return jnp.where(chosen == jnp.inf, 0.0, chosen - jax.nn.logsumexp(logits, axis=-1))
