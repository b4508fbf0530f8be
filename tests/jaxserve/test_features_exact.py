"""The distribution of every row, by enumeration, against the definitions written down in NumPy and float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve import SamplingParams
from jaxserve.sampling.sampler import Sampler
from jaxserve.sampling.thinking import Markers

V, PADDED, SLOTS, K = 7, 8, 4, 3
EOS = (6,)
INF = np.inf

# All numbers that reach a comparison are sums, products and quotients of few powers of two: float32 has no rounding
# that float64 has not, and equal logits are equal in both. Filters lie between any two sums of so few equal tokens.
quarters = st.integers(-8, 8).map(lambda i: i / 4)
ids = st.integers(0, V - 1)


@st.composite
def sampling_params(draw: Any) -> SamplingParams:
    """Any of the features together; each is off about half of the time."""

    def maybe(strategy: Any, off: Any) -> Any:
        return draw(st.one_of(st.just(off), strategy))

    return SamplingParams(
        allowed_token_ids=maybe(st.lists(ids, min_size=1, max_size=V, unique=True), None),
        bad_words=maybe(st.lists(st.text("abcdefg", min_size=1, max_size=3), max_size=3), []),
        min_tokens=maybe(st.integers(1, 6), 0),
        stop_token_ids=maybe(st.lists(ids, max_size=2, unique=True), []),
        ignore_eos=draw(st.booleans()),
        logit_bias=maybe(st.dictionaries(ids, quarters, max_size=3), None),
        repetition_penalty=maybe(st.sampled_from([0.5, 2.0, 4.0]), 1.0),
        frequency_penalty=maybe(st.sampled_from([-1.5, 0.25, 1.0]), 0.0),
        presence_penalty=maybe(st.sampled_from([-0.5, 0.5, 2.0]), 0.0),
        temperature=draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])),
        min_p=maybe(st.sampled_from([0.01, 0.11, 0.37]), 0.0),
        top_k=draw(st.sampled_from([0, -1, 1, 2, 3, 5, 100])),
        top_p=draw(st.sampled_from([1.0, 0.37, 0.61, 0.91])),
        max_tokens=None,
        logprobs=PADDED,
    )


@st.composite
def cases(draw: Any) -> tuple[Any, ...]:
    """(params, prompt, output, drafts, seed)."""
    tokens = st.lists(ids, max_size=6)
    return (
        draw(sampling_params()),
        draw(st.lists(ids, min_size=1, max_size=4)),
        draw(tokens),
        draw(st.lists(ids, max_size=K)),
        draw(st.integers(0, 2**63 - 1)),
    )


def shaped_logits(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], spell: Any
) -> np.ndarray:
    """[V] float64, all that comes before temperature."""
    x = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        x[np.setdiff1d(np.arange(len(x)), params.allowed_token_ids)] = -INF
    for word in map(spell, params.bad_words):
        if list(output)[len(output) - len(word) + 1 :] == word[:-1] and len(output) >= len(word) - 1:
            x[word[-1]] = -INF
    if len(output) < params.min_tokens:
        x[[*params.stop_token_ids, *(() if params.ignore_eos else EOS)]] = -INF
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    return x


@pytest.fixture(scope="module")
def sampler(make_sampler: Callable[..., Sampler]) -> Sampler:
    """Logits are wider than the vocabulary by one id."""
    return make_sampler(PADDED, stop_ids=EOS, vocab_limit=V)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    requests=st.lists(cases(), min_size=SLOTS, max_size=SLOTS),
    draws=st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed)),
)
def test_all_features_together(
    sampler: Sampler, sample: Any, asked: Any, values_by_id: Any, spelled: Any, exact_distribution: Any,
    requests: list[tuple[Any, ...]], draws: np.random.Generator,
) -> None:  # fmt: skip
    logits = (draws.integers(-12, 13, (SLOTS, 1 + K, PADDED)) / 4).astype(np.float32)
    logits[draws.random(logits.shape) < 0.05] = -INF
    sampled = sample(
        sampler, logits, [asked(p, prompt, output, drafts, seed) for p, prompt, output, drafts, seed in requests]
    )
    found = values_by_id(sampled.logprobs)
    for slot, (params, prompt, output, drafts, _) in enumerate(requests):
        for row in range(1 + len(drafts)):
            x = shaped_logits(logits[slot, row, :V], params, prompt, [*output, *drafts[:row]], spelled.encode)
            empty = bool(np.all(x == -INF))
            assert sampled.finite[slot, row] == (not empty)
            if empty:
                continue
            token = int(sampled.token[slot, row])
            if params.temperature == 0:
                expected = exact_distribution(x)  # log-probabilities of greedy rows are those of temperature 1
                assert token == int(np.argmax(x))
            else:
                expected = exact_distribution(x, params.temperature, params.top_k, params.top_p, params.min_p)
            got = np.exp(found[slot, row].astype(np.float64))
            assert got[V] == 0, "an id past the vocabulary"
            assert np.array_equal(got[:V] > 0, expected > 0), (got, expected)
            np.testing.assert_allclose(got[:V], expected, rtol=2e-5)
            assert expected[token] > 0
            np.testing.assert_allclose(sampled.logprobs.token[slot, row], np.log(expected[token]), atol=2e-5)


def forced_by_definition(start: Sequence[int], end: Sequence[int], tokens: Sequence[int], budget: int) -> int | None:
    """The token that a thinking budget forces after `tokens`, by reading them from the first one."""
    began = None
    for n in range(1, len(tokens) + 1):
        if began is None and list(tokens[max(0, n - len(start)) : n]) == list(start):
            began = n
        if list(tokens[max(0, n - len(end)) : n]) == list(end):
            began = None
    if began is None or len(tokens) - began < budget:
        return None
    inside = list(tokens[began:])
    begun = max(n for n in range(len(end)) if n == 0 or inside[-n:] == list(end[:n]))
    return end[begun]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
@pytest.mark.parametrize(("start", "end"), [((1,), (2,)), ((1, 1), (2, 3)), ((1,), (2, 2, 3)), ((1, 2), (2, 1))])
def test_thinking_budgets(
    make_sampler: Any, sample: Any, asked: Any, data: Any, start: tuple[int, ...], end: tuple[int, ...]
) -> None:
    """Of any history over four tokens, re-entered sections and half-written markers too, in windows of drafts."""
    sampler = make_sampler(PADDED, markers=Markers(start, end), max_logprobs=0)
    tokens = st.lists(st.integers(0, 3), max_size=8)
    requests = []
    for _ in range(SLOTS):
        budget = data.draw(st.one_of(st.none(), st.integers(0, 6)))
        prompt, output = [0, *data.draw(tokens)], data.draw(tokens)
        drafts = data.draw(st.lists(st.integers(0, 3), max_size=K))
        requests.append(asked(SamplingParams(temperature=0, thinking_token_budget=budget), prompt, output, drafts))
    logits = np.zeros((SLOTS, 1 + K, PADDED), np.float32)
    logits[..., 5] = 1
    sampled = sample(sampler, logits, requests)
    for slot, request in enumerate(requests):
        for row in range(1 + len(request.drafts)):
            history = [*request.prompt, *request.output, *request.drafts[:row]]
            budget = request.params.thinking_token_budget
            forced = None if budget is None else forced_by_definition(start, end, history, budget)
            assert sampled.token[slot, row] == (5 if forced is None else forced), (history, budget)
