"""Cases with known right outputs: penalties, bad words, min_tokens, thinking budgets, repetition, and inputs on which
engines were seen to fail."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models
from jaxserve import ReasoningConfig, RepetitionDetection, SamplingParams
from jaxserve.sampling.sampler import Sampler
from jaxserve.sampling.thinking import Markers

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sampling_cases.json").read_text(encoding="utf-8"))
INF = np.float32(np.inf)


def flat(batch: int, width: int, vocab: int) -> np.ndarray:
    return np.zeros((batch, width, vocab), np.float32)


@pytest.mark.parametrize(
    ("logits", "prompt", "output", "presence", "frequency", "repetition", "expected"), GOLDEN["penalties"]
)
def test_penalties(
    make_sampler: Any, sample: Any, asked: Any, values_by_id: Any, logits: list[float], prompt: list[int],
    output: list[int], presence: float, frequency: float, repetition: float, expected: list[float],
) -> None:  # fmt: skip
    """The last tokens of the output also as drafts: the row after them is the same."""
    params = SamplingParams(
        temperature=0,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logprobs=len(logits),
    )
    sampler = make_sampler(len(logits), logprobs_mode="processed_logits")
    for split in range(len(output) + 1):
        row = np.array(logits, np.float32)[None, None].repeat(1 + len(output), axis=1)
        request = asked(params, prompt, output[:split], output[split:])
        found = values_by_id(sample(sampler, row, [request]).logprobs)[0, len(output) - split]
        np.testing.assert_allclose(found, np.array(expected, np.float32), rtol=1e-6)


@pytest.mark.parametrize(("words", "output", "masked"), GOLDEN["bad_words_masked"])
def test_bad_words(
    make_sampler: Any, sample: Any, asked: Any, values_by_id: Any, spelled: Any, words: list[list[int]],
    output: list[int], masked: list[int],
) -> None:  # fmt: skip
    params = SamplingParams(bad_words=[spelled.decode(word) for word in words], logprobs=8)
    sampler = make_sampler(8)
    for split in range(len(output) + 1):
        request = asked(params, (7,), output[:split], output[split:])
        sampled = sample(sampler, flat(1, 3, 8), [request])
        found = values_by_id(sampled.logprobs)[0, len(output) - split]
        assert np.flatnonzero(found == -INF).tolist() == masked


def test_bad_words_are_not_matched_across_the_prompt(make_sampler: Any, sample: Any, asked: Any) -> None:
    """The reference looks at the output alone: the prompt's last token is no beginning of a word."""
    logits = flat(1, 1, 8)
    logits[..., 2] = 9
    params = SamplingParams(temperature=0, bad_words=["bc"])
    assert sample(make_sampler(8), logits, [asked(params, (0, 1))]).token.item() == 2
    assert sample(make_sampler(8), logits, [asked(params, (0,), (1,))]).token.item() != 2


def test_min_tokens_step_by_step(make_sampler: Any, sample: Any, asked: Any, values_by_id: Any) -> None:
    sampler = make_sampler(4)
    params = SamplingParams(min_tokens=3, stop_token_ids=[1, 2], logprobs=4)
    for length, kept in enumerate(GOLDEN["min_tokens3_kept_per_step"]):
        found = values_by_id(sample(sampler, flat(1, 1, 4), [asked(params, (0,), [0] * length)]).logprobs)
        assert np.flatnonzero(found[0, 0] > -INF).tolist() == kept


def test_min_tokens_in_a_window(make_sampler: Any, sample: Any, asked: Any, values_by_id: Any) -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=[1, 2], logprobs=4)
    sampled = sample(make_sampler(4), flat(1, 5, 4), [asked(params, (0,), (0,), (0, 3, 0, 3))])
    kept = [np.flatnonzero(row > -INF).tolist() for row in values_by_id(sampled.logprobs)[0]]
    assert kept[:4] == GOLDEN["min_tokens_spec_rows_len1_min3_K4"]
    assert kept[4] == [0, 1, 2, 3], "the row after the last draft"


@pytest.mark.parametrize(("stop", "eos", "ignored", "masked"), [
    ([1], (2,), False, [1, 2]),
    ([1], (2,), True, [1]),
    ([], (2, 3), False, [2, 3]),
    ([], (2, 3), True, []),
])  # fmt: skip
def test_min_tokens_masks_all_that_ends_the_output(
    make_sampler: Any, sample: Any, asked: Any, values_by_id: Any, stop: Any, eos: Any, ignored: bool, masked: Any
) -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=stop, ignore_eos=ignored, logprobs=4)
    found = values_by_id(sample(make_sampler(4, stop_ids=eos), flat(1, 1, 4), [asked(params)]).logprobs)[0, 0]
    assert np.flatnonzero(found == -INF).tolist() == masked


