"""The thinking budget: after so many tokens inside a thinking section its end marker is forced.

A section begins after a start marker, in the prompt or in the output, and lasts until an end marker is complete. It may
be entered again. All that is kept of a request is where its open section began.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Markers:
    """Token sequences, static: part of the compiled program."""

    start: tuple[int, ...] = struct.field(pytree_node=False)
    end: tuple[int, ...] = struct.field(pytree_node=False)


def section_start(markers: Markers, tokens: jax.Array, num: jax.Array) -> jax.Array:
    """Where the thinking section that is open after the first `num` of tokens [l] began; -1 where none is open."""
    after = jnp.arange(1, len(tokens) + 1)  # number of tokens once the i-th is there
    known = after <= num
    starts, ends = (_completed(marker, tokens) & known for marker in (markers.start, markers.end))
    last_end = jnp.max(jnp.where(ends, after, 0))
    first = jnp.min(jnp.where(starts & (after > last_end), after, len(tokens) + 1))
    return jnp.where(first > len(tokens), -1, first).astype(jnp.int32)


def _completed(marker: tuple[int, ...], tokens: jax.Array) -> jax.Array:
    """[l] bool: whether the marker ends with the i-th token."""
    length = len(tokens)
    padded = jnp.concatenate([jnp.full(len(marker) - 1, -1, tokens.dtype), tokens])
    return jnp.all(jnp.stack([padded[i : i + length] == token for i, token in enumerate(marker)]), axis=0)


def advance_section(markers: Markers, section: jax.Array, history: jax.Array, num: jax.Array) -> jax.Array:
    """The section after one more token, of which history [H] now has `num`."""

    def ends_with(marker: tuple[int, ...]) -> jax.Array:
        index = num - len(marker) + jnp.arange(len(marker))
        return (num >= len(marker)) & jnp.all(history[jnp.maximum(index, 0)] == jnp.array(marker))

    opened = jnp.where((section < 0) & ends_with(markers.start), num, section)
    return jnp.where(ends_with(markers.end), -1, opened).astype(jnp.int32)


def sections_of_window(
    markers: Markers, section: jax.Array, history: jax.Array, num: jax.Array, window: int
) -> jax.Array:
    """[1+window] int32: the section before the token at num, num + 1, ... of one slot's history [H]."""

    def step(section: jax.Array, ahead: jax.Array) -> tuple[jax.Array, jax.Array]:
        following = advance_section(markers, section, history, num + ahead + 1)
        return following, following

    _, rest = jax.lax.scan(step, section, jnp.arange(window))
    return jnp.concatenate([section[None], rest])


def forced_token(
    markers: Markers, section: jax.Array, budget: jax.Array, history: jax.Array, num: jax.Array
) -> jax.Array:
    """The only token that may come after the first `num` of history [H]; -1 where any may.

    section, budget: int32 scalars; a budget of -1 is none. Of an end marker that has begun the rest is forced.
    """
    end = jnp.array(markers.end)
    begun = jnp.int32(0)  # length of the longest beginning of the end marker that the section ends with
    for length in range(1, len(markers.end)):
        index = num - length + jnp.arange(length)
        match = (num - section >= length) & jnp.all(history[jnp.maximum(index, 0)] == end[:length])
        begun = jnp.where(match, length, begun)
    spent = (section >= 0) & (budget >= 0) & (num - section >= budget)
    return jnp.where(spent, end[begun], -1).astype(jnp.int32)


def force(logits: jax.Array, token: jax.Array) -> jax.Array:
    """logits [..., V] with nothing left but the token [...], where that is not -1."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    only = jnp.where(ids == token[..., None], 0.0, -jnp.inf)
    return jnp.where((token >= 0)[..., None], only, logits)
