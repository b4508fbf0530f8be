"""Verifying drafts: which of them are kept, and the token that follows the last one kept. The definition, in plain jnp.

A slot has K drafts and 1+K rows of target logits; row j is what the target says after the drafts before j. A row's
distribution p is a weight function of its logits (`distribution.py`), and so is that of the drafts, q: [S, K, V]
probabilities or residuals are never written, they are recomputed inside the sums that need them. Only one row a slot is
drawn from, so only that row is picked out.

Methods, all of which leave the distribution of the output exactly the target's:

- coupled: every row is drawn with its own words, and a draft is kept iff it equals the draw. The tokens are those that
  would have been drawn without drafts.
- standard: speculative sampling (Leviathan et al. 2023, Chen et al. 2023). Draft x is kept with probability
  min(1, p(x) / q(x)); after the first that is not, the token comes from max(0, p - q).
- block: block verification (Sun et al. 2024, "Block Verification Accelerates Speculative Decoding", Algorithm 2). The
  drafts are judged together, and never fewer are kept on average than by standard.

And synthetic, for benchmarks: drafts are kept at given rates, whatever the target says.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.acceptance import (
    Pair,
    Weighted,
    block_chances,
    pair_up,
    residual,
    standard_chances,
    weigh,
    weigh_proposal,
)
from pallas_kernels.distribution import Distribution, Filters, distribution_of_rows
from pallas_kernels.draw import draw
from pallas_kernels.top_k_top_p import top_k_top_p_sample

METHODS = ("coupled", "standard", "block", "synthetic")
MAX_DRAFTS = 128


@struct.dataclass
class Proposal:
    """The distribution that drafts were drawn from, as `top_k_top_p_sample` would: logits under filters.

    logits: [S, K, V], logits or log-probabilities of the drafting model. filters: of shape [S] or [S, K].
    A greedy draft (temperature 0) is one that had no alternative.
    """

    logits: jax.Array
    filters: Filters


@struct.dataclass
class Verified:
    """tokens [S, 1+K] int32, the drafts kept and the token after them, then -1. n_accepted [S] int32, drafts kept.
    finite [S] bool, False where the slot's first row held a NaN or nothing but -inf."""

    tokens: jax.Array
    n_accepted: jax.Array
    finite: jax.Array


def rejection_sample(
    logits: jax.Array,
    drafts: jax.Array,
    filters: Filters,
    words: jax.Array,
    uniforms: jax.Array | None = None,
    *,
    method: str = "coupled",
    proposal: Proposal | None = None,
    rates: jax.Array | None = None,
    valid: jax.Array | None = None,
) -> Verified:
    """The tokens of S slots with up to K drafts each. Greedy rows take the argmax, in every method.

    logits:   [S, 1+K, V] float32 or bfloat16; row j comes after drafts[:, :j].
    drafts:   [S, K] int32, -1 from the first that is missing; K at most MAX_DRAFTS.
    filters:  of shape [S] or [S, 1+K].
    words:    [S, 1+K, 8] uint32 of draw.random_words, by seed and the position of each row's token.
    uniforms: [S, K] float32 in [0, 1), for every method but coupled: draw.random_uniforms by seed, the position of the
              slot's first row and a stream of their own.
    proposal: what the drafts were drawn from, for standard and block; None where the drafter is deterministic. The
              drafts' randomness must be of another stream than `words` and `uniforms`. Block looks at drafts and
              uniforms beyond the last token that it emits, so there both must be of this window alone: drafts drawn by
              (seed, position) would be drawn from the same numbers again when the next window reaches that position.
    rates:    [K] float32, for synthetic: the rate at which a draft is kept when those before it were.
    valid:    [S] bool; a slot that is not emits nothing and counts as finite.

    A row with a NaN or nothing but -inf ends its slot before it. Raises ValueError for an unknown method, for an
    argument that the method needs and lacks, or would ignore, and for a shape that does not fit.
    """
    _check(logits, drafts, words, uniforms, method, proposal, rates)
    slots, width, _ = logits.shape
    valid = jnp.ones(slots, bool) if valid is None else valid
    n_drafts = jnp.sum(jnp.cumprod(drafts >= 0, axis=1), axis=1)  # [S]
    used = valid[:, None] & (jnp.arange(width) <= n_drafts[:, None])  # [S, 1+K]
    window = _Window(logits.astype(jnp.float32), jnp.maximum(drafts, 0), _per_row(filters, (slots, width)), used, words)
    if method == "coupled" or width == 1:
        return _coupled(window)
    greedy = ~jnp.any(used & (window.filters.temperature > 0))
    assert uniforms is not None
    return jax.lax.cond(greedy, lambda: _coupled(window), lambda: _judged(window, uniforms, method, proposal, rates))