@pytest.mark.parametrize(("tokens", "rule", "detected"), GOLDEN["repetition"])
def test_repetition_rule(tokens: list[int], rule: dict[str, int], detected: bool) -> None:
    assert RepetitionDetection(**rule).found_in(tokens) is detected


def test_repetition_ends_the_output(make_engine: Any, generate: Any) -> None:
    """0, 1, 2, 1, 2, ...: a pattern of two, three times, is complete with the sixth 1 or 2."""
    table = np.full((4, 4), -30, np.float32)
    for before, after in ((0, 1), (1, 2), (2, 1), (3, 3)):
        table[before, after] = 30
    engine = make_engine(models.MarkovLM(table), max_num_seqs=2, max_model_len=64)
    rule = {"max_pattern_size": 2, "min_count": 3}
    done = generate(engine, [0], temperature=0, max_tokens=20, repetition_detection=rule).outputs[0]
    assert done.token_ids == [1, 2, 1, 2, 1, 2]
    assert (done.finish_reason, done.stop_reason) == ("stop", "repetition_detected")
    late = generate(engine, [0], temperature=0, max_tokens=20, min_tokens=9, repetition_detection=rule).outputs[0]
    assert len(late.token_ids) == 9
    free = generate(engine, [0], temperature=0, max_tokens=20).outputs[0]
    assert (len(free.token_ids), free.finish_reason) == (20, "length")


@pytest.fixture(scope="module")
def scripted_engine(make_engine: Any) -> Any:
    """Its model wants token 5 after all tokens but one: first = (token, what follows it)."""

    @functools.cache
    def make(start: tuple[int, ...], end: tuple[int, ...], first: tuple[int, int] | None) -> Any:
        table = np.full((202, 202), -30, np.float32)
        table[:, 5] = 30
        if first is not None:
            table[first[0], 5], table[first] = -30, 30
        reasoning = ReasoningConfig(start=start, end=end)
        return make_engine(models.MarkovLM(table), max_num_seqs=1, max_model_len=64, reasoning_config=reasoning)

    return make


@pytest.mark.parametrize("case", GOLDEN["thinking_budget"], ids=lambda c: f"{c['budget']} after {c['prompt']}")
def test_thinking_budget(scripted_engine: Any, generate: Any, case: dict[str, Any]) -> None:
    assert set(case["model_wants"]) <= {"0"}, "a table can only say what follows the prompt"
    assert case["default_token"] == 5
    first = (case["prompt"][-1], case["model_wants"]["0"]) if case["model_wants"] else None
    engine = scripted_engine(tuple(case["start"]), tuple(case["end"]), first)
    for temperature in (0, 1):
        params = SamplingParams(temperature=temperature, max_tokens=10, thinking_token_budget=case["budget"])
        assert generate(engine, case["prompt"], params).outputs[0].token_ids == case["output"]


@pytest.mark.parametrize("case", GOLDEN["thinking_budget"], ids=lambda c: f"{c['budget']} after {c['prompt']}")
@pytest.mark.parametrize("position", [0, 2, 4])
def test_thinking_budget_in_a_window(
    make_sampler: Any, sample: Any, asked: Any, case: dict[str, Any], position: int
) -> None:
    """Forced at the exact position when the tokens before it are drafts."""
    sampler = make_sampler(202, markers=Markers(tuple(case["start"]), tuple(case["end"])))
    output, width = case["output"], 5
    wants = {int(step): token for step, token in case["model_wants"].items()}
    logits = flat(1, 1 + width, 202)
    for row in range(1 + width):
        logits[0, row, wants.get(position + row, case["default_token"])] = 30
    params = SamplingParams(temperature=0, thinking_token_budget=case["budget"])
    drafts = output[position : position + width]
    request = asked(params, case["prompt"], output[:position], drafts)
    expected = output[position : position + width + 1]
    assert sample(sampler, logits, [request]).token[0, : len(expected)].tolist() == expected


# ---- inputs on which other engines failed ----


