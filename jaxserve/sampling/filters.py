"""min_p, top_k and top_p as a threshold, found without sorting the row.

A filter keeps a prefix of the tokens in order of (value descending, id ascending), so all three together are one
number of survivors, and the last survivor (its value and its id) says of any token whether it is kept. The last
survivor is looked for among a few of the largest values, which carry a certificate: either the count that top_k and
min_p leave lies among them, or their mass shows where the nucleus ends. Rows without a certificate are looked up
again among more of them, up to all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

Scaled = Callable[[jax.Array], jax.Array]

CANDIDATES = (64, 1024)  # sizes tried before the whole row


@struct.dataclass
class Threshold:
    """The last survivor of each row: a token is kept iff it has a larger value, or the same and no larger id."""

    value: jax.Array  # [R] float32, -inf = everything is kept
    id: jax.Array  # [R] int32

    def keeps(self, values: jax.Array, ids: jax.Array) -> jax.Array:
        """values [R, n, w], ids [n, w] or [R, 1, w] -> bool of values' shape."""
        value, last = self.value[:, None, None], self.id[:, None, None]
        return (values > value) | ((values == value) & (ids <= last))


def keep_everything(rows: int, vocab: int) -> Threshold:
    """The threshold of rows without a filter."""
    return Threshold(value=jnp.full((rows,), -jnp.inf), id=jnp.full((rows,), vocab, jnp.int32))


def find_threshold(
    logits: jax.Array, scaled: Scaled, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> Threshold:
    """The survivors of min_p, then top_k, then top_p.

    logits: [R, V] float32. Order and ties are those of the logits themselves, so a threshold is exact whatever the
    temperature rounds together. scaled: logits [R, n] -> log-weights relative to the row's maximum. top_k [R] int32,
    <= 0 off; top_p [R] float32, 1 off; min_p [R] float32, 0 off. A row's result depends on that row alone.
    """
    vocab = logits.shape[1]
    sizes = [*(c for c in CANDIDATES if c < vocab), vocab]
    rows = _Rows(logits, scaled, top_k, top_p, min_p, (top_k <= 0) & (top_p >= 1) & (min_p <= 0))
    found, certain = _among(rows, sizes[0])
    for size in sizes[1:]:

        def retry(previous: tuple[Threshold, jax.Array], size: int = size) -> tuple[Threshold, jax.Array]:
            threshold, certain = previous
            wider, now_certain = _among(rows, size)
            return jax.tree.map(lambda old, new: jnp.where(certain, old, new), threshold, wider), certain | now_certain

        found, certain = jax.lax.cond(jnp.all(certain), lambda x: x, retry, (found, certain))
    return found


class _Rows(NamedTuple):
    logits: jax.Array
    scaled: Scaled
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    off: jax.Array  # [R] bool, no filter at all


def _among(rows: _Rows, size: int) -> tuple[Threshold, jax.Array]:
    """The threshold by the `size` largest logits, and whether they prove it."""
    vocab = rows.logits.shape[1]
    plain = jnp.where(rows.logits == 0, 0.0, rows.logits)  # top_k puts 0.0 before -0.0
    values, ids = jax.lax.top_k(plain, size)  # equal values: lowest id first
    z = rows.scaled(values)
    floor = jnp.log(rows.min_p)[:, None]  # -inf where off
    whole = size == vocab

    # How many min_p and top_k leave: known if they end among the candidates.
    passing = jnp.sum((z >= floor) & (z > -jnp.inf), axis=1)
    limit = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    known = whole | (limit <= size) | (passing < size)
    count = jnp.maximum(jnp.minimum(passing, limit), 1)

    # The nucleus: a token stays while the mass from it to the end of the survivors exceeds 1 - top_p. Summed from the
    # small end, this is exact also for top_p = 1 - 1e-7, where a sum from the large end has no digits left.
    nucleus = rows.top_p < 1
    weight = jnp.where(jnp.arange(size) < count[:, None], jnp.exp(z), 0.0)
    behind = jnp.zeros_like(rows.top_p) if whole else _mass_behind(rows, values[:, -1], ids[:, -1], nucleus & ~known)
    tail = jnp.flip(jnp.cumsum(jnp.flip(weight, 1), axis=1), 1) + behind[:, None]
    kept = jnp.sum((tail > (1 - rows.top_p)[:, None] * tail[:, :1]) & (weight > 0), axis=1)
    certain = rows.off | known | (nucleus & (kept < size) & (limit == vocab))  # the mass behind knows no top_k

    last = jnp.where(nucleus, jnp.clip(kept, 1, count), count)[:, None] - 1
    value = jnp.take_along_axis(values, last, axis=1)[:, 0]
    at = jnp.take_along_axis(ids, last, axis=1)[:, 0]
    return Threshold(jnp.where(rows.off, -jnp.inf, value), jnp.where(rows.off, vocab, at)), certain


def _mass_behind(rows: _Rows, value: jax.Array, at: jax.Array, wanted: jax.Array) -> jax.Array:
    """Mass of the tokens after the last candidate that min_p leaves; 0 for rows that do not ask."""

    def mass() -> jax.Array:
        x, ids = rows.logits, jnp.arange(rows.logits.shape[1], dtype=jnp.int32)
        after = (x < value[:, None]) | ((x == value[:, None]) & (ids > at[:, None]))
        z = rows.scaled(x)
        return jnp.sum(jnp.where(after & (z >= jnp.log(rows.min_p)[:, None]), jnp.exp(z), 0.0), axis=1)

    return jnp.where(wanted, jax.lax.cond(jnp.any(wanted), mass, lambda: jnp.zeros_like(rows.top_p)), 0.0)
