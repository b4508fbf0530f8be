"""Filters and the sampler's own rules, against definitions written down in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.sampling.filters import find_threshold
from jaxserve.sampling.sampler import Sampled, SamplingRows, sample

INF = np.float32(np.inf)
Exact = Callable[..., np.ndarray]


@jax.jit
def _survivors(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    top = logits.max(axis=-1)

    def scaled(x: jax.Array) -> jax.Array:
        return jnp.where(x == top[:, None], 0.0, (x - top[:, None]) / temperature[:, None])

    threshold = find_threshold(logits, scaled, top_k, top_p, min_p)
    kept = threshold.keeps(logits[:, None, :], jnp.arange(logits.shape[1])[None])[:, 0]
    return kept & (jnp.exp(scaled(logits)) > 0)  # what has no probability is not kept, whatever the threshold says


def survivors(logits: np.ndarray, **settings: Any) -> np.ndarray:
    """bool [R, V]; each setting is a number for all rows or a list with one for each."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return np.asarray(_survivors(np.asarray(logits, np.float32), **columns(len(logits), defaults | settings)))


def columns(rows: int, settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """An array [R] of each setting."""
    kinds = {"top_k": np.int32, "position": np.int32, "want_logprob": np.bool_}
    return {name: np.broadcast_to(np.asarray(x, kinds.get(name, np.float32)), rows) for name, x in settings.items()}


def check(kept: np.ndarray, logits: np.ndarray, exact: Exact, **settings: float) -> None:
    """`kept` [V] is right for settings as exact as stated, or for some within float32 rounding of them."""
    lax = {name: value for name, value in settings.items() if name in ("top_k", "temperature")}
    bounds = []
    for sign in (1, -1):
        near = dict(settings)
        if settings.get("top_p", 1.0) < 1:
            near["top_p"] = min(1.0, max(1e-9, float(np.float32(settings["top_p"])) + sign * 2e-6))
        if settings.get("min_p", 0.0) > 0:
            near["min_p"] = min(1.0, settings["min_p"] * (1 - sign * 4e-6))
        bounds.append(exact(logits, **(lax | near)))
    most, least = bounds[0] > 0, bounds[1] > 1e-30  # what float32 has no number for may be lost
    assert (kept <= most).all(), f"{settings}: kept {np.flatnonzero(kept & ~most)[:9]} beyond {most.sum()}"
    assert (kept >= least).all(), f"{settings}: lost {np.flatnonzero(~kept & least)[:9]} of {least.sum()}"


_sample = jax.jit(sample)


def sample_rows(logits: Any, **settings: Any) -> Sampled:
    """One sample of each row of [R, V]; each setting is a number for all rows or a list with one for each."""
    rows = len(logits)
    defaults = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "position": 0, "want_logprob": True}
    seed = np.repeat(np.arange(rows, dtype=np.uint32)[:, None], 2, axis=1)
    settings = columns(rows, defaults | settings)
    return _sample(logits, SamplingRows(seed=seed, valid=np.ones(rows, bool), **settings))  # type: ignore[arg-type]


# ---- filters by their definitions

few_logits = st.lists(st.sampled_from([-INF, -30.0, -1.0, 0.0, 0.5, 0.5, 1.0, 3.0]), min_size=8, max_size=8)


@given(
    few_logits.filter(lambda x: max(x) > -INF),
    st.sampled_from([0.1, 1.0, 7.0]),
    st.integers(-1, 10),
    st.sampled_from([1e-6, 0.1, 0.34, 0.5, 0.9, 0.999, 0.9999999, 1.0]),
    st.sampled_from([0.0, 1e-4, 0.1, 0.4, 1.0]),
)
@example([0.0] * 8, 1.0, 3, 0.5, 0.0)  # ties: the lowest ids
@example([-INF] * 7 + [1.0], 1.0, 5, 0.3, 0.5)
@settings(max_examples=300, deadline=None)
def test_short_rows(
    exact_distribution: Exact, logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    settings_ = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    row = np.asarray(logits, np.float32)
    check(survivors(row[None], **settings_)[0], row, exact_distribution, **settings_)


@pytest.mark.parametrize("spread", [0.01, 1.0, 2.5, 6.0])  # flat rows end in the fallbacks, steep ones among the first
@pytest.mark.parametrize("vocab", [65, 2000, 20_000])
def test_random_rows(exact_distribution: Exact, vocab: int, spread: float) -> None:
    grid: list[dict[str, float]] = [
        {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        for top_k in (0, 1, 20, 64, 100, 1024, 1500, 10**6)
        for top_p in (0.1, 0.55, 0.9, 1.0)
        for min_p in (0.0, 0.02)
    ]
    logits = spread * np.random.default_rng(vocab).standard_normal((len(grid), vocab)).astype(np.float32)
    kept = survivors(logits, **{name: [row[name] for row in grid] for name in grid[0]})
    for row, settings_ in enumerate(grid):
        check(kept[row], logits[row], exact_distribution, **settings_)


@pytest.mark.parametrize(("top_k", "top_p"), [(70, 0.6), (100, 0.55), (1500, 0.5)])
def test_the_nucleus_is_taken_of_what_top_k_leaves(exact_distribution: Exact, top_k: int, top_p: float) -> None:
    """top_k beyond the candidates looked at first: the mass that it cuts off must not count."""
    spread = np.repeat([0.5, 1.0, 2.0, 2.5], 16)[:, None]
    logits = (spread * np.random.default_rng(0).standard_normal((64, 2000))).astype(np.float32)
    for row, kept in zip(logits, survivors(logits, top_k=top_k, top_p=top_p), strict=True):
        check(kept, row, exact_distribution, top_k=top_k, top_p=top_p)


def test_top_p_close_to_one_loses_nothing() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 32_000)).astype(np.float32)
    assert survivors(logits, top_p=[0.9999999, 1.0]).all()


