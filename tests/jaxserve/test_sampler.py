"""From logits to tokens, on rows with parameters of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.batch import empty_row
from jaxserve.sampling.penalties import empty_use
from jaxserve.sampling.sampler import Emitted, Sampler, Window
from pallas_kernels import Filters

INF = np.float32(np.inf)
Exact = Callable[..., np.ndarray]


@jax.jit
def _sample(logits: jax.Array, window: Window) -> Emitted:
    vocab = logits.shape[1]
    emitted = Sampler(vocab).verify(logits[:, None], window, empty_use(len(logits), vocab, 64), shaped=False)
    logprobs = jax.tree.map(lambda x: x[:, 0], emitted.logprobs)
    return Emitted(emitted.tokens[:, 0], emitted.finite, logprobs)


def sample_rows(logits: Any, **settings: Any) -> Emitted:
    """One sample of each row of [R, V]; each setting is a number for all rows or a list with one for each."""
    count = len(logits)
    defaults = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "num_logprobs": 0}
    kinds = {"top_k": np.int32, "num_logprobs": np.int32, "valid": np.bool_}
    columns = {
        name: np.broadcast_to(np.asarray(x, kinds.get(name, np.float32)), count)
        for name, x in ({"valid": True} | defaults | settings).items()
    }
    filters = Filters(**{name: columns.pop(name) for name in ("temperature", "min_p", "top_k", "top_p")})
    seed = np.repeat(np.arange(count, dtype=np.uint32)[:, None], 2, axis=1)
    used = columns.pop("valid")[:, None]
    row = jax.tree.map(lambda x: np.broadcast_to(x, (count, *np.shape(x))), empty_row((), 1))
    none = np.zeros((count, 0), np.int32)
    window = Window(
        replace(row, filters=filters, seed=seed, **columns), np.zeros((count, 4), np.int32), none, used, none
    )
    return _sample(logits, window)


def test_greedy_takes_the_lowest_id_among_ties_also_beside_random_rows() -> None:
    logits = np.random.default_rng(0).integers(0, 3, (8, 300)).astype(np.float32)
    best = logits.argmax(axis=1)
    temperature = np.where(np.arange(8) % 2, 0.0, 1.0)
    assert np.asarray(sample_rows(logits, temperature=0.0).tokens).tolist() == best.tolist()
    mixed = np.asarray(sample_rows(logits, temperature=temperature, top_k=20).tokens)
    assert (mixed[1::2] == best[1::2]).all()
    assert (mixed[::2] != best[::2]).any()


@pytest.mark.parametrize("settings_", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}])
def test_narrow_filters_are_greedy(settings_: dict[str, float]) -> None:
    logits = np.random.default_rng(1).standard_normal((8, 300)).astype(np.float32)
    assert np.asarray(sample_rows(logits, **settings_).tokens).tolist() == logits.argmax(axis=1).tolist()


def test_tiny_temperature_with_large_logits_does_not_overflow() -> None:
    logits = 1e4 * np.random.default_rng(1).standard_normal((8, 300)).astype(np.float32)
    for temperature in (1e-6, 1e-30):
        for top_p in (0.9, 1.0):
            result = sample_rows(logits, temperature=temperature, top_p=top_p)
            assert np.asarray(result.tokens).tolist() == logits.argmax(axis=1).tolist()
            assert np.asarray(result.finite).all()


def test_greedy_ties_at_a_tiny_temperature_are_sampled() -> None:
    logits = np.zeros((8, 300), np.float32)
    assert len(set(np.asarray(sample_rows(logits, temperature=1e-6).tokens).tolist())) > 4
    assert set(np.asarray(sample_rows(logits, temperature=1e-6, top_k=1).tokens).tolist()) == {0}


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
        assert int(after.tokens[row]) == int(before.tokens[row])
        assert float(after.logprobs.token[row]) == float(before.logprobs.token[row])


@pytest.mark.parametrize("settings_", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_infinity_wins(settings_: dict[str, float]) -> None:
    logits = np.random.default_rng(3).standard_normal((8, 300)).astype(np.float32)
    logits[:, 123] = INF
    result = sample_rows(logits, **settings_)
    assert np.asarray(result.tokens).tolist() == [123] * 8
    assert np.asarray(result.finite).all()
    assert np.asarray(result.logprobs.token).tolist() == [0.0] * 8, "it is certain"


def test_logprobs_are_those_of_the_raw_distribution(exact_distribution: Exact) -> None:
    logits = 3 * np.random.default_rng(4).standard_normal((8, 300)).astype(np.float32)
    result = sample_rows(logits, temperature=0.3, top_k=4, top_p=0.8)
    expected = [np.log(exact_distribution(row))[int(token)] for row, token in zip(logits, result.tokens, strict=True)]
    np.testing.assert_allclose(np.asarray(result.logprobs.token), expected, atol=1e-5)


def test_half_precision_logits() -> None:
    logits = jnp.asarray(np.random.default_rng(5).standard_normal((4, 100)), jnp.bfloat16)
    result = sample_rows(logits, temperature=0.0)
    assert result.logprobs.token.dtype == jnp.float32
    assert np.asarray(result.tokens).tolist() == np.asarray(logits.astype(jnp.float32)).argmax(axis=1).tolist()


def test_padding_rows_change_nothing() -> None:
    """A batch whose only random row is padding is as greedy as without it, and computes no log-probabilities."""
    logits = np.random.default_rng(6).standard_normal((8, 300)).astype(np.float32)
    padding = np.array([False, True] * 4)
    result = sample_rows(logits, temperature=[0, 1] * 4, valid=~padding, num_logprobs=padding.astype(int) - 1)
    assert np.asarray(result.tokens)[::2].tolist() == logits.argmax(axis=1)[::2].tolist()
    assert np.asarray(result.logprobs.token).tolist() == [0.0] * 8