def test_top_p_just_below_one_keeps_everything(make_sampler: Any, sample: Any, asked: Any) -> None:
    logits = np.random.default_rng(0).standard_normal((2, 1, 32000)).astype(np.float32)
    sampler = make_sampler(32000, max_logprobs=1)
    sampled = sample(sampler, logits, [asked(SamplingParams(top_p=0.9999999, logprobs=0), seed=i) for i in range(2)])
    assert ((sampled.token >= 0) & (sampled.token < 32000)).all()
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    expected = np.take_along_axis(exact, sampled.token[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(sampled.logprobs.token, expected, atol=1e-4)


def test_top_k_one_on_a_flat_row_is_one_token(make_sampler: Any, sample: Any, asked: Any) -> None:
    params = SamplingParams(top_k=1, top_p=0.8, logprobs=8)
    sampled = sample(make_sampler(8), flat(64, 1, 8), [asked(params, seed=i) for i in range(64)])
    assert (sampled.token == 0).all()
    assert (sampled.logprobs.token == 0).all()
    assert sampled.finite.all()


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_off(make_sampler: Any, sample: Any, asked: Any, values_by_id: Any, off: int) -> None:
    sampled = sample(make_sampler(8), flat(1, 1, 8), [asked(SamplingParams(top_k=off, logprobs=8))])
    np.testing.assert_allclose(values_by_id(sampled.logprobs), np.log(1 / 8), atol=1e-6)


def test_min_p_never_leaves_the_top_k(make_sampler: Any, sample: Any, asked: Any) -> None:
    logits = np.full((256, 1, 8), -1, np.float32)
    logits[:, 0, :2] = 3, 2.9
    params = SamplingParams(top_k=2, min_p=0.5)
    sampled = sample(make_sampler(8), logits, [asked(params, seed=i) for i in range(256)])
    assert set(sampled.token.ravel().tolist()) == {0, 1}


def test_min_p_of_negative_logits(
    make_sampler: Any, sample: Any, asked: Any, values_by_id: Any, exact_distribution: Any
) -> None:
    logits = np.array([-50, -50.5, -51, -53, -60, -90, -1e4, -1e30], np.float32)
    sampled = sample(make_sampler(8), logits[None, None], [asked(SamplingParams(min_p=0.2, logprobs=8))])
    expected = exact_distribution(logits, min_p=0.2)
    np.testing.assert_allclose(np.exp(values_by_id(sampled.logprobs))[0, 0], expected, atol=1e-6)
    assert (expected > 0).sum() == 3


@pytest.mark.parametrize("vocab", [100, 8193, 10000, 151936])
def test_all_mass_in_the_last_tile(sample: Any, asked: Any, vocab: int) -> None:
    logits = np.full((4, 1, vocab), -20, np.float32)
    logits[..., -3:] = 30
    settings = ({}, {"top_k": 2}, {"top_p": 0.9}, {"frequency_penalty": 0.1, "min_p": 0.1})
    sampled = sample(Sampler(vocab, max_logprobs=0), logits, [asked(SamplingParams(**s)) for s in settings])
    assert ((sampled.token >= vocab - 3) & (sampled.token < vocab)).all()


def test_a_biased_token_appears_at_no_position_of_a_window(make_sampler: Any, sample: Any, asked: Any) -> None:
    """Drafts want it at all of them, and so does the model."""
    logits = flat(32, 4, 8)
    logits[..., 5] = 40
    params = SamplingParams(logit_bias={5: -100})
    sampled = sample(make_sampler(8), logits, [asked(params, (5, 5), (), (5, 5, 5), seed=i) for i in range(32)])
    assert 5 not in sampled.token


def test_a_batch_mate_with_filters_changes_no_token(make_sampler: Any, sample: Any, asked: Any) -> None:
    logits = np.random.default_rng(1).standard_normal((2, 4, 300)).astype(np.float32)
    sampler = make_sampler(300, max_logprobs=1)
    plain = asked(SamplingParams(seed=7), drafts=(1, 2, 3))
    mates = ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.3}, {"temperature": 0}, {"presence_penalty": 2.0},
             {"logit_bias": {3: 50}}, {"logprobs": 1}, {"bad_words": ["b"]})  # fmt: skip
    tokens = [
        sample(sampler, logits, [plain, asked(SamplingParams(seed=8, **mate), drafts=(1, 2, 3))]).token[0].tolist()
        for mate in mates
    ]
    assert tokens == tokens[:1] * len(mates)
