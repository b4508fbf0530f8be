"""Verification against the target's distribution: by enumerating every outcome, and by counting."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pallas_kernels import Filters, Proposal, Verified, random_uniforms, random_words, rejection_sample
from pallas_kernels.acceptance import Weighted, block_chances, pair_up, residual, standard_chances, weigh
from pallas_kernels.distribution import distribution_of_rows
from pallas_kernels.rejection import MAX_DRAFTS, METHODS

Exact = Callable[..., np.ndarray]
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sampling_cases.json").read_text())


def filters_of(shape: Any, temperature: Any = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(
        temperature=np.broadcast_to(np.float32(temperature), shape),
        min_p=np.broadcast_to(np.float32(min_p), shape),
        top_k=np.broadcast_to(np.int32(top_k), shape),
        top_p=np.broadcast_to(np.float32(top_p), shape),
    )


@partial(jax.jit, static_argnames="method")
def _verify(logits: jax.Array, drafts: jax.Array, filters: Filters, trial: jax.Array, method: str, **more: Any) -> Any:
    slots, width, _ = logits.shape
    seed = jnp.stack([trial, jnp.arange(slots, dtype=jnp.uint32)], axis=1)
    position = jnp.tile(jnp.arange(width, dtype=jnp.int32), slots)
    words = random_words(jnp.repeat(seed, width, axis=0), position, 0).reshape(slots, width, 8)
    uniforms = random_uniforms(seed, jnp.zeros(slots, jnp.int32), 1, width - 1)
    if method != "coupled":
        more["uniforms"] = uniforms
    return rejection_sample(logits, drafts, filters, words, method=method, **more)


def verify(
    logits: Any, drafts: Any, method: str, filters: Filters | None = None, trial: int = 0, **more: Any
) -> Verified:
    """logits [S, 1+K, V], drafts [S, K]; each slot has a seed of its own."""
    logits, drafts = np.asarray(logits, np.float32), np.asarray(drafts, np.int32)
    filters = filters_of(len(drafts)) if filters is None else filters
    if method == "synthetic":
        more.setdefault("rates", np.full(drafts.shape[1], 0.5, np.float32))
    return _verify(logits, drafts, filters, np.full(len(drafts), trial, np.uint32), method, **more)


def one_hot(ids: Any, vocab: int = 16, second: int = 15) -> np.ndarray:
    logits = np.zeros((*np.shape(ids), vocab), np.float32)
    logits[..., second] = 9
    np.put_along_axis(logits, np.asarray(ids)[..., None], 10, axis=-1)
    return logits


# ---- greedy

GREEDY = [
    ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
    ([1, 2, 3], [1, 5, 3, 4], [1, 5, -1, -1]),
    ([1, 2], [1, 2, 5], [1, 2, 5]),
    ([], [5], [5]),
    ([1], [2, 3], [2, -1]),
    ([4, 5, 6], [4, 8, 6, 9], [4, 8, -1, -1]),
    ([1, 2], [1, 5, 6], [1, 5, -1]),
    ([3, 4], [3, 4, 7], [3, 4, 7]),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("random_mate", [False, True])
def test_greedy_rows_are_exact(method: str, random_mate: bool) -> None:
    """All the cases in one ragged batch, alone and beside a slot that samples."""
    drafts = np.array([d + [-1] * (3 - len(d)) for d, _, _ in GREEDY])
    logits = one_hot([t + [0] * (4 - len(t)) for _, t, _ in GREEDY])
    temperature = np.zeros(len(GREEDY))
    if random_mate:
        temperature[3] = 1.0  # of the case that has no draft: its token is free
    result = verify(logits, drafts, method, filters_of(len(GREEDY), temperature))
    for row, (d, _, emitted) in enumerate(GREEDY):
        if not (random_mate and row == 3):
            assert result.tokens[row].tolist() == emitted + [-1] * (4 - len(emitted))
            assert result.n_accepted[row] == sum(t >= 0 for t in emitted) - 1 <= len(d)
    assert result.finite.all()


@pytest.mark.parametrize("method", ["standard", "block"])
def test_greedy_rows_are_exact_whatever_the_drafts_were_drawn_from(method: str) -> None:
    """Also a proposal that is certain of a token which the target does not want."""
    rng = np.random.default_rng(0)
    target, drafts = rng.integers(0, 4, (256, 4)), rng.integers(0, 4, (256, 3))
    certain = one_hot(rng.integers(0, 4, (256, 3))) * np.where(rng.random((256, 3, 1)) < 0.5, 1.0, 100.0)
    temperature = np.where(np.arange(256) % 2, 0.0, 1.0).astype(np.float32)
    proposal = Proposal(jnp.asarray(certain, jnp.float32), filters_of(256))
    result = verify(one_hot(target), drafts, method, filters_of(256, temperature), proposal=proposal)
    for row in range(1, 256, 2):
        kept = int(np.cumprod(drafts[row] == target[row, :3]).sum())
        assert result.tokens[row].tolist() == [*target[row, : kept + 1], *[-1] * (3 - kept)]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_ties_go_to_the_lowest_id(method: str) -> None:
    result = verify(np.zeros((2, 3, 8)), [[0, 0], [1, 1]], method, filters_of(2, [0.0, 0.0]))
    assert result.tokens.tolist() == [[0, 0, 0], [0, -1, -1]]


# ---- the distribution, by enumeration


class Chain:
    """A target and a drafting model over V tokens, whose distributions depend on the tokens so far."""

    def __init__(self, vocab: int, k: int, seed: int, **filters: Any) -> None:
        self.vocab, self.k, self.rng, self.filters = vocab, k, np.random.default_rng(seed), filters
        self.logits: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}

    def row(self, model: str, prefix: tuple[int, ...]) -> np.ndarray:
        key = (model, prefix)
        if key not in self.logits:
            self.logits[key] = (1.2 * self.rng.standard_normal(self.vocab)).astype(np.float32)
        return self.logits[key]

    def windows(self, deterministic: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Every sequence of drafts as a slot: drafts [S, K], target logits [S, 1+K, V], draft logits [S, K, V]."""
        drafts = list(product(range(self.vocab), repeat=self.k))
        if deterministic:
            drafts = drafts[5 % len(drafts) :: 7][:6]
        target = [[self.row("p", d[:j]) for j in range(self.k + 1)] for d in drafts]
        draft = [[self.row("q", d[:j]) for j in range(self.k)] for d in drafts]
        return np.array(drafts), np.array(target), np.array(draft)

    def joint(self, exact: Exact, prefix: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
        """The target's probability of every continuation of `prefix` to 1+K tokens."""
        if len(prefix) == self.k + 1:
            return {prefix: 1.0}
        p = exact(self.row("p", prefix), **self.filters)
        result: dict[tuple[int, ...], float] = {}
        for token in range(self.vocab):
            if p[token]:
                for sequence, rest in self.joint(exact, (*prefix, token)).items():
                    result[sequence] = float(p[token]) * rest
        return result


def outcomes(chain: Chain, method: str, deterministic: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every slot and n = 0 .. K: the probability that n drafts are kept, and of the token after them [S, 1+K, V]."""
    drafts, target, draft = chain.windows(deterministic)
    slots, width, vocab = target.shape
    filters = filters_of(slots * width, **chain.filters)

    def rows(logits: np.ndarray, filters: Filters) -> Weighted:
        flat = jnp.asarray(logits.reshape(-1, vocab))
        return weigh(flat, distribution_of_rows(flat, filters, jnp.ones(len(flat), bool))[0])

    p_rows = rows(target, filters)
    p = rows(target[:, :-1], filters_of(slots * (width - 1), **chain.filters))
    q = None if deterministic else rows(draft, filters_of(slots * (width - 1)))
    pair = pair_up(jnp.asarray(drafts), p, q)
    if method == "standard":
        chances, shares = np.asarray(standard_chances(pair), np.float64), np.ones((slots, width))
        kept = np.cumprod(np.pad(chances, ((0, 0), (1, 0)), constant_values=1.0), axis=1)
        number = kept * (1 - np.pad(chances, ((0, 0), (0, 1))))
    else:
        block, share = block_chances(pair, jnp.full(slots, width - 1))
        chances, shares = np.asarray(block, np.float64), np.asarray(share, np.float64)
        above = np.cumprod(1 - chances[:, ::-1], axis=1)[:, ::-1]  # none of h_i .. h_K succeeds
        number = np.pad(chances, ((0, 0), (1, 0)), constant_values=1.0) * np.pad(
            above, ((0, 0), (0, 1)), constant_values=1
        )
    ids = jnp.arange(vocab)[None]
    last = np.array(p_rows.distribution.weight(p_rows.logits[:, None], ids)[:, 0]).reshape(slots, width, vocab)
    if q is None:
        np.put_along_axis(last[:, :-1], drafts[..., None], 0, axis=2)
    else:
        share = jnp.asarray(shares[:, :-1].ravel(), jnp.float32)
        left = residual(p, q, share, (p.logits[:, None], q.logits[:, None]), ids)
        last[:, :-1] = np.asarray(left).reshape(slots, width - 1, vocab)
    return drafts, number, last / np.maximum(last.sum(-1, keepdims=True), 1e-30)


SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.6, "top_k": 2}, {"top_p": 0.7}, {"temperature": 0}]


@pytest.mark.parametrize("filters", SETTINGS, ids=str)
@pytest.mark.parametrize(("vocab", "k"), [(2, 1), (3, 2), (3, 3)])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_joint_distribution_is_the_targets(
    exact_distribution: Exact, method: str, vocab: int, k: int, filters: dict[str, Any]
) -> None:
    chain = Chain(vocab, k, seed=vocab + k, **filters)
    expected = chain.joint(exact_distribution)
    observed: dict[tuple[int, ...], float] = dict.fromkeys(expected, 0.0)
    for d, number, last in zip(*outcomes(chain, method, False), strict=True):
        chance = np.prod([exact_distribution(chain.row("q", tuple(d[:j])))[d[j]] for j in range(k)])
        for n, token in product(range(k + 1), range(vocab)):
            emitted = (*map(int, d[:n]), token)
            probability = chance * number[n] * last[n, token]
            if probability > 1e-7:
                for sequence, rest in chain.joint(exact_distribution, emitted).items():
                    observed[sequence] += probability * rest
    for sequence, probability in expected.items():
        assert observed[sequence] == pytest.approx(probability, abs=3e-6)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_joint_distribution_with_drafts_that_had_no_alternative(exact_distribution: Exact, method: str) -> None:
    chain = Chain(3, 3, seed=11, temperature=0.8)
    expected = chain.joint(exact_distribution)
    for d, number, last in zip(*outcomes(chain, method, True), strict=True):
        observed: dict[tuple[int, ...], float] = dict.fromkeys(expected, 0.0)
        for n, token in product(range(4), range(3)):
            if number[n] * last[n, token] > 1e-7:
                for sequence, rest in chain.joint(exact_distribution, (*map(int, d[:n]), token)).items():
                    observed[sequence] += number[n] * last[n, token] * rest
        assert list(observed.values()) == pytest.approx(list(expected.values()), abs=3e-6)


@pytest.mark.parametrize("seed", range(4))
def test_block_keeps_at_least_as_many_drafts_as_standard(exact_distribution: Exact, seed: int) -> None:
    chain = Chain(3, 3, seed)
    mean = {}
    for method in ("standard", "block"):
        drafts, number, _ = outcomes(chain, method, False)
        chance = [np.prod([exact_distribution(chain.row("q", tuple(d[:j])))[d[j]] for j in range(3)]) for d in drafts]
        mean[method] = float(np.asarray(chance) @ (number @ np.arange(4)))
        assert number.sum(axis=1) == pytest.approx(1.0)
    assert mean["block"] > mean["standard"] + 1e-4


# ---- the distribution, by counting: the random numbers are used as the chances say

TRIALS = 1 << 17


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("method", ["coupled", "standard", "block"])
def test_counts_of_whole_windows(exact_distribution: Exact, method: str, sampled: bool) -> None:
    """Drafts drawn from a model (coupled does not ask from which) or fixed; then two tokens counted against p."""
    if method == "coupled" and sampled:
        pytest.skip("coupled verification is the same for drafts from anywhere")
    chain = Chain(4, 2, seed=2, temperature=0.7, top_p=0.95)
    drafts, target, draft = chain.windows(deterministic=False)
    rng = np.random.default_rng(3)
    q = [np.prod([exact_distribution(chain.row("q", tuple(d[:j])))[d[j]] for j in range(2)]) for d in drafts]
    slot = rng.choice(len(drafts), TRIALS, p=np.array(q) / np.sum(q)) if sampled else np.full(TRIALS, 6)
    more = {"proposal": Proposal(jnp.asarray(draft[slot]), filters_of(TRIALS))} if sampled else {}
    result = verify(target[slot], drafts[slot], method, filters_of(TRIALS, **chain.filters), **more)
    tokens, n = np.array(result.tokens), np.asarray(result.n_accepted)
    assert ((tokens >= 0).sum(axis=1) == n + 1).all()
    for column in (1, 2):  # what a window leaves open is drawn from the target
        for prefix in product(range(4), repeat=column):
            open_ = (tokens[:, :column] == prefix).all(axis=1) & (tokens[:, column] < 0)
            p = exact_distribution(chain.row("p", prefix), **chain.filters)
            tokens[open_, column] = rng.choice(4, open_.sum(), p=p)
    joint = chain.joint(exact_distribution)
    expected = np.array([joint.get(sequence, 0.0) for sequence in product(range(4), repeat=3)])
    assert p_value(tokens @ [16, 4, 1], expected) > 1e-4


def p_value(tokens: np.ndarray, p: np.ndarray) -> float:
    observed = np.bincount(tokens, minlength=len(p))
    assert observed[p == 0].sum() == 0
    return stats.chisquare(observed[p > 0], p[p > 0] * len(tokens)).pvalue if (p > 0).sum() > 1 else 1.0


def test_a_draft_without_a_distribution_keeps_the_rate_of_its_token() -> None:
    logits = np.broadcast_to(np.log(np.float32([0.6, 0.4])), (TRIALS, 2, 2))
    result = verify(logits, np.zeros((TRIALS, 1)), "standard")
    first = np.asarray(result.tokens)[:, 0]
    assert stats.binomtest(int((first == 0).sum()), TRIALS, 0.6).pvalue > 1e-4


def test_a_draft_judged_by_a_distribution_it_was_not_drawn_from_is_a_bug() -> None:
    """p, q and drafts from q: right with q, and wrong, by much, when the drafts are said to have had no alternative."""
    p, q = np.float32([0.5, 0.3, 0.2]), np.float32([0.2, 0.3, 0.5])
    drafts = np.random.default_rng(0).choice(3, (TRIALS, 1), p=q / q.sum())
    logits = np.broadcast_to(np.log(p), (TRIALS, 2, 3))
    proposal = Proposal(jnp.broadcast_to(jnp.log(q), (TRIALS, 1, 3)), filters_of(TRIALS))
    for method in ("standard", "block"):
        assert p_value(np.asarray(verify(logits, drafts, method, proposal=proposal).tokens)[:, 0], p) > 1e-4
    kept = np.asarray(verify(logits, drafts, "standard", proposal=proposal).n_accepted).mean()
    assert kept == pytest.approx(np.minimum(p, q).sum(), abs=0.01)


# ---- coupled, synthetic


def test_coupled_gives_the_tokens_of_no_drafts() -> None:
    rng = np.random.default_rng(1)
    logits = 2 * rng.standard_normal((64, 4, 50)).astype(np.float32)
    filters = filters_of(64, 0.8, top_k=20)
    none = np.full((64, 3), -1)
    free = verify(logits, np.zeros((64, 3)), "coupled", filters)
    right = []
    for row in range(4):  # the token of each row, from a window that starts there
        words = random_words(np.stack([np.zeros(64), np.arange(64)], 1).astype(np.uint32), np.full(64, row), 0)
        shifted = rejection_sample(logits[:, row : row + 1], none[:, :0], filters, words[:, None])
        right.append(np.asarray(shifted.tokens)[:, 0])
    drafts = np.stack(right[:3], axis=1)
    assert (np.asarray(free.tokens)[:, 0] == right[0]).all()
    assert (np.asarray(verify(logits, drafts, "coupled", filters).tokens) == np.stack(right, axis=1)).all()
    drafts[:, 1] = (drafts[:, 1] + 1) % 50
    cut = verify(logits, drafts, "coupled", filters)
    assert (cut.n_accepted == 1).all()
    assert (np.asarray(cut.tokens)[:, :2] == np.stack(right[:2], axis=1)).all()


@pytest.mark.parametrize(("unconditional", "conditional"), GOLDEN["u2c"])
def test_synthetic_rates(unconditional: list[float], conditional: list[float]) -> None:
    """Conditional rates give the unconditional ones; a draft that the target forbids is not kept all the same."""
    slots, k = 1 << 14, len(conditional)
    logits = np.zeros((slots, k + 1, 8), np.float32)
    logits[:, :, 7] = -np.inf
    result = verify(logits, np.full((slots, k), 3), "synthetic", rates=np.float32(conditional))
    n = np.asarray(result.n_accepted)
    for position, rate in enumerate(unconditional):
        assert stats.binomtest(int((n > position).sum()), slots, min(rate, 1.0)).pvalue > 1e-4
    assert not verify(logits, np.full((slots, k), 7), "synthetic", rates=np.ones(k, np.float32)).n_accepted.any()


# ---- windows


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_row_without_a_distribution_ends_the_window_before_it(method: str, bad: float) -> None:
    logits = one_hot(np.tile([1, 2, 3, 4], (5, 1))) * 10
    for slot in range(4):
        logits[slot, slot] = bad
    rates = {"rates": np.ones(3, np.float32)} if method == "synthetic" else {}
    result = verify(logits, np.tile([1, 2, 3], (5, 1)), method, **rates)
    whole = [1, 2, 3, 4]
    assert result.tokens.tolist() == [whole[:n] + [-1] * (4 - n) for n in (0, 1, 2, 3, 4)]
    assert result.finite.tolist() == [False, True, True, True, True]
    assert result.n_accepted.tolist() == [0, 1, 2, 3, 3]


@pytest.mark.parametrize("method", METHODS)
def test_slots_that_do_not_count(method: str) -> None:
    logits = np.full((2, 3, 8), np.nan, np.float32)
    logits[0] = 0
    result = verify(logits, [[1, -1], [2, 3]], method, valid=np.array([True, False]))
    assert result.tokens[1].tolist() == [-1, -1, -1]
    assert result.tokens[0, 2] == -1  # no draft stands before this row
    assert result.finite.tolist() == [True, True]


@pytest.mark.parametrize("method", METHODS)
def test_without_drafts_every_method_is_a_draw(method: str) -> None:
    logits = np.random.default_rng(0).standard_normal((32, 1, 100)).astype(np.float32)
    drafts = np.zeros((32, 0), np.int32)
    assert (verify(logits, drafts, method).tokens == verify(logits, drafts, "coupled").tokens).all()


@pytest.mark.parametrize("method", ["standard", "block"])
def test_equal_distributions_keep_every_draft(method: str) -> None:
    logits = 3 * np.random.default_rng(0).standard_normal((512, 3, 300)).astype(np.float32)
    drafts = np.random.default_rng(1).integers(0, 300, (512, 2))
    proposal = Proposal(jnp.asarray(logits[:, :2]), filters_of(512))
    assert (verify(logits, drafts, method, proposal=proposal).n_accepted == 2).all()


def test_arguments_are_checked() -> None:
    logits, drafts, words = jnp.zeros((2, 3, 8)), jnp.zeros((2, 2), jnp.int32), jnp.zeros((2, 3, 8), jnp.uint32)
    call = partial(rejection_sample, logits, drafts, filters_of(2), words)
    uniforms = jnp.zeros((2, 2))
    with pytest.raises(ValueError, match="method is 'typical'; it must be one of coupled, standard"):
        call(method="typical")
    with pytest.raises(ValueError, match="method 'standard' needs uniforms"):
        call(method="standard")
    with pytest.raises(ValueError, match="method 'synthetic' needs rates"):
        call(uniforms, method="synthetic")
    with pytest.raises(ValueError, match="rates means nothing to method 'block'"):
        call(uniforms, method="block", rates=jnp.zeros(2))
    with pytest.raises(ValueError, match="proposal means nothing to method 'coupled'"):
        call(proposal=Proposal(logits[:, 1:], filters_of(2)))
    with pytest.raises(ValueError, match=r"uniforms has shape \(2, 3\); it must be \(2, 2\)"):
        call(jnp.zeros((2, 3)), method="standard")
    with pytest.raises(ValueError, match=r"filters.top_p has shape \(3,\); it must be \(2,\) or \(2, 3\)"):
        rejection_sample(logits, drafts, replace(filters_of(2), top_p=jnp.ones(3)), words)
    with pytest.raises(ValueError, match=r"proposal.filters.temperature has shape \(3,\); it must be \(2,\) or"):
        call(uniforms, method="block", proposal=Proposal(logits[:, 1:], filters_of(3)))
    with pytest.raises(ValueError, match=r"valid has shape \(2, 3\); it must be \(2,\)"):
        call(valid=jnp.ones((2, 3), bool))
    with pytest.raises(ValueError, match=r"drafts has shape \(2,\); it must be \[S, K\]"):
        rejection_sample(logits, drafts[:, 0], filters_of(2), words)
    with pytest.raises(ValueError, match=rf"drafts has {MAX_DRAFTS + 1} drafts a slot; at most {MAX_DRAFTS}"):
        rejection_sample(logits, jnp.zeros((2, MAX_DRAFTS + 1), jnp.int32), filters_of(2), words)
