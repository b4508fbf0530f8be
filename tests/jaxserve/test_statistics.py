"""Tokens through the whole engine against the distribution they should have: a Markov chain's pairs of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from jaxserve import RequestOutput, SamplingParams

V, REQUESTS, LENGTH = 16, 64, 1600  # of each kind: 102400 tokens
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1, "temperature": 1.3},
}
PAIRS = (("temperature", "top_k"), ("top_p", "min_p"))


@pytest.fixture(scope="module")
def model(random_markov: Callable[..., Any]) -> Any:
    return random_markov(V, order=1, seed=3)


@pytest.fixture(scope="module")
def outputs(make_engine: Callable[..., Any], drive: Callable[..., dict[str, RequestOutput]], model: Any) -> Any:
    """By kind, the tokens [requests, length], prompt included. Kinds share batches: rows must not mix."""
    engine = make_engine(model, max_num_seqs=128, max_model_len=LENGTH + 1, block_size=1024)
    for kinds in PAIRS:
        for i in range(REQUESTS):
            for kind in kinds:
                params = SamplingParams(seed=1000 * i + len(kind), max_tokens=LENGTH, **KINDS[kind])
                engine.add_request(f"{kind}/{i}", [i % V], params)
    last = drive(engine)
    return {
        kind: np.array([[i % V, *last[f"{kind}/{i}"].outputs[0].token_ids] for i in range(REQUESTS)]) for kind in KINDS
    }


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_of_tokens(outputs: Any, model: Any, exact_distribution: Callable[..., np.ndarray], kind: str) -> None:
    tokens = outputs[kind]
    assert tokens.size >= 100_000
    counts = np.bincount((tokens[:, :-1] * V + tokens[:, 1:]).ravel(), minlength=V * V).reshape(V, V)
    exact = np.array([exact_distribution(row, **KINDS[kind]) for row in model.table])
    assert counts[exact == 0].sum() == 0, "a token outside the support"
    expected = exact * counts.sum(axis=1, keepdims=True)
    rare = expected < 5  # these count together
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    tested = expected > 0
    statistic = ((observed - expected)[tested] ** 2 / expected[tested]).sum()
    assert stats.chi2.sf(statistic, tested.sum() - V) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_independent(outputs: Any, kind: str) -> None:
    """No two seeds give the same stretch of tokens."""
    windows = np.lib.stride_tricks.sliding_window_view(outputs[kind], 60, axis=1)[:, ::50]
    stretches = {bytes(w.astype(np.uint8)) for w in windows.reshape(-1, 60)}
    assert len(stretches) == windows.shape[0] * windows.shape[1]
