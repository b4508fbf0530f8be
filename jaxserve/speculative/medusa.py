"""Drafts from Medusa heads: all K at once, each blind to the others (models.medusa)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.speculative.drafting import pick, replicate
from jaxserve.speculative.proposer import Proposal, ProposeContext, Stateless, cut
from models.base import Params
from models.medusa import Medusa


@dataclass(frozen=True)
class MedusaProposer(Stateless):
    """Head i drafts the i-th token after the newest from the hidden state that the newest was drawn from.

    probabilistic: draw drafts from the heads' distributions at the request's temperature. replicated: the heads whole
    on every device. Raises ValueError for more drafts than heads.
    """

    model: Medusa
    num_speculative_tokens: int
    probabilistic: bool = False
    replicated: bool = False

    needs_hidden = True

    def __post_init__(self) -> None:
        if not 0 <= self.num_speculative_tokens <= self.model.num_heads:
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens}; it must be in "
                f"[0, {self.model.num_heads}], the number of Medusa heads"
            )

    def with_num_speculative_tokens(self, count: int) -> MedusaProposer:
        return replace(self, num_speculative_tokens=count)

    def load_params(self, target_params: Params, mesh: Mesh | None) -> Params:
        if self.replicated:
            return replicate(self.model.load_params(None), mesh)
        return self.model.load_params(mesh)

    def propose(self, params: Params, kv: None, context: ProposeContext, mesh: Mesh | None) -> Proposal:
        assert context.hidden is not None
        count = self.num_speculative_tokens
        if count == 0:
            return Proposal(jnp.full((len(context.num_tokens), 0), -1, jnp.int32), None, kv)
        with jax.named_scope("medusa"):
            last = jnp.maximum(context.n_emitted - 1, 0)[:, None, None]
            hidden = jnp.take_along_axis(context.hidden, last, axis=1)[:, 0]  # [B, D]
            picked = [pick(self.model.logits(params, hidden, i), context, i, self.probabilistic) for i in range(count)]
            drafts, q = jax.tree.map(lambda *each: jnp.stack(each, axis=1), *picked)
            return Proposal(cut(drafts, context), q, kv)
