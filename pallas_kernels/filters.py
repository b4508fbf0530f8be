"""min_p, top_k and top_p as a threshold, found without sorting the row.

A filter keeps a prefix of the tokens in order of (value descending, id ascending), so all three together are one
number of survivors, and the last survivor (its value and its id) says of any token whether it is kept. The last
survivor is looked for among a few of the largest values, which carry a certificate: either the count that top_k and
min_p leave lies among them, or their mass shows where the nucleus ends. Rows without a certificate are decided by
bisection over the bits of the value, which needs no order at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.draw import tile_width

Scaled = Callable[[jax.Array], jax.Array]

CANDIDATES = 64  # largest values looked at first


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
    rows = _Rows(logits, scaled, top_k, top_p, min_p)
    found, certain = _among_candidates(rows)
    certain |= rows.off
    exact = jax.lax.cond(jnp.all(certain), lambda: found, lambda: _bisect_rows(rows, certain, found))
    return jax.tree.map(lambda x, off: jnp.where(rows.off, off, x), exact, keep_everything(*logits.shape))


class _Rows(NamedTuple):
    """raw: [R, V]; the parameters [R]. What is made of the logits is made where it is used: most rows are decided by a
    few candidates, and a [R, V] array that only the fallback reads would still be written for all."""

    raw: jax.Array
    scaled: Scaled
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    @property
    def logits(self) -> jax.Array:
        """-0.0 and 0.0 are a tie."""
        return jnp.where(self.raw == 0, 0.0, self.raw)

    @property
    def z(self) -> jax.Array:
        """Log-weights."""
        return self.scaled(self.raw)

    def each(self) -> _Row:
        """What the fallback maps over."""
        return _Row(self.logits, self.z, self.top_k, self.top_p, self.min_p)

    @property
    def off(self) -> jax.Array:
        return (self.top_k <= 0) & (self.top_p >= 1) & (self.min_p <= 0)


class _Row(NamedTuple):
    """Of one row: logits and log-weights [V], and its parameters."""

    logits: jax.Array
    z: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


def _among_candidates(rows: _Rows) -> tuple[Threshold, jax.Array]:
    """The threshold by the largest logits, and whether they prove it."""
    vocab = rows.raw.shape[1]
    size = min(CANDIDATES, vocab)
    values, ids = most_probable(rows.logits, size)
    z = rows.scaled(values)
    floor = jnp.log(rows.min_p)[:, None]  # -inf where off

    # How many min_p and top_k leave: known if they end among the candidates.
    passing = jnp.sum((z >= floor) & (z > -jnp.inf), axis=1)
    limit = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    known = (limit <= size) | (passing < size) | (size == vocab)
    count = jnp.maximum(jnp.minimum(passing, limit), 1)

    # The nucleus: a token stays while the mass from it to the end of the survivors exceeds 1 - top_p. Summed from the
    # small end, this is exact also for top_p = 1 - 1e-7, where a sum from the large end has no digits left.
    nucleus = rows.top_p < 1
    weight = jnp.where(jnp.arange(size) < count[:, None], jnp.exp(z), 0.0)
    behind = _mass_behind(rows, values[:, -1], ids[:, -1], nucleus & ~known)
    tail = jnp.flip(jnp.cumsum(jnp.flip(weight, 1), axis=1), 1) + behind[:, None]
    kept = jnp.sum((tail > (1 - rows.top_p)[:, None] * tail[:, :1]) & (weight > 0), axis=1)
    certain = known | (nucleus & (kept < size) & (limit == vocab))  # the mass behind knows no top_k

    last = jnp.where(nucleus, jnp.clip(kept, 1, count), count)[:, None] - 1
    value, at = (jnp.take_along_axis(x, last, axis=1)[:, 0] for x in (values, ids))
    return Threshold(value, at), certain


def most_probable(logits: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The `size` largest of logits [R, V] and their ids, equal values by id.

    They lie in the `size` tiles with the largest maxima (of equal ones the first), so only these are searched.
    """
    rows, vocab = logits.shape
    width = tile_width(vocab)
    if vocab % width or vocab // width <= 2 * size:
        return _top_k(logits, size)
    tiles = logits.reshape(rows, -1, width)
    chosen = jnp.sort(_top_k(jnp.max(tiles, axis=-1), size)[1], axis=1)  # in order of id, as ties have to be
    values, at = _top_k(jnp.take_along_axis(tiles, chosen[:, :, None], axis=1).reshape(rows, -1), size)
    return values, jnp.take_along_axis(chosen, at // width, axis=1) * width + at % width


def _top_k(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """lax.top_k, equal values by index. Barriers keep XLA from slicing through it, which it then would not recognise
    and run as a sort of the whole row. One each: a barrier round the pair trips a check in XLA's partitioner."""
    values, ids = jax.lax.top_k(x, size)
    return jax.lax.optimization_barrier(values), jax.lax.optimization_barrier(ids)


def _mass_behind(rows: _Rows, value: jax.Array, at: jax.Array, wanted: jax.Array) -> jax.Array:
    """Mass of the tokens after the last candidate that min_p leaves; 0 for rows that do not ask."""

    def mass() -> jax.Array:
        x, ids = rows.logits, jnp.arange(rows.raw.shape[1], dtype=jnp.int32)
        after = (x < value[:, None]) | ((x == value[:, None]) & (ids > at[:, None]))
        return jnp.sum(jnp.where(after & (rows.z >= jnp.log(rows.min_p)[:, None]), jnp.exp(rows.z), 0.0), axis=1)

    return jnp.where(wanted, jax.lax.cond(jnp.any(wanted), mass, lambda: jnp.zeros_like(rows.top_p)), 0.0)


def _bisect_rows(rows: _Rows, certain: jax.Array, found: Threshold) -> Threshold:
    """`found` where it is certain, else the exact threshold. CPU goes row by row, since a row stays in its cache and
    certain rows cost nothing; elsewhere all rows go at once."""

    def one_by_one() -> Threshold:
        def row(args: tuple[_Row, jax.Array, Threshold]) -> Threshold:
            row, certain, found = args
            return jax.lax.cond(certain, lambda: found, lambda: _bisect(row))

        return jax.lax.map(row, (rows.each(), certain, found))

    def together() -> Threshold:
        return jax.tree.map(lambda old, new: jnp.where(certain, old, new), found, jax.vmap(_bisect)(rows.each()))

    return jax.lax.platform_dependent(cpu=one_by_one, default=together)


def _bisect(row: _Row) -> Threshold:
    """The exact threshold of one row: 32 passes for each filter, and some more for ties
    that a filter cuts through."""
    vocab = row.logits.shape[0]
    key, ids = _sort_key(row.logits), jnp.arange(vocab, dtype=jnp.uint32)
    alive = (row.z >= jnp.log(row.min_p)) & (row.z > -jnp.inf)

    def cut(alive: jax.Array, at: jax.Array, keep: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the alive, those above `at` and the first `keep` of those equal to it; and the id of the last of these."""
        tie = alive & (key == at)

        def nth_tie() -> jax.Array:
            return _largest(lambda i: jnp.sum(tie & (ids < i)) < keep, vocab.bit_length())

        last = jax.lax.cond(jnp.sum(tie) > keep, nth_tie, lambda: jnp.uint32(vocab))
        return alive & ((key > at) | (tie & (ids <= last))), last

    def by_count() -> tuple[jax.Array, jax.Array, jax.Array]:
        at = _largest(lambda t: jnp.sum(alive & (key >= t)) >= row.top_k, 32)
        kept, last = cut(alive, at, row.top_k - jnp.sum(alive & (key > at)))
        return kept, at, last

    def everyone() -> tuple[jax.Array, jax.Array, jax.Array]:
        return alive, jnp.min(jnp.where(alive, key, jnp.uint32(0xFFFFFFFF))), jnp.uint32(vocab)

    limited = (row.top_k > 0) & (row.top_k < jnp.sum(alive))
    alive, at, last = jax.lax.cond(limited, by_count, everyone)

    def by_mass() -> tuple[jax.Array, jax.Array]:
        weight = jnp.where(alive, jnp.exp(row.z), 0.0)
        rest = (1 - row.top_p) * jnp.sum(weight)
        at = _largest(lambda t: jnp.sum(jnp.where(key < t, weight, 0.0)) <= rest, 32)
        tie = alive & (key == at)
        below, each = jnp.sum(jnp.where(key < at, weight, 0.0)), jnp.max(jnp.where(tie, weight, 0.0))
        dropped = jnp.floor((rest - below) / jnp.where(each > 0, each, 1.0)).astype(jnp.int32)
        return at, cut(alive, at, jnp.maximum(jnp.sum(tie) - dropped, 1))[1]

    at, mass_last = jax.lax.cond(row.top_p < 1, by_mass, lambda: (at, last))
    # A tie that top_k cut through and top_p keeps whole still ends where top_k cut it.
    last = jnp.where(mass_last == vocab, jnp.max(jnp.where(alive & (key == at), ids, 0)), mass_last)
    value = jnp.max(jnp.where(key == at, row.logits, -jnp.inf))
    return Threshold(value, last.astype(jnp.int32))


def _sort_key(x: jax.Array) -> jax.Array:
    """float32 -> uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(holds: Callable[[jax.Array], jax.Array], bits: int) -> jax.Array:
    """The largest number of `bits` bits for which a predicate holds that holds up to some number and not beyond."""

    def add_bit(i: jax.Array, number: jax.Array) -> jax.Array:
        candidate = number | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, number)

    return jax.lax.fori_loop(0, bits, add_bit, jnp.uint32(0))