@struct.dataclass
class _Window:
    logits: jax.Array  # [S, 1+K, V] float32
    drafts: jax.Array  # [S, K] int32 >= 0
    filters: Filters  # [S, 1+K]
    used: jax.Array  # [S, 1+K] bool
    words: jax.Array  # [S, 1+K, 8]

    @property
    def rows(self) -> jax.Array:
        """[S * (1+K), V]"""
        return self.logits.reshape(-1, self.logits.shape[2])

    def checkable(self, finite: jax.Array) -> jax.Array:
        """[S] int32: drafts that could be kept, those in front of the first row that cannot be drawn from."""
        sound = jnp.cumprod(finite & self.used, axis=1)
        return jnp.minimum(jnp.sum(sound, axis=1), jnp.sum(self.used[:, 1:], axis=1))

    def emit(self, n_accepted: jax.Array, last: jax.Array, finite: jax.Array) -> Verified:
        """n_accepted, last [S]: drafts kept and the token of the row after them; finite [S, 1+K]."""
        drafts = jnp.pad(self.drafts, ((0, 0), (0, 1)))
        at = jnp.arange(drafts.shape[1]) - n_accepted[:, None]
        tokens = jnp.where(at == 0, last[:, None], drafts)
        tokens = jnp.where((at < 0) | ((at == 0) & finite & self.used), tokens, -1)
        return Verified(tokens, n_accepted, finite[:, 0] | ~self.used[:, 0])


def _coupled(window: _Window) -> Verified:
    filters = jax.tree.map(jnp.ravel, window.filters)
    drawn = top_k_top_p_sample(window.rows, filters, window.words.reshape(-1, 8), window.used.ravel())
    token, finite = drawn.token.reshape(window.used.shape), drawn.finite.reshape(window.used.shape)
    n_accepted = _leading(window.drafts == token[:, :-1], window.checkable(finite))
    return window.emit(n_accepted, _at(token, n_accepted), finite)


def _judged(
    window: _Window, uniforms: jax.Array, method: str, proposal: Proposal | None, rates: jax.Array | None
) -> Verified:
    """Every method but coupled: uniform numbers decide which drafts are kept, then one row a slot is drawn from."""
    shape = slots, _ = window.used.shape
    target, finite = distribution_of_rows(window.rows, jax.tree.map(jnp.ravel, window.filters), window.used.ravel())
    target, finite = jax.tree.map(lambda x: x.reshape(shape), (target, finite))
    checkable = window.checkable(finite)
    if rates is not None:
        n_accepted = _leading(uniforms < _synthetic_chances(window, target, rates), checkable)
        last = _draw_row(window, _last_row(window, target, n_accepted), n_accepted)
        return window.emit(n_accepted, last, finite)
    pair = _pair(window, target, proposal)
    share = jnp.ones(slots)
    if method == "block":
        chances, shares = block_chances(pair, checkable)
        kept = jnp.arange(1, shape[1])
        n_accepted = jnp.max(jnp.where(uniforms < chances, kept, 0), axis=1)
        share = _at(shares, n_accepted)
    else:
        n_accepted = _leading(uniforms < standard_chances(pair), checkable)
    row = _last_row(window, target, n_accepted)
    return window.emit(n_accepted, _draw_residual(window, row, pair, n_accepted, checkable, share), finite)


def _pair(window: _Window, target: Distribution, proposal: Proposal | None) -> Pair:
    slots, k, vocab = *window.drafts.shape, window.logits.shape[2]
    rows = jax.tree.map(lambda x: x[:, :-1].ravel(), target)
    p = weigh(window.logits[:, :-1].reshape(-1, vocab), rows)
    if proposal is None:
        return pair_up(window.drafts, p, None)
    q = weigh_proposal(proposal.logits, _per_row(proposal.filters, (slots, k)), window.used[:, 1:])
    return pair_up(window.drafts, p, q)


