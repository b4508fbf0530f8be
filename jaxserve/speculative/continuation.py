"""Drafts that the host expects, one step before the device needs them.

The host knows a request up to the step in flight, which may add 1 to 1 + K tokens. So it hands over a longer
continuation with the position that it starts at. When the step is done, the device compares what was said with what was
expected: where it agrees the next K tokens are the drafts, where it does not there are none. Whatever is built on the
host can propose like this: suffix structures, tokens that a grammar forces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from jaxserve.speculative.proposer import Proposal, ProposeContext, Stateless, cut
from models.base import Array, Params


@struct.dataclass
class Continuation:
    """What the host expects of each slot.

    start: [B] int32, position of the first token, at most the number of tokens known to the host. tokens: [B, C] int32,
    -1 after the last; C = 1 + 2K serves any step in flight.
    """

    start: Array
    tokens: Array


def empty_continuation(num_slots: int, num_drafts: int) -> Continuation:
    """No expectations: NumPy, to be filled by the host."""
    return Continuation(np.zeros(num_slots, np.int32), np.full((num_slots, 1 + 2 * num_drafts), -1, np.int32))


@dataclass(frozen=True)
class ContinuationProposer(Stateless):
    """Takes drafts from the context's `continuation`, which the host sends with every step."""

    num_speculative_tokens: int

    def with_num_speculative_tokens(self, count: int) -> ContinuationProposer:
        return replace(self, num_speculative_tokens=count)

    def propose(self, params: Params, kv: None, context: ProposeContext, mesh: Mesh | None) -> Proposal:
        if context.continuation is None:
            raise ValueError("continuation of the context is None; this proposer needs what the host expects")
        with jax.named_scope("continuation"):
            return Proposal(
                drafts_of_continuation(context, context.continuation, self.num_speculative_tokens), None, kv
            )


def drafts_of_continuation(context: ProposeContext, continuation: Continuation, num_drafts: int) -> jax.Array:
    """[B, K] int32: the continuation from where each request is now, -1 if it has said anything else since."""
    width = continuation.tokens.shape[1]
    position = continuation.start[:, None] + jnp.arange(width, dtype=jnp.int32)
    said = jnp.take_along_axis(context.tokens, jnp.clip(position, 0, context.tokens.shape[1] - 1), axis=1)
    known = position < context.num_tokens[:, None]
    agrees = jnp.all(~known | (said == continuation.tokens), axis=1)
    first = context.num_tokens - continuation.start  # of the continuation, that is still to come
    source = first[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)
    found = jnp.take_along_axis(continuation.tokens, jnp.clip(source, 0, width - 1), axis=1)
    usable = agrees[:, None] & (first >= 0)[:, None] & (source < width)
    return cut(jnp.where(usable, found, -1), context)
