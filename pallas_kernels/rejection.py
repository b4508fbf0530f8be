"""Verifying drafts: which of them are kept, and the token that follows the last one kept.

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

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.acceptance import Pair, block_chances, standard_chances
from pallas_kernels.block_shape import BlockShape
from pallas_kernels.checks import expect, expect_filters
from pallas_kernels.distribution import Distribution, Filters
from pallas_kernels.drafted import Drafted, Proposal, Verified, at, leading, per_row
from pallas_kernels.draw import check_vocab
from pallas_kernels.implementation import Choice, choose
from pallas_kernels.top_k_top_p import top_k_top_p_sample
from pallas_kernels.verifier import Verifier

__all__ = ["MAX_DRAFTS", "METHODS", "Proposal", "Verified", "rejection_sample"]

METHODS = ("coupled", "standard", "block", "synthetic")
IMPLEMENTATIONS = ("xla", "mosaic")
MAX_DRAFTS = 128


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
    implementation: str | None = None,
    interpret: bool | None = None,
    block_shape: BlockShape | None = None,
) -> Verified:
    """The tokens of S slots with up to K drafts each. Greedy rows take the argmax, in every method.

    logits:   [S, 1+K, V] float32 or bfloat16, V at most draw.MAX_VOCAB; row j comes after drafts[:, :j].
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
    implementation, interpret, block_shape: as of top_k_top_p_sample. Kernels serve every method.

    A row with a NaN or nothing but -inf ends its slot before it. Raises ValueError for an unknown method, for an
    argument that the method needs and lacks, or would ignore, for a shape that does not fit, and for an implementation
    that cannot run.
    """
    _check(logits, drafts, filters, words, uniforms, method, proposal, rates, valid)
    choice = choose(implementation, interpret, block_shape, available=IMPLEMENTATIONS)
    options = {"implementation": choice.name, "interpret": interpret, "block_shape": block_shape}
    slots, width, _ = logits.shape
    valid = jnp.ones(slots, bool) if valid is None else valid
    n_drafts = jnp.sum(jnp.cumprod(drafts >= 0, axis=1), axis=1)  # [S]
    used = valid[:, None] & (jnp.arange(width) <= n_drafts[:, None])  # [S, 1+K]
    window = Drafted(logits.astype(jnp.float32), jnp.maximum(drafts, 0), per_row(filters, (slots, width)), used, words)
    if method == "coupled" or width == 1:
        return _coupled(window, options)
    assert uniforms is not None

    def judged() -> Verified:
        return _judge(window, _verifier(window, proposal, choice), uniforms, method, rates)

    if choice.name != "xla":
        return judged()  # greedy rows cost a kernel nothing
    greedy = ~jnp.any(used & (window.filters.temperature > 0))
    return jax.lax.cond(greedy, lambda: _coupled(window, options), judged)


class Judge(Protocol):
    """What `Verifier` documents, of whatever implementation."""

    target: Distribution
    finite: jax.Array

    def pair(self) -> Pair: ...

    def residual_mass(self, pair: Pair, share: jax.Array) -> jax.Array: ...

    def draw(self, index: jax.Array, rejected: jax.Array, share: jax.Array, pair: Pair | None) -> jax.Array: ...


def _verifier(window: Drafted, proposal: Proposal | None, choice: Choice) -> Judge:
    if choice.name == "xla":
        return Verifier(window, proposal)
    from pallas_kernels.mosaic.verifier import MosaicVerifier

    return MosaicVerifier(window, proposal, choice.block_shape, choice.interpret)


def _coupled(window: Drafted, options: dict[str, Any]) -> Verified:
    filters, words, used = jax.tree.map(jnp.ravel, window.filters), window.words.reshape(-1, 8), window.used.ravel()
    drawn = top_k_top_p_sample(window.rows, filters, words, used, **options)
    token, finite = drawn.token.reshape(window.used.shape), drawn.finite.reshape(window.used.shape)
    n_accepted = leading(window.drafts == token[:, :-1], window.checkable(finite))
    return window.emit(n_accepted, at(token, n_accepted), finite)


def _judge(window: Drafted, verifier: Judge, uniforms: jax.Array, method: str, rates: jax.Array | None) -> Verified:
    """Every method but coupled: uniform numbers decide which drafts are kept, then one row a slot is drawn from."""
    slots, width = window.used.shape
    checkable, share = window.checkable(verifier.finite), jnp.ones(slots)
    if rates is not None:
        n_accepted = leading(uniforms < _synthetic_chances(window, verifier.target, rates), checkable)
        last = verifier.draw(n_accepted, jnp.zeros(slots, bool), share, None)
        return window.emit(n_accepted, last, verifier.finite)
    pair = verifier.pair()
    if method == "block":
        chances, shares = block_chances(pair, checkable, verifier.residual_mass)
        n_accepted = jnp.max(jnp.where(uniforms < chances, jnp.arange(1, width), 0), axis=1)
        share = at(shares, n_accepted)
    else:
        n_accepted = leading(uniforms < standard_chances(pair), checkable)
    last = verifier.draw(n_accepted, n_accepted < checkable, share, pair)
    return window.emit(n_accepted, last, verifier.finite)


def _synthetic_chances(window: Drafted, target: Distribution, rates: jax.Array) -> jax.Array:
    """[S, K]: the rates, where the target allows the draft at all; a greedy row keeps what it would emit."""
    allowed = jnp.take_along_axis(window.logits[:, :-1], window.drafts[..., None], axis=2)[..., 0] > -jnp.inf
    exact = window.drafts == target.threshold.id[:, :-1]
    greedy = window.filters.temperature[:, :-1] <= 0
    return jnp.where(greedy, exact.astype(jnp.float32), jnp.where(allowed, rates, 0.0))


def _check(
    logits: jax.Array,
    drafts: jax.Array,
    filters: Filters,
    words: jax.Array,
    uniforms: jax.Array | None,
    method: str,
    proposal: Proposal | None,
    rates: jax.Array | None,
    valid: jax.Array | None,
) -> None:
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(METHODS)}")
    expect("drafts", drafts, ("S", "K"))
    slots, k = drafts.shape
    if k > MAX_DRAFTS:
        raise ValueError(f"drafts has {k} drafts a slot; at most {MAX_DRAFTS} can be verified")
    expect("logits", logits, (slots, 1 + k, "V"))
    check_vocab(logits.shape[-1])
    expect_filters("filters", filters, (slots,), (slots, 1 + k))
    expect("words", words, (slots, 1 + k, 8))
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
        expect("uniforms", uniforms, (slots, k))
    if proposal is not None:
        expect("proposal.logits", proposal.logits, (slots, k, logits.shape[-1]))
        expect_filters("proposal.filters", proposal.filters, (slots,), (slots, k))
    if rates is not None:
        expect("rates", rates, (k,))
    if valid is not None:
        expect("valid", valid, (slots,))
