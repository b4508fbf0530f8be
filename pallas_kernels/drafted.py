"""Slots with their drafts: what verification is asked, and what it answers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.distribution import Filters


@struct.dataclass
class Proposal:
    """The distribution that drafts were drawn from, as `top_k_top_p_sample` would: logits under filters.

    logits: [S, K, V], logits or log-probabilities of the drafting model. filters: of shape [S] or [S, K].
    A greedy draft (temperature 0) is one that had no alternative.
    """

    logits: jax.Array
    filters: Filters


@struct.dataclass
class Verified:
    """tokens [S, 1+K] int32, the drafts kept and the token after them, then -1. n_accepted [S] int32, drafts kept.
    finite [S] bool, False where the slot's first row held a NaN or nothing but -inf."""

    tokens: jax.Array
    n_accepted: jax.Array
    finite: jax.Array


@struct.dataclass
class Drafted:
    """S slots of 1+K rows, K drafts each."""

    logits: jax.Array  # [S, 1+K, V] float32
    drafts: jax.Array  # [S, K] int32 >= 0
    filters: Filters  # [S, 1+K]
    used: jax.Array  # [S, 1+K] bool
    words: jax.Array  # [S, 1+K, 8]

    @property
    def rows(self) -> jax.Array:
        """[S * (1+K), V]"""
        return self.logits.reshape(-1, self.logits.shape[2])

    def checkable(self, finite: jax.Array) -> jax.Array:
        """[S] int32: drafts that could be kept, those in front of the first row that cannot be drawn from."""
        sound = jnp.cumprod(finite & self.used, axis=1)
        return jnp.minimum(jnp.sum(sound, axis=1), jnp.sum(self.used[:, 1:], axis=1))

    def emit(self, n_accepted: jax.Array, last: jax.Array, finite: jax.Array) -> Verified:
        """n_accepted, last [S]: drafts kept and the token of the row after them; finite [S, 1+K]."""
        drafts = jnp.pad(self.drafts, ((0, 0), (0, 1)))
        at = jnp.arange(drafts.shape[1]) - n_accepted[:, None]
        tokens = jnp.where(at == 0, last[:, None], drafts)
        tokens = jnp.where((at < 0) | ((at == 0) & finite & self.used), tokens, -1)
        return Verified(tokens, n_accepted, finite[:, 0] | ~self.used[:, 0])


def at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [S, n, ...], index [S] -> [S, ...]."""
    return jax.vmap(lambda x, i: x[i])(x, index)


def leading(accepted: jax.Array, limit: jax.Array) -> jax.Array:
    """[S] int32: how many are accepted before the first that is not, at most `limit` [S]."""
    return jnp.minimum(jnp.sum(jnp.cumprod(accepted, axis=1, dtype=jnp.int32), axis=1), limit)


def per_row(filters: Filters, shape: tuple[int, ...]) -> Filters:
    """Filters of shape [S] or [S, n] -> [S, n]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x).reshape(shape[0], -1), shape), filters)
