"""Drawing one token from a row of weights.

An inverse CDF over vocabulary order, in two levels: first a tile by the sums of tiles, then the position inside it.
A handful of random words serves a row instead of one for every entry of the vocabulary, and the weights are read once.
The running sums are fixed-point numbers of 44 bits, exact where float32 has 24, so a token of probability 1e-9 keeps
its rate wherever it lies in the vocabulary. The draw is a function of the weights, the seed and the position alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

TILE = 256  # entries
_LIMB = 22  # bits; two limbs to a number. Sums of up to 1024 limbs fit in 32 bits.
_MAX_ENTRIES = 1 << (32 - _LIMB)
MAX_VOCAB = _MAX_ENTRIES * TILE
WORDS = 4  # random words that one pick takes

Weight = Callable[[Any, jax.Array], jax.Array]


def random_words(seed: jax.Array, position: jax.Array, stream: int | jax.Array) -> jax.Array:
    """[R, 8] uint32, a pure function of (seed, position, stream): seed [R, 2] uint32, position [R] int32.

    Threefry-2x32 (Salmon et al. 2011), through jax.random.
    """

    def row(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, position), stream)
        return jax.random.bits(key, (2 * WORDS,), jnp.uint32)

    return jax.vmap(row)(seed, position)


def random_uniforms(seed: jax.Array, position: jax.Array, stream: int, count: int) -> jax.Array:
    """[R, count] float32 in [0, 1), a pure function of (seed, position, stream).

    seed [R, 2] uint32, position [R] int32. From 64 bits each, so that numbers near 0 are as finely spaced as float32
    has them.
    """

    def row(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, position), stream)
        return jax.random.bits(key, (2, count), jnp.uint32)

    high, low = jnp.moveaxis(jax.vmap(row)(seed, position).astype(jnp.float32), 1, 0)
    return jnp.minimum((high + low * 2.0**-32) * 2.0**-32, 1 - 2.0**-24)


def check_vocab(vocab: int) -> None:
    """Raises ValueError where the sums of so many entries may overflow, in whatever implementation of the draw."""
    if vocab > MAX_VOCAB:
        raise ValueError(f"vocabulary has {vocab} entries; a draw takes at most {MAX_VOCAB}")


def tile_width(vocab: int) -> int:
    """Entries in a tile that is a view of the row: the largest power of two up to 256 that divides `vocab`; 256, and a
    padded row, where that would leave more than 1024 tiles."""
    width = min(TILE, vocab & -vocab)
    return width if vocab <= _MAX_ENTRIES * width else TILE


def draw(values: Any, weight: Weight, words: jax.Array) -> jax.Array:
    """One id a row, with probability proportional to its weight.

    values: [R, V] float32, what weights are made of, or a tuple of such arrays; V at most 262144.
    weight: (values [R, n, w], ids [n, w] or [R, 1, w]) -> weights >= 0 of the values' shape; called for the whole row,
            where it is fused into the sums, and again for the one tile that the row ends in. Beyond the row values are
            -inf, and must weigh nothing.
    words:  [R, 8] uint32 from `random_words`.
    Returns [R] int32; never an id of weight 0 unless the whole row is. Raises ValueError for a larger V.
    """
    vocab = jax.tree.leaves(values)[0].shape[1]
    check_vocab(vocab)
    tiles = jax.tree.map(_in_tiles, values)
    ids = jnp.arange(-(-vocab // TILE) * TILE, dtype=jnp.int32).reshape(-1, TILE)
    sums = weight(tiles, ids).sum(-1)  # [R, n]
    tile = pick(sums, words[:, :WORDS])[:, None]
    chosen = jax.tree.map(lambda x: jnp.take_along_axis(x, tile[:, :, None], axis=1), tiles)  # [R, 1, w]
    ids = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
    inside = pick(weight(chosen, ids[:, None])[:, 0], words[:, WORDS:])
    return tile[:, 0] * TILE + inside


def _in_tiles(values: jax.Array) -> jax.Array:
    """[R, V] -> [R, n, 256], padded with -inf; a view where V is a multiple of 256."""
    missing = -values.shape[1] % TILE
    if missing:
        values = jnp.pad(values, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    return values.reshape(values.shape[0], -1, TILE)


def pick(weights: jax.Array, words: jax.Array) -> jax.Array:
    """[R] int32, an index with probability proportional to weights [R, n], n <= 1024, by four random words a row."""
    # Dividing by a little more than the total keeps the sum of the rounded shares below 1. What then lies between that
    # sum and 1, about a millionth, belongs to nobody: a number from there is replaced by a second one.
    total = jnp.sum(weights, axis=1, keepdims=True) * (1 + 2.0**-20)
    high, low = _running_sums(weights / jnp.where(total > 0, total, 1.0))
    first, second = _fixed_point(words[:, :2]), _fixed_point(words[:, 2:])
    outside = ~_below(first, (high[:, -1], low[:, -1]))
    target = (jnp.where(outside, second[0], first[0])[:, None], jnp.where(outside, second[1], first[1])[:, None])
    index = jnp.sum(~_below(target, (high, low)), axis=1)  # running sums grow: as many lie at or below the target
    last = jnp.max(jnp.where(weights > 0, jnp.arange(weights.shape[1]), 0), axis=1)
    return jnp.minimum(index, last).astype(jnp.int32)


def _running_sums(shares: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exact prefix sums of shares [R, n] in [0, 1), as two limbs of uint32."""
    scaled = shares * 2.0**_LIMB  # scaling, floor and difference are exact
    whole = jnp.floor(scaled)
    low = jnp.floor((scaled - whole) * 2.0**_LIMB).astype(jnp.uint32)
    high = jnp.cumsum(whole.astype(jnp.uint32), axis=1)
    low = jnp.cumsum(low, axis=1)
    return high + (low >> _LIMB), low & ((1 << _LIMB) - 1)


def _fixed_point(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[R, 2] random words -> a number in [0, 1) as two limbs."""
    return words[:, 0] >> (32 - _LIMB), words[:, 1] >> (32 - _LIMB)


def _below(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> jax.Array:
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
