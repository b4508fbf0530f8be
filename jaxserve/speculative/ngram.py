"""Drafts from the request's own history: what followed the last time the text went like this.

Prompt lookup decoding (Saxena 2023): the longest suffix of the history that occurred before is looked for, and the
tokens behind its earliest occurrence are the drafts. On the device, over all slots at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.speculative.proposer import Proposal, ProposeContext, Stateless, cut
from models.base import Params


@dataclass(frozen=True)
class NgramProposer(Stateless):
    """Prompt lookup. min_n, max_n: lengths of the suffix that is looked for, 1 <= min_n <= max_n.

    Raises ValueError for other lengths.
    """

    num_speculative_tokens: int
    min_n: int
    max_n: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise ValueError(f"min_n is {self.min_n} and max_n is {self.max_n}; it must be 1 <= min_n <= max_n")

    def with_num_speculative_tokens(self, count: int) -> NgramProposer:
        return replace(self, num_speculative_tokens=count)

    def propose(self, params: Params, kv: None, context: ProposeContext, mesh: Mesh | None) -> Proposal:
        with jax.named_scope("ngram"):
            drafts = lookup(
                context.tokens, context.num_tokens, self.min_n, self.max_n, self.num_speculative_tokens,
            )  # fmt: skip
            return Proposal(cut(drafts, context), None, kv)


def lookup(tokens: jax.Array, num_tokens: jax.Array, min_n: int, max_n: int, num_drafts: int) -> jax.Array:
    """[B, K] int32, what followed the earliest occurrence of the longest suffix; -1 where nothing matches.

    tokens: [B, L] int32, of which the first num_tokens [B] count. A match may overlap the suffix: the text is then
    periodic, and its continuation is carried on as far as K goes.
    """
    position, length = longest_match(tokens, num_tokens, max_n)
    period = jnp.maximum(num_tokens - 1 - position, 1)[:, None]
    offset = jnp.arange(num_drafts, dtype=jnp.int32)
    source = jnp.clip(position[:, None] + 1 + offset % period, 0, tokens.shape[1] - 1)
    found = (length >= min_n)[:, None]
    return jnp.where(found, jnp.take_along_axis(tokens, source, axis=1), -1)


def longest_match(tokens: jax.Array, num_tokens: jax.Array, max_n: int) -> tuple[jax.Array, jax.Array]:
    """Where a match of the history's suffix ends, and how long it is (at most max_n; 0 = none): [B], [B] int32.

    The longest one, and the earliest of equally long ones. One fused pass over [B, L]: entry i counts how far the text
    up to i agrees with the text up to the end, and a single maximum over (length, earliness) picks.
    """
    width = tokens.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)
    length = jnp.zeros_like(tokens)
    agree = index < num_tokens[:, None] - 1  # a proper earlier position
    for back in range(min(max_n, width)):
        last = jnp.take_along_axis(tokens, jnp.maximum(num_tokens - 1 - back, 0)[:, None], axis=1)  # [B, 1]
        shifted = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :width]  # entry i is tokens[i - back]
        agree = agree & (index >= back) & (shifted == last)
        length = length + agree
    best = jnp.max(length * width + (width - 1 - index), axis=1)
    return width - 1 - best % width, best // width
