"""Log-probabilities (or logits) of sampled tokens, of the most probable ones, and of ids that a request lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from models.base import Array

TokenLogprobs = dict[int, tuple[float, int]]  # token id -> (value, rank), on the host


@struct.dataclass
class Wanted:
    """What rows ask for. number: [...] int32, how many of the most probable tokens, -1 = no log-probabilities at all.
    ids: [..., M] int32, -1 = none."""

    number: Array
    ids: Array


@struct.dataclass
class Logprobs:
    """Of rows [...]: the token's value and rank, the N largest with their ids and ranks, those of M listed ids.

    Values float32, ids and ranks int32. A rank is 1 + the number of tokens with a strictly larger value.
    """

    token: Array  # [...]
    token_rank: Array
    top: Array  # [..., N]
    top_ids: Array
    top_ranks: Array
    listed: Array  # [..., M]
    listed_ranks: Array


def no_logprobs(shape: tuple[int, ...], number: int, listed: int) -> Logprobs:
    """Zeros: what rows that asked for nothing get."""

    def zeros(dtype: jnp.dtype, *more: int) -> jax.Array:
        return jnp.zeros((*shape, *more), dtype)

    return Logprobs(
        token=zeros(jnp.float32),
        token_rank=zeros(jnp.int32),
        top=zeros(jnp.float32, number),
        top_ids=zeros(jnp.int32, number),
        top_ranks=zeros(jnp.int32, number),
        listed=zeros(jnp.float32, listed),
        listed_ranks=zeros(jnp.int32, listed),
    )


def find_logprobs(logits: jax.Array, tokens: jax.Array, wanted: Wanted, number: int, normalize: bool) -> Logprobs:
    """Of logits [R, V] float32 and tokens [R].

    number: N, the most that any row may ask for. normalize: log-probabilities, else the logits themselves. What no row
    asks for is not computed.
    """
    rows, vocab = logits.shape
    listed = wanted.ids.shape[-1]
    shift = jax.nn.logsumexp(logits, axis=-1) if normalize else jnp.zeros(rows, jnp.float32)

    def value(x: jax.Array) -> jax.Array:
        """Of gathered logits [R, n]. A logit of +inf has all the probability."""
        return jnp.where(normalize & (x == jnp.inf), 0.0, x - shift[:, None])

    def gathered(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = jnp.take_along_axis(logits, jnp.clip(ids, 0, vocab - 1), axis=1)
        return value(found), jax.lax.map(lambda x: 1 + jnp.sum(logits > x[:, None], axis=1), found.T).T

    def top() -> tuple[jax.Array, jax.Array, jax.Array]:
        values, ids = jax.lax.top_k(logits, min(number, vocab))
        values, ids = jax.lax.optimization_barrier(values), jax.lax.optimization_barrier(ids)  # see filters.py
        return value(values), ids, _ranks(values)

    none = no_logprobs((rows,), min(number, vocab), listed)
    token, rank = (x[:, 0] for x in gathered(tokens[:, None]))
    largest = jax.lax.cond(
        jnp.any(wanted.number > 0) & (number > 0), top, lambda: (none.top, none.top_ids, none.top_ranks)
    )
    named = jax.lax.cond(
        jnp.any(wanted.ids >= 0), lambda: gathered(wanted.ids), lambda: (none.listed, none.listed_ranks)
    )
    return Logprobs(token, rank, *largest, *named)


def _ranks(values: jax.Array) -> jax.Array:
    """Of values [R, N] in descending order: one more than the index of the first equal one."""
    index = jnp.arange(values.shape[1], dtype=jnp.int32)
    new = jnp.concatenate([jnp.ones_like(values[:, :1], bool), values[:, 1:] != values[:, :-1]], axis=1)
    return 1 + jax.lax.cummax(jnp.where(new, index, 0), axis=1)


def token_logprobs(
    found: Logprobs, at: tuple[int, ...], token: int, number: int, listed_ids: Sequence[int] = ()
) -> TokenLogprobs:
    """Of NumPy results the row `at`: the token first, the `number` most probable ones (-1: all), the listed ids."""
    row = jax.tree.map(lambda x: x[at], found)
    count = len(row.top) if number < 0 else number
    others = [
        *zip(*(x[:count].tolist() for x in (row.top_ids, row.top, row.top_ranks)), strict=True),
        *zip(listed_ids, row.listed.tolist(), row.listed_ranks.tolist(), strict=False),
    ]
    first = {token: (float(row.token), int(row.token_rank))}
    return first | {i: (value, rank) for i, value, rank in others if i != token}


def most_probable(found: Logprobs, number: int) -> Logprobs:
    """With no more than `number` of the most probable tokens."""
    first = {name: getattr(found, name)[..., :number] for name in ("top", "top_ids", "top_ranks")}
    return replace(found, **first)
