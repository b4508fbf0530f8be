"""The draw's pick (see `pallas_kernels.draw`) inside a kernel: an index with probability proportional to its weight.

There is no running sum across a warpgroup; the index is bisected instead, and a step sums the two exact limbs of what
lies before it. Sums of integers have no order, so the result is that of the definition.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

LIMB = 22
_LOW = (1 << LIMB) - 1


def pick(weights: jax.Array, words: tuple[Any, Any, Any, Any]) -> Any:
    """weights: [n] float32 >= 0, n <= 1024. words: four int32 scalars. Returns an int32 scalar."""
    n = weights.shape[0]
    ids = jax.lax.broadcasted_iota(jnp.int32, (n,), 0)
    total = jnp.sum(weights) * (1 + 2.0**-20)
    scaled = weights / jnp.where(total > 0, total, 1.0) * 2.0**LIMB
    high = scaled.astype(jnp.int32)  # truncation, the floor of what is not negative
    low = ((scaled - high.astype(jnp.float32)) * 2.0**LIMB).astype(jnp.int32)

    def before(count: Any) -> tuple[Any, Any]:
        """The sum of the first `count`, as two limbs."""
        low_sum = jnp.sum(jnp.where(ids < count, low, 0))
        carry = jax.lax.shift_right_logical(low_sum, jnp.int32(LIMB))
        return jnp.sum(jnp.where(ids < count, high, 0)) + carry, low_sum & _LOW

    first, second = _fixed_point(words[0], words[1]), _fixed_point(words[2], words[3])
    outside = ~_below(first, before(n))
    target = (jnp.where(outside, second[0], first[0]), jnp.where(outside, second[1], first[1]))

    def step(i: Any, count: Any) -> Any:
        more = count | (jnp.int32(1) << (n.bit_length() - 1 - i))
        return jnp.where((more <= n) & ~_below(target, before(more)), more, count)

    index = jax.lax.fori_loop(0, n.bit_length(), step, jnp.int32(0))
    return jnp.minimum(index, jnp.max(jnp.where(weights > 0, ids, 0)))


def _fixed_point(high: Any, low: Any) -> tuple[Any, Any]:
    shift = jnp.int32(32 - LIMB)
    return jax.lax.shift_right_logical(high, shift), jax.lax.shift_right_logical(low, shift)


def _below(a: tuple[Any, Any], b: tuple[Any, Any]) -> Any:
    return (a[0] < b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
