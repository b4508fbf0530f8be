"""Judging drafts by the distributions of their rows, in plain jnp: what the kernels' verifier is tested against."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.acceptance import Pair, Weighted, pair_up, residual, residual_mass, weigh, weigh_proposal
from pallas_kernels.distribution import distribution_of_rows
from pallas_kernels.drafted import Drafted, Proposal, at, per_row
from pallas_kernels.draw import draw


class Verifier:
    """target: Distribution of the rows, fields [S, 1+K]; finite: [S, 1+K] bool.

    Rows are weighed when this is made, and each of the methods is called at most once.
    """

    def __init__(self, window: Drafted, proposal: Proposal | None) -> None:
        self.window, self.proposal = window, proposal
        shape = window.used.shape
        rows = distribution_of_rows(window.rows, jax.tree.map(jnp.ravel, window.filters), window.used.ravel())
        self.target, self.finite = jax.tree.map(lambda x: x.reshape(shape), rows)

    def pair(self) -> Pair:
        """p and q of the drafts."""
        window, vocab = self.window, self.window.logits.shape[2]
        p = weigh(window.logits[:, :-1].reshape(-1, vocab), jax.tree.map(lambda x: x[:, :-1].ravel(), self.target))
        if self.proposal is None:
            return pair_up(window.drafts, p, None)
        filters = per_row(self.proposal.filters, window.drafts.shape)
        return pair_up(window.drafts, p, weigh_proposal(self.proposal.logits, filters, window.used[:, 1:]))

    def residual_mass(self, pair: Pair, share: jax.Array) -> jax.Array:
        """[S, K]: the sum over tokens of max(share * p - q, 0); share [S, K]."""
        return residual_mass(pair, share)

    def draw(self, index: jax.Array, rejected: jax.Array, share: jax.Array, pair: Pair | None) -> jax.Array:
        """[S]: a token of row index [S] of each slot: of max(share * p - q, 0) where rejected [S], the row's draft was
        not kept, else of p. pair: None where nothing is rejected."""
        row = self._row(index)
        if pair is None:
            return draw(row.logits, row.distribution.weight, at(self.window.words, index))
        return self._draw_residual(row, index, rejected, share, pair)

    def _row(self, index: jax.Array) -> Weighted:
        logits = jnp.take_along_axis(self.window.logits, index[:, None, None], axis=1)[:, 0]
        return weigh(logits, jax.tree.map(lambda x: at(x, index), self.target))

    def _draw_residual(
        self, row: Weighted, index: jax.Array, rejected: jax.Array, share: jax.Array, pair: Pair
    ) -> jax.Array:
        words, rejected = at(self.window.words, index), rejected[:, None, None]
        index = jnp.minimum(index, self.window.drafts.shape[1] - 1)
        if pair.q is None:
            draft = at(pair.draft, index)[:, None, None]

            def without_draft(x: jax.Array, ids: jax.Array) -> jax.Array:
                return jnp.where(rejected & (ids == draft), 0.0, row.distribution.weight(x, ids))

            return draw(row.logits, without_draft, words)
        by_slot = jax.tree.map(lambda x: x.reshape(*self.window.drafts.shape, *x.shape[1:]), pair.q)
        q = jax.tree.map(lambda x: at(x, index), by_slot)
        ids = jnp.arange(row.logits.shape[1], dtype=jnp.int32)[None]
        mass = jnp.sum(residual(row, q, share, (row.logits[:, None], q.logits[:, None]), ids), axis=(1, 2))
        # p and q that agree but for rounding may leave nothing; then every token of p is as good.
        rejected &= (mass > 0)[:, None, None]

        def what_is_left(values: tuple[jax.Array, jax.Array], ids: jax.Array) -> jax.Array:
            return jnp.where(rejected, residual(row, q, share, values, ids), row.distribution.weight(values[0], ids))

        return draw((row.logits, q.logits), what_is_left, words)