def test_flat_rows_need_every_tier() -> None:
    """More equal logits than candidates: a certificate fails, then the next one, then the whole row counts."""
    nuclei = [(0, 0.01, 0, 20), (0, 0.1, 0, 200), (0, 0.5, 0, 1000)]
    others = [(1500, 1, 0, 1500), (0, 1, 1, 2000), (1999, 1, 0, 1999)]
    rows = nuclei + others + [(0, 1, 0, 2000)] * 58
    top_k, top_p, min_p, counts = (list(column) for column in zip(*rows, strict=True))
    kept = survivors(np.zeros((64, 2000)), top_k=top_k, top_p=top_p, min_p=min_p)
    assert kept.sum(axis=1) == pytest.approx(counts, abs=1)
    for row in kept:
        assert row[: row.sum()].all(), "ties go to the lowest ids"


def test_top_k_keeps_exactly_k_with_ties_by_lowest_id() -> None:
    top_k = [1, 2, 63, 64, 65, 1024, 1025, 1999] * 8
    logits = np.random.default_rng(1).integers(0, 4, (64, 2000)).astype(np.float32)
    for k, row, values in zip(top_k, survivors(logits, top_k=top_k), logits, strict=True):
        assert set(np.flatnonzero(row)) == set(np.argsort(-values, kind="stable")[:k])


def test_top_k_off() -> None:
    logits = np.random.default_rng(2).standard_normal((64, 65)).astype(np.float32)
    assert survivors(logits, top_k=[0, -1, 65, 66, 2**31 - 1, 0, 0, 0] * 8).all()


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_zeros_of_either_sign_are_equal(top_k: int) -> None:
    logits = np.array([[-1.0, -0.0, 0.0, -0.0, 0.0, -1.0, -2.0, -3.0]], np.float32)
    assert np.flatnonzero(survivors(logits, top_k=top_k)[0]).tolist() == [1, 2, 3, 4][:top_k]


def test_a_row_does_not_depend_on_its_mates() -> None:
    """Rows that fall through to the last tier do not change those that were certain before."""
    logits = 2 * np.random.default_rng(3).standard_normal((64, 2000)).astype(np.float32)
    rows: dict[str, list[float]] = {
        "top_k": [0, 40, 0, 0, 1500, 0, 3, 200] * 8,
        "top_p": [0.9, 1.0, 1.0, 0.5, 0.99, 0.3, 0.8, 0.6] * 8,
        "min_p": [0.0, 0.0, 0.05, 0.0, 0.0, 0.3, 0.0, 0.001] * 8,
    }
    together = survivors(logits, **rows)
    for row in range(8):
        same = {name: values[row] for name, values in rows.items()}
        alone = survivors(np.broadcast_to(logits[row], logits.shape), **same)
        assert (alone == together[row]).all()


# ---- the sampler


def test_greedy_takes_the_lowest_id_among_ties_also_beside_random_rows() -> None:
    logits = np.random.default_rng(0).integers(0, 3, (8, 300)).astype(np.float32)
    best = logits.argmax(axis=1)
    temperature = np.where(np.arange(8) % 2, 0.0, 1.0)
    assert np.asarray(sample_rows(logits, temperature=0.0).token).tolist() == best.tolist()
    mixed = np.asarray(sample_rows(logits, temperature=temperature, top_k=20).token)
    assert (mixed[1::2] == best[1::2]).all()
    assert (mixed[::2] != best[::2]).any()


