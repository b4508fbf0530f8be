"""The draw: exact probabilities, nothing of weight zero, randomness that is a pure function of its coordinates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pallas_kernels.draw import MAX_VOCAB, draw, random_words

VOCABS = (100, 8193, 10000, 151936)


def itself(values: jax.Array, ids: jax.Array) -> jax.Array:
    """Weights given directly; what pads the row weighs nothing."""
    return jnp.maximum(values, 0.0)


draw_weights = jax.jit(partial(draw, weight=itself))
draw_logits = jax.jit(partial(draw, weight=lambda x, ids: jnp.exp(x)))


@partial(jax.jit, static_argnames=("rows", "batches"))
def draw_many(weights: jax.Array, rows: int, batches: int, first_seed: int = 0) -> jax.Array:
    """rows * batches draws from one row of weights: [batches, rows]."""

    def batch(i: jax.Array) -> jax.Array:
        seed = jnp.stack([jnp.full(rows, i, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32) + first_seed], axis=1)
        words = random_words(seed, jnp.full(rows, 3, jnp.int32), 0)
        return draw(jnp.broadcast_to(weights, (rows, weights.shape[0])), itself, words)

    return jax.lax.map(batch, jnp.arange(batches, dtype=jnp.uint32))


def counts(weights: np.ndarray, rows: int, batches: int) -> np.ndarray:
    drawn = np.asarray(draw_many(jnp.asarray(weights, jnp.float32), rows, batches))
    return np.bincount(drawn.ravel(), minlength=len(weights))


def p_value(observed: np.ndarray, weights: np.ndarray) -> float:
    """Chi-square of counts against weights; what is expected less than five times is put together."""
    assert observed[weights == 0].sum() == 0, "drew something of weight zero"
    expected = weights / weights.sum() * observed.sum()
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    return 1.0 if len(expected) < 2 else stats.chisquare(observed, expected).pvalue


@pytest.mark.parametrize("place", [0, 57, 99])
def test_a_rare_token_keeps_its_rate(place: int) -> None:
    weights = np.random.default_rng(place).exponential(size=100)
    weights[place] = 0
    weights[place] = 1e-5 * weights.sum()
    observed = counts(weights, rows=30_000, batches=100)
    assert stats.binomtest(int(observed[place]), 3_000_000, 1e-5).pvalue > 1e-4
    assert p_value(observed, weights) > 1e-4


@pytest.mark.parametrize("vocab", VOCABS)
def test_all_the_mass_in_the_last_tile(vocab: int) -> None:
    weights = np.zeros(vocab)
    first = (vocab - 1) // 256 * 256
    weights[first:] = np.random.default_rng(vocab).exponential(size=vocab - first)
    weights[first::3] = 0
    weights[-1] += 0.5
    assert p_value(counts(weights, rows=32, batches=100_000 // vocab + 20), weights) > 1e-4


@pytest.mark.parametrize("vocab", [1, 2, 257, 8193])
def test_the_whole_row(vocab: int) -> None:
    weights = np.random.default_rng(vocab).exponential(size=vocab) ** 3
    weights[1::2] = 0
    observed = counts(weights, rows=256, batches=50)
    assert p_value(observed, weights) > 1e-4
    starts = np.arange(0, vocab, 64)
    assert p_value(np.add.reduceat(observed, starts), np.add.reduceat(weights, starts)) > 1e-4


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scale_means_nothing(scale: float) -> None:
    weights = np.array([0.0, 3.0, 0.0, 5.0, 2.0]) * scale
    assert p_value(counts(weights, 10_000, 2), weights) > 1e-4


@pytest.mark.parametrize("vocab", VOCABS[:3])
def test_one_token_is_certain_whatever_the_random_words(vocab: int) -> None:
    """Also at the ends of the range of uniform numbers, where the running sums say nothing."""
    extremes = np.array([[word] * 8 for word in (0, 1, 2**31, 2**32 - 1)], np.uint32)
    for token in (0, vocab // 2, vocab - 1):
        values = np.zeros((4, vocab), np.float32)
        values[:, token] = 0.25
        assert draw_weights(values, words=extremes).tolist() == [token] * 4


@given(st.lists(st.sampled_from([0.0, 0.0, 1e-20, 1e-7, 0.5, 1.0, 3e5]), min_size=7, max_size=7), st.data())
@settings(max_examples=200, deadline=None)
def test_never_a_token_of_weight_zero(weights: list[float], data: st.DataObject) -> None:
    words = data.draw(st.lists(st.sampled_from([0, 1, 2**10, 2**31, 2**32 - 2**10, 2**32 - 1]), min_size=8, max_size=8))
    token = int(draw_weights(np.array([weights], np.float32), words=np.array([words], np.uint32))[0])
    assert 0 <= token < len(weights)
    assert weights[token] > 0 or not any(weights)


def test_rows_do_not_know_of_each_other() -> None:
    rng = np.random.default_rng(0)
    values = rng.exponential(size=(16, 1000)).astype(np.float32)
    words = rng.integers(0, 2**32, (16, 8), dtype=np.uint32)
    together = draw_weights(values, words=words)
    alone = [int(draw_weights(values[i : i + 1], words=words[i : i + 1])[0]) for i in range(16)]
    assert together.tolist() == alone


@pytest.mark.parametrize("axis", ["low", "high", "position", "stream"])
def test_neighbouring_coordinates_are_independent(axis: str) -> None:
    """Pairs of draws whose seeds (low or high word), positions or streams differ by one fill the square evenly."""
    n = 20_000
    at, fixed = np.arange(n), np.full(n, 12345)
    seed = np.stack([at if axis == "high" else fixed, at if axis in ("low", "stream") else fixed], axis=1)
    words = [
        jax.jit(random_words, static_argnums=2)(seed.astype(np.uint32), at if axis == "position" else fixed, stream)
        for stream in (0, 1)
    ]
    drawn = [np.asarray(draw_weights(np.ones((n, 16), np.float32), words=w)) for w in words]
    first, second = drawn if axis == "stream" else (drawn[0][::2], drawn[0][1::2])
    assert stats.chisquare(np.bincount(first * 16 + second, minlength=256)).pvalue > 1e-4


def test_random_words_are_a_pure_function() -> None:
    seed = np.array([[1, 2], [3, 4], [1, 2]], np.uint32)
    position = np.array([5, 6, 5], np.int32)
    words = np.asarray(random_words(seed, position, 0))
    assert (words[0] == words[2]).all()
    assert (words[0] != words[1]).any()
    assert (words[:1] == np.asarray(random_words(seed[:1], position[:1], 0))).all()


def test_a_vocabulary_that_is_too_large_is_refused() -> None:
    words = jax.ShapeDtypeStruct((1, 8), jnp.uint32)
    with pytest.raises(ValueError, match=f"{MAX_VOCAB + 1}.*{MAX_VOCAB}"):
        jax.eval_shape(draw_weights, jax.ShapeDtypeStruct((1, MAX_VOCAB + 1), jnp.float32), words=words)


def test_logits_as_the_sampler_draws_them(exact_distribution: Callable[..., np.ndarray]) -> None:
    """Through exp; the -inf that pads the row weighs nothing."""
    logits = 2 * np.random.default_rng(5).standard_normal(515).astype(np.float32)
    words = np.random.default_rng(6).integers(0, 2**32, (8192, 8), dtype=np.uint32)
    drawn = np.asarray(draw_logits(np.broadcast_to(logits, (8192, 515)), words=words))
    assert p_value(np.bincount(drawn, minlength=515), exact_distribution(logits)) > 1e-4
