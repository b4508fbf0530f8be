"""Judging drafts by kernels. A row of p and of q is read from HBM once, but for what `residual` says.

Byte plan for S slots of K drafts: S * (1+K) rows of p, and S * K of q where there is one, each read once for its
statistics (V * 4 bytes, of which an eighth is written); from these `weigh` finds the filters' thresholds and the sums.
What a draft's chance needs is then a number a row, and the token of a slot costs what is listed in `residual`. Block
verification asks for the residual's mass at every draft: 8 KB each where p is filtered, a second reading of both rows
where it is not.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.acceptance import Pair
from pallas_kernels.block_shape import BlockShape, block_shape
from pallas_kernels.drafted import Drafted, Proposal, at, per_row
from pallas_kernels.mosaic.residual import Items, draw_residual, residual_mass
from pallas_kernels.mosaic.weigh import Weighed, weigh_rows


class MosaicVerifier:
    """As `pallas_kernels.verifier.Verifier`."""

    def __init__(self, window: Drafted, proposal: Proposal | None, shape: BlockShape | None, interpret: Any) -> None:
        self.window, self.interpret = window, interpret
        self.shape = shape or block_shape(window.used.size)
        drafts = jnp.pad(window.drafts, ((0, 0), (0, 1)), constant_values=-1)
        self.p = self._weigh(window.rows, window.filters, window.used, drafts)
        self.target = jax.tree.map(lambda x: x.reshape(drafts.shape), self.p.weighted.distribution)
        self.finite = self.p.finite.reshape(drafts.shape)
        self.q: Weighed | None = None
        if proposal is not None:
            rows = proposal.logits.astype(jnp.float32).reshape(-1, proposal.logits.shape[2])
            filters = per_row(proposal.filters, window.drafts.shape)
            self.q = self._weigh(rows, filters, window.used[:, 1:], jnp.full_like(window.drafts, -1))

    def _weigh(self, rows: jax.Array, filters: Any, used: jax.Array, drafts: jax.Array) -> Weighed:
        filters, used, drafts = jax.tree.map(jnp.ravel, (filters, used, drafts))
        return weigh_rows(rows, filters, used, drafts, self.shape, self.interpret)

    def pair(self) -> Pair:
        drafts = self.window.drafts

        def of_drafts(x: jax.Array) -> jax.Array:
            return x.reshape(drafts.shape[0], -1)[:, : drafts.shape[1]]

        p_draft = of_drafts(self.p.weighted.probability_of(jnp.pad(drafts, ((0, 0), (0, 1))).ravel()))
        p_rest = of_drafts(self.p.rest / self.p.weighted.total)
        q = None if self.q is None else self.q.weighted
        q_draft = jnp.ones(drafts.shape) if q is None else of_drafts(q.probability_of(drafts.ravel()))
        return Pair(drafts, self.p.weighted, q, p_draft, p_rest, q_draft)

    def residual_mass(self, pair: Pair, share: jax.Array) -> jax.Array:
        if self.q is None:
            return share * pair.p_rest
        slots, k = share.shape
        q = jnp.arange(slots * k, dtype=jnp.int32)
        nobody, always = jnp.full_like(q, -1), jnp.ones(q.shape, bool)
        items = Items(q + q // k, q, share.ravel(), nobody, always)
        return residual_mass(self.p, self.q, items, self.shape, self.interpret).reshape(share.shape)

    def draw(self, index: jax.Array, rejected: jax.Array, share: jax.Array, pair: Pair | None) -> jax.Array:
        slots, k = self.window.drafts.shape
        slot, place = jnp.arange(slots, dtype=jnp.int32), jnp.minimum(index, k - 1)
        draft = jnp.where(rejected, at(self.window.drafts, place), -1)
        items = Items(slot * (1 + k) + index, slot * k + place, share, draft, rejected)
        q = None if pair is None else self.q
        return draw_residual(self.p, q, items, at(self.window.words, index), self.shape, self.interpret)
