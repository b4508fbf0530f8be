"""The last survivor of min_p, top_k and top_p of one row, where all that can be asked of the row is a sum, a minimum or
a maximum of a function of its entries: inside a kernel, and of a row that is spread over devices.

The search is a bisection over the order of the values, in a window: entries that are at hand and hold everything from
some value up, and what is known of the mass below. Either a window decides a row, and says so, or the whole row has to
be the window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LOWEST = -0x7F800001  # key of -inf
NOBODY = 0x7FFFFFFF
Function = Callable[[jax.Array, jax.Array], jax.Array]


def key(x: jax.Array) -> jax.Array:
    """float32 -> int32 in the same order, both zeros alike."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return bits ^ (jax.lax.shift_right_arithmetic(bits, jnp.int32(31)) & jnp.int32(0x7FFFFFFF))


def middle(low: Any, high: Any) -> Any:
    """The mean of two int32, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


class Row(NamedTuple):
    """Scalars of a row. floor: log(min_p), -inf = off. top_k: 0 = off. top_p: 1 = off."""

    top: Any
    temperature: Any
    floor: Any
    top_k: Any
    top_p: Any

    def scaled(self, x: jax.Array) -> jax.Array:
        return jnp.where(x == self.top, 0.0, (x - self.top) / self.temperature)

    def weight(self, x: jax.Array) -> jax.Array:
        return jnp.exp(self.scaled(x))

    def alive(self, x: jax.Array) -> jax.Array:
        z = self.scaled(x)
        return (z >= self.floor) & (z > -jnp.inf)


@dataclass(frozen=True)
class Window:
    """fold: (kind, function) -> the "sum", "min" or "max" over all entries of function(values, ids), a scalar.

    lowest: int32, a key from which on nothing is missing. complete: nothing that min_p leaves is missing.
    behind: the mass of what is missing. top: key of the largest value.
    """

    fold: Callable[[str, Function], Any]
    lowest: Any
    complete: Any
    behind: Any
    top: Any

    def count(self, holds: Function) -> Any:
        return self.fold("sum", lambda x, ids: jnp.where(holds(x, ids), 1, 0))


def find(row: Row, window: Window) -> tuple[Any, Any, Any]:
    """The last survivor's value (float32) and id (int32), and whether they are certain."""

    def alive(x: jax.Array, ids: jax.Array) -> jax.Array:
        return row.alive(x) & (key(x) >= window.lowest)

    number = window.count(alive)
    limited = (row.top_k > 0) & (row.top_k <= number)
    at, last = jax.lax.cond(
        limited, lambda: _by_count(window, alive, row.top_k), lambda: (jnp.int32(LOWEST), jnp.int32(NOBODY))
    )

    def left(x: jax.Array, ids: jax.Array) -> jax.Array:
        return alive(x, ids) & ((key(x) > at) | ((key(x) == at) & (ids <= last)))

    behind = jnp.where(limited | window.complete, 0.0, window.behind)
    at, last, enough = jax.lax.cond(
        row.top_p < 1,
        lambda: _by_mass(row, window, left, behind),
        lambda: (window.fold("min", lambda x, ids: jnp.where(left(x, ids), key(x), NOBODY)), last, jnp.bool_(False)),
    )

    def found(x: jax.Array, ids: jax.Array) -> jax.Array:
        return left(x, ids) & (key(x) == at) & (ids <= last)

    value = window.fold("max", lambda x, ids: jnp.where(found(x, ids), x, -jnp.inf))
    identity = window.fold("max", lambda x, ids: jnp.where(found(x, ids), ids, -1))
    known = limited | window.complete | (enough & (row.top_k <= 0) & (row.floor == -jnp.inf))
    return value, identity, known & (identity >= 0)


def _by_count(window: Window, alive: Function, top_k: Any) -> tuple[Any, Any]:
    """The key of the last of the top_k largest, and its id where others are equal to it."""

    def step(bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = bounds
        mid = middle(low, high)
        number = window.count(lambda x, ids: alive(x, ids) & (key(x) >= mid))
        low = jnp.where(number >= top_k, mid, low)
        return low, jnp.where(number == top_k, low, jnp.where(number > top_k, high, mid))

    low = _bisect(step, window)
    at = window.fold("min", lambda x, ids: jnp.where(alive(x, ids) & (key(x) >= low), key(x), NOBODY))
    above = window.count(lambda x, ids: alive(x, ids) & (key(x) > at))
    return at, _cut(window, lambda x, ids: alive(x, ids) & (key(x) == at), top_k - above)


def _by_mass(row: Row, window: Window, left: Function, behind: Any) -> tuple[Any, Any, Any]:
    """Key and id of the nucleus' last token, and whether it lies in the window. As in `filters`, summed from the small
    end: tokens are dropped while the mass of all that are dropped stays within 1 - top_p."""

    def mass(holds: Function) -> Any:
        return window.fold("sum", lambda x, ids: jnp.where(left(x, ids) & holds(x, ids), row.weight(x), 0.0))

    rest = (1 - row.top_p) * (mass(lambda x, ids: ids >= 0) + behind)

    def step(bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = bounds
        mid = middle(low, high)
        fits = behind + mass(lambda x, ids: key(x) < mid) <= rest
        return jnp.where(fits, mid, low), jnp.where(fits, high, mid)

    low = _bisect(step, window)
    at = window.fold("min", lambda x, ids: jnp.where(left(x, ids) & (key(x) >= low), key(x), NOBODY))

    def tie(x: jax.Array, ids: jax.Array) -> jax.Array:
        return left(x, ids) & (key(x) == at)

    below = behind + mass(lambda x, ids: key(x) < at)
    each = window.fold("max", lambda x, ids: jnp.where(tie(x, ids), row.weight(x), 0.0))
    dropped = jnp.maximum((rest - below) / jnp.where(each > 0, each, 1.0), 0.0).astype(jnp.int32)
    keep = jnp.maximum(window.count(tie) - dropped, 1)
    return at, _cut(window, tie, keep), behind <= rest


def _bisect(step: Callable[[tuple[Any, Any]], tuple[Any, Any]], window: Window) -> Any:
    """The largest key up to which a predicate holds, where `step` narrows [low, high)."""
    start = (window.lowest, window.top + 1)
    return jax.lax.while_loop(lambda bounds: middle(*bounds) > bounds[0], step, start)[0]


def _cut(window: Window, tie: Function, keep: Any) -> Any:
    """The id of the `keep`-th of equal tokens; NOBODY where all are kept."""
    number = window.count(tie)

    def step(bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = bounds
        mid = middle(low, high)
        fits = window.count(lambda x, ids: tie(x, ids) & (ids < mid)) < keep
        return jnp.where(fits, mid, low), jnp.where(fits, high, mid)

    def nth() -> Any:
        bounds = (jnp.int32(0), jnp.int32(1 << 18))
        return jax.lax.while_loop(lambda b: middle(*b) > b[0], step, bounds)[0]

    return jax.lax.cond(number > keep, nth, lambda: jnp.int32(NOBODY))