@pytest.mark.parametrize("settings_", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}])
def test_narrow_filters_are_greedy(settings_: dict[str, float]) -> None:
    logits = np.random.default_rng(1).standard_normal((8, 300)).astype(np.float32)
    assert np.asarray(sample_rows(logits, **settings_).token).tolist() == logits.argmax(axis=1).tolist()


def test_tiny_temperature_with_large_logits_does_not_overflow() -> None:
    logits = 1e4 * np.random.default_rng(1).standard_normal((8, 300)).astype(np.float32)
    for temperature in (1e-6, 1e-30):
        for top_p in (0.9, 1.0):
            result = sample_rows(logits, temperature=temperature, top_p=top_p)
            assert np.asarray(result.token).tolist() == logits.argmax(axis=1).tolist()
            assert np.asarray(result.finite).all()


def test_greedy_ties_at_a_tiny_temperature_are_sampled() -> None:
    logits = np.zeros((8, 300), np.float32)
    assert len(set(np.asarray(sample_rows(logits, temperature=1e-6).token).tolist())) > 4
    assert set(np.asarray(sample_rows(logits, temperature=1e-6, top_k=1).token).tolist()) == {0}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 5])
def test_rows_without_a_distribution_are_reported_alone(temperature: float, top_k: int) -> None:
    logits = np.random.default_rng(2).standard_normal((8, 300)).astype(np.float32)
    before = sample_rows(logits, temperature=temperature, top_k=top_k)
    broken = logits.copy()
    broken[1, 7] = np.nan
    broken[3] = -INF
    broken[5] = np.nan
    after = sample_rows(broken, temperature=temperature, top_k=top_k)
    assert np.asarray(after.finite).tolist() == [True, False, True, False, True, False, True, True]
    for row in (0, 2, 4, 6, 7):
        assert int(after.token[row]) == int(before.token[row])
        assert float(after.logprob[row]) == float(before.logprob[row])


@pytest.mark.parametrize("settings_", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_infinity_wins(settings_: dict[str, float]) -> None:
    logits = np.random.default_rng(3).standard_normal((8, 300)).astype(np.float32)
    logits[:, 123] = INF
    result = sample_rows(logits, **settings_)
    assert np.asarray(result.token).tolist() == [123] * 8
    assert np.asarray(result.finite).all()
    assert np.asarray(result.logprob).tolist() == [0.0] * 8, "it is certain"


def test_logprobs_are_those_of_the_raw_distribution(exact_distribution: Exact) -> None:
    logits = 3 * np.random.default_rng(4).standard_normal((8, 300)).astype(np.float32)
    result = sample_rows(logits, temperature=0.3, top_k=4, top_p=0.8)
    expected = [np.log(exact_distribution(row))[int(token)] for row, token in zip(logits, result.token, strict=True)]
    np.testing.assert_allclose(np.asarray(result.logprob), expected, atol=1e-5)


def test_half_precision_logits() -> None:
    logits = jnp.asarray(np.random.default_rng(5).standard_normal((4, 100)), jnp.bfloat16)
    result = sample_rows(logits, temperature=0.0)
    assert result.logprob.dtype == jnp.float32
    assert np.asarray(result.token).tolist() == np.asarray(logits.astype(jnp.float32)).argmax(axis=1).tolist()


def test_padding_rows_change_nothing() -> None:
    """A batch whose only random row is padding is as greedy as without it, and computes no log-probabilities."""
    logits = np.random.default_rng(6).standard_normal((8, 300)).astype(np.float32)
    settings_ = columns(8, {"temperature": [0, 1] * 4, "top_p": 1, "min_p": 0, "top_k": 0, "position": 0})
    padding = np.array([False, True] * 4)
    seed = np.zeros((8, 2), np.uint32)
    result = _sample(logits, SamplingRows(seed=seed, valid=~padding, want_logprob=padding, **settings_))  # type: ignore[arg-type]
    assert np.asarray(result.token)[::2].tolist() == logits.argmax(axis=1)[::2].tolist()
    assert np.asarray(result.logprob).tolist() == [0.0] * 8


def test_nothing_is_sorted() -> None:
    """XLA makes a sort of the whole row of a top_k that something slices through: a hundred times the cost."""
    rows, vocab = 4, 5000
    args = (jnp.zeros((rows, vocab)), jnp.full(rows, 50), jnp.full(rows, 0.9), jnp.full(rows, 0.1))
    program = jax.jit(lambda x, k, p, m: find_threshold(x, lambda y: y, k, p, m)).lower(*args).compile()
    assert " sort(" not in program.as_text()
