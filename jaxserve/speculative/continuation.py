"""Drafts that the host expects, one step before the device needs them.

The host knows a request up to the step in flight, which may add 1 to 1 + K tokens. So it hands over a longer
continuation with the position that it starts at. When the step is done, the device compares what was said with what was
expected: where it agrees the next K tokens are the drafts, where it does not there are none. Whatever is built on the
host can propose like this: suffix structures, tokens that a grammar forces.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxserve.speculative.proposer import ProposeContext, cut
from models.base import Array


@struct.dataclass
class Continuation:
    """What the host expects of each slot.

    start: [B] int32, position of the first token, at most the number of tokens known to the host. tokens: [B, C] int32,
    -1 after the last; C = 1 + 2K serves any step in flight. most: [B, 2+K] int32, how many may be drafts once the first
    0, 1, ... 1+K of them have been said.
    """

    start: Array
    tokens: Array
    most: Array


def empty_continuation(num_slots: int, num_drafts: int) -> Continuation:
    """No expectations: NumPy, to be filled by the host."""
    return Continuation(
        start=np.zeros(num_slots, np.int32),
        tokens=np.full((num_slots, 1 + 2 * num_drafts), -1, np.int32),
        most=np.full((num_slots, 2 + num_drafts), num_drafts, np.int32),
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
    most = jnp.take_along_axis(continuation.most, jnp.clip(first, 0, continuation.most.shape[1] - 1)[:, None], axis=1)
    usable = agrees[:, None] & (first >= 0)[:, None] & (source < width) & (jnp.arange(num_drafts) < most)
    return cut(jnp.where(usable, found, -1), context)
