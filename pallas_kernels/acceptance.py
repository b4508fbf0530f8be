"""The chance that a draft is kept, and what the token after the last one kept is drawn from.

p is the target's distribution at a row and q the one that the row's draft was drawn from; a draft without a q had no
alternative, so its q is 1 at the draft. Neither is written down as [S, K, V] probabilities: both are weight functions,
recomputed inside the sums over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.distribution import Distribution, Filters, distribution_of_rows


@struct.dataclass
class Weighted:
    """Logits, the distribution made of them and the sum of its weights: [R, V], fields [R], [R]."""

    logits: jax.Array
    distribution: Distribution
    total: jax.Array

    def probability_of(self, ids: jax.Array) -> jax.Array:
        """[R], of one token a row."""
        return self.distribution.weight_of(self.logits, ids) / self.total


@struct.dataclass
class Pair:
    """p and q of each draft; q None for drafts without an alternative.

    draft: [S, K] int32. p, q: rows [S * K]. p_draft, q_draft: [S, K], the draft's own probabilities. p_rest: [S, K],
    the probability of all other tokens, summed on its own because 1 - p_draft has few digits where that is small.
    """

    draft: jax.Array
    p: Weighted
    q: Weighted | None
    p_draft: jax.Array
    p_rest: jax.Array
    q_draft: jax.Array


def weigh(logits: jax.Array, distribution: Distribution) -> Weighted:
    """logits: [R, V] float32."""
    return Weighted(logits, distribution, jnp.sum(_weights(logits, distribution), axis=1))


def weigh_proposal(logits: jax.Array, filters: Filters, used: jax.Array) -> Weighted:
    """The drafts' distribution. logits: [S, K, V]; filters and used: [S, K]."""
    rows = logits.astype(jnp.float32).reshape(-1, logits.shape[2])
    distribution, _ = distribution_of_rows(rows, jax.tree.map(jnp.ravel, filters), used.ravel())
    return weigh(rows, distribution)


def pair_up(draft: jax.Array, p: Weighted, q: Weighted | None) -> Pair:
    """draft: [S, K] int32 in [0, V). p, q: rows [S * K]."""
    ids, shape = draft.ravel(), draft.shape
    others = jnp.arange(p.logits.shape[1], dtype=jnp.int32) != ids[:, None]
    rest = jnp.sum(jnp.where(others, _weights(p.logits, p.distribution), 0.0), axis=1) / p.total
    q_draft = jnp.ones(shape) if q is None else q.probability_of(ids).reshape(shape)
    return Pair(draft, p, q, p.probability_of(ids).reshape(shape), rest.reshape(shape), q_draft)


def standard_chances(pair: Pair) -> jax.Array:
    """[S, K]: min(1, p / q) at the draft, given that those before it were kept."""
    return jnp.minimum(_ratio(pair), 1.0)


def block_chances(
    pair: Pair, checkable: jax.Array, mass: Callable[[Pair, jax.Array], jax.Array] | None = None
) -> tuple[jax.Array, jax.Array]:
    """Block verification (Sun et al. 2024, Algorithm 2): keep as many drafts as the last success says.

    checkable: [S] int32, drafts that may be kept; chances beyond are 0. mass: as `residual_mass`, the default.
    Returns the chances h_1 .. h_K, [S, K], and the shares p_0 .. p_K, [S, 1+K], of p in the residual after so many kept
    drafts.
    """

    def step(share: jax.Array, ratio: jax.Array) -> tuple[jax.Array, jax.Array]:
        share = jnp.minimum(share * ratio, 1.0)
        return share, share

    start = jnp.ones(pair.draft.shape[0])
    shares = jax.lax.scan(step, start, _ratio(pair).T)[1].T  # [S, K]
    left = (mass or residual_mass)(pair, jnp.concatenate([start[:, None], shares[:, :-1]], axis=1))[:, 1:]
    left = jnp.pad(left, ((0, 0), (0, 1)))  # of the row after each draft; the last has no draft to judge
    inner = jnp.where(shares >= 1, 1.0, left / jnp.where(shares >= 1, 1.0, left + 1 - shares))
    index = jnp.arange(1, 1 + shares.shape[1])
    chances = jnp.where(index == checkable[:, None], shares, inner)
    return jnp.where(index <= checkable[:, None], chances, 0.0), jnp.concatenate([start[:, None], shares], axis=1)


def residual_mass(pair: Pair, share: jax.Array) -> jax.Array:
    """[S, K]: the sum over tokens of max(share * p - q, 0); share [S, K] in [0, 1]."""
    if pair.q is None:
        return share * pair.p_rest
    ids = jnp.arange(pair.p.logits.shape[1], dtype=jnp.int32)[None]
    values = pair.p.logits[:, None], pair.q.logits[:, None]
    return jnp.sum(residual(pair.p, pair.q, share.ravel(), values, ids), axis=(1, 2)).reshape(share.shape)


def residual(p: Weighted, q: Weighted, share: jax.Array, values: Any, ids: jax.Array) -> jax.Array:
    """max(share * p - q, 0): values (logits of p, of q) [R, n, w], ids [n, w] or [R, 1, w], share [R]."""
    mine, theirs = (w.distribution.weight(x, ids) / w.total[:, None, None] for w, x in zip((p, q), values, strict=True))
    return jnp.maximum(share[:, None, None] * mine - theirs, 0.0)


def _weights(logits: jax.Array, distribution: Distribution) -> jax.Array:
    """[R, V] -> [R, V]."""
    return distribution.weight(logits[:, None], jnp.arange(logits.shape[1], dtype=jnp.int32)[None])[:, 0]


def _ratio(pair: Pair) -> jax.Array:
    """p / q at the draft. A draft that q has no probability for was not drawn from q; where p has, p decides."""
    known = pair.q_draft > 0
    return jnp.where(known, pair.p_draft / jnp.where(known, pair.q_draft, 1.0), jnp.where(pair.p_draft > 0, 1.0, 0.0))