def _synthetic_chances(window: _Window, target: Distribution, rates: jax.Array) -> jax.Array:
    """[S, K]: the rates, where the target allows the draft at all; a greedy row keeps what it would emit."""
    allowed = jnp.take_along_axis(window.logits[:, :-1], window.drafts[..., None], axis=2)[..., 0] > -jnp.inf
    exact = window.drafts == target.threshold.id[:, :-1]
    greedy = window.filters.temperature[:, :-1] <= 0
    return jnp.where(greedy, exact.astype(jnp.float32), jnp.where(allowed, rates, 0.0))


def _last_row(window: _Window, target: Distribution, index: jax.Array) -> Weighted:
    """The row of each slot that its last token is drawn from; index [S]."""
    logits = jnp.take_along_axis(window.logits, index[:, None, None], axis=1)[:, 0]
    return weigh(logits, jax.tree.map(lambda x: _at(x, index), target))


def _draw_row(window: _Window, row: Weighted, index: jax.Array) -> jax.Array:
    return draw(row.logits, row.distribution.weight, _at(window.words, index))


def _draw_residual(
    window: _Window, row: Weighted, pair: Pair, index: jax.Array, checkable: jax.Array, share: jax.Array
) -> jax.Array:
    """[S]: a token of max(share * p - q, 0), or of p where all drafts were kept."""
    words, rejected = _at(window.words, index), (index < checkable)[:, None, None]
    at = jnp.minimum(index, window.drafts.shape[1] - 1)
    if pair.q is None:
        draft = _at(pair.draft, at)[:, None, None]

        def without_draft(x: jax.Array, ids: jax.Array) -> jax.Array:
            return jnp.where(rejected & (ids == draft), 0.0, row.distribution.weight(x, ids))

        return draw(row.logits, without_draft, words)
    by_slot = jax.tree.map(lambda x: x.reshape(*window.drafts.shape, *x.shape[1:]), pair.q)
    q = jax.tree.map(lambda x: _at(x, at), by_slot)
    ids = jnp.arange(row.logits.shape[1], dtype=jnp.int32)[None]
    mass = jnp.sum(residual(row, q, share, (row.logits[:, None], q.logits[:, None]), ids), axis=(1, 2))
    # p and q that agree but for rounding may leave nothing; then every token of p is as good.
    rejected &= (mass > 0)[:, None, None]

    def what_is_left(values: tuple[jax.Array, jax.Array], ids: jax.Array) -> jax.Array:
        return jnp.where(rejected, residual(row, q, share, values, ids), row.distribution.weight(values[0], ids))

    return draw((row.logits, q.logits), what_is_left, words)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [S, n, ...], index [S] -> [S, ...]."""
    return jax.vmap(lambda x, i: x[i])(x, index)


def _leading(accepted: jax.Array, limit: jax.Array) -> jax.Array:
    """[S] int32: how many are accepted before the first that is not, at most `limit` [S]."""
    return jnp.minimum(jnp.sum(jnp.cumprod(accepted, axis=1, dtype=jnp.int32), axis=1), limit)


def _per_row(filters: Filters, shape: tuple[int, int]) -> Filters:
    """Filters of shape [S] or [S, n] -> [S, n]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x).reshape(shape[0], -1), shape), filters)


def _check(
    logits: jax.Array,
    drafts: jax.Array,
    words: jax.Array,
    uniforms: jax.Array | None,
    method: str,
    proposal: Proposal | None,
    rates: jax.Array | None,
) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(METHODS)}")
    slots, k = drafts.shape
    if k > MAX_DRAFTS:
        raise ValueError(f"drafts has {k} drafts a slot; at most {MAX_DRAFTS} can be verified")
    _expect("logits", logits, (slots, 1 + k, logits.shape[-1]))
    _expect("words", words, (slots, 1 + k, 8))
    for name, value, takers in (
        ("uniforms", uniforms, METHODS[1:]),
        ("proposal", proposal, ("standard", "block")),
        ("rates", rates, ("synthetic",)),
    ):
        if value is not None and method not in takers:
            raise ValueError(f"{name} means nothing to method {method!r}; leave it out")
        if value is None and method in takers and name != "proposal":
            raise ValueError(f"method {method!r} needs {name}; it is None")
    if uniforms is not None:
        _expect("uniforms", uniforms, (slots, k))
    if proposal is not None:
        _expect("proposal.logits", proposal.logits, (slots, k, logits.shape[-1]))
    if rates is not None:
        _expect("rates", rates, (k,))


def _expect(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {shape}")
