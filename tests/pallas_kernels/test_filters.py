"""Filters against definitions written down in NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.filters import CANDIDATES, find_threshold

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
    return {
        name: np.broadcast_to(np.asarray(x, np.int32 if name == "top_k" else np.float32), rows)
        for name, x in settings.items()
    }


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


def test_nothing_is_sorted() -> None:
    """XLA makes a sort of the whole row of a top_k that something slices through: a hundred times the cost."""
    rows, vocab = 4, 49_152
    args = (jnp.zeros((rows, vocab)), jnp.full(rows, 50), jnp.full(rows, 0.9), jnp.full(rows, 0.1))
    program = jax.jit(lambda x, k, p, m: find_threshold(x, lambda y: y, k, p, m)).lower(*args).compile()
    sorted_lengths = [int(n) for n in re.findall(r"\[4,(\d+)\]\S* [^=]*sort\(", program.as_text())]
    assert all(n <= CANDIDATES for n in sorted_lengths)
