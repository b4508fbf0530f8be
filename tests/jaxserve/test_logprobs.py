"""Log-probabilities as a request sees them: modes, ranks, listed ids, the whole vocabulary, prompts, deltas."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import models
from jaxserve import EngineCore, RequestOutputKind, SamplingParams
from jaxserve.config import LOGPROBS_MODES
from jaxserve.prompt_scores import PromptScores, ScoreCache
from jaxserve.sampling.logprobs import Logprobs

V = 6
LOGITS = np.array([2.0, 1.0, 1.0, 0.5, 0.5, -3.0], np.float32)  # two pairs of ties
MODEL = models.MarkovLM(np.tile(LOGITS, (V, 1)))
RAW = LOGITS - np.log(np.exp(LOGITS).sum())
CONFIG = {"max_num_seqs": 4, "max_model_len": 64}


@pytest.fixture(scope="module")
def engines(make_engine: Callable[..., EngineCore]) -> dict[str, EngineCore]:
    return {mode: make_engine(MODEL, logprobs_mode=mode, max_logprobs=-1, **CONFIG) for mode in LOGPROBS_MODES}


@pytest.fixture(scope="module")
def raw(engines: dict[str, EngineCore]) -> EngineCore:
    return engines["raw_logprobs"]


def ask(generate: Any, engine: EngineCore, prompt: Any = (0,), **keywords: Any) -> Any:
    return generate(engine, list(prompt), SamplingParams(**({"max_tokens": 4, "seed": 1} | keywords))).outputs[0]


SHAPED = {"logit_bias": {0: -1.0, 5: 2.0}, "temperature": 0.5, "top_k": 3}
FINAL = LOGITS + np.array([-1, 0, 0, 0, 0, 2.0])  # what is left at the top: 0, 1, 2 of the same size
PROCESSED = np.array([-np.log(3)] * 3 + [-np.inf] * 3)
EXPECTED = {
    "raw_logprobs": RAW,
    "model_logprobs": RAW,
    "raw_logits": LOGITS,
    "processed_logprobs": PROCESSED,
    "processed_logits": np.where(np.isfinite(PROCESSED), 0, -np.inf),  # relative to the largest
}


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_modes(engines: dict[str, EngineCore], generate: Any, mode: str) -> None:
    done = ask(generate, engines[mode], logprobs=-1, **SHAPED)
    for token, found in zip(done.token_ids, done.logprobs, strict=True):
        assert token in (0, 1, 2)
        np.testing.assert_allclose([found[i].logprob for i in range(V)], EXPECTED[mode], atol=1e-5)
        ranks = [1 + int((EXPECTED[mode] > value + 1e-6).sum()) for value in EXPECTED[mode]]
        assert [found[i].rank for i in range(V)] == ranks
    cumulative = sum(found[t].logprob for t, found in zip(done.token_ids, done.logprobs, strict=True))
    assert done.cumulative_logprob == pytest.approx(cumulative, abs=1e-5)


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_greedy_rows_are_processed_but_not_filtered(engines: Any, generate: Any, mode: str) -> None:
    done = ask(generate, engines[mode], logprobs=-1, temperature=0, logit_bias={5: 4.0}, top_k=1)
    final = LOGITS + np.array([0, 0, 0, 0, 0, 4.0])
    assert done.token_ids == [0] * 4
    expected = final if mode == "processed_logits" else final - np.log(np.exp(final).sum())
    np.testing.assert_allclose([done.logprobs[0][i].logprob for i in range(V)], expected, atol=1e-5)


def test_a_removed_token_is_minus_infinity_and_never_nan(engines: Any, generate: Any) -> None:
    done = ask(generate, engines["processed_logprobs"], logprobs=2, top_k=1)
    for found in done.logprobs:
        values = [entry.logprob for entry in found.values()]
        assert values == [0.0, -math.inf]
        assert [entry.rank for entry in found.values()] == [1, 2]
        assert json.loads(json.dumps(values)) == values
    assert done.cumulative_logprob == 0.0


def test_ties_share_a_rank_and_come_by_id(raw: EngineCore, generate: Any) -> None:
    for found in ask(generate, raw, logprobs=5, temperature=0).logprobs:
        assert list(found) == [0, 1, 2, 3, 4]
        assert [entry.rank for entry in found.values()] == [1, 2, 2, 4, 4]


def test_the_token_comes_first_and_is_not_counted_twice(raw: EngineCore, generate: Any) -> None:
    only = ask(generate, raw, allowed_token_ids=[4], logprobs=2)
    assert [list(found) for found in only.logprobs] == [[4, 0, 1]] * 4
    assert only.logprobs[0][4].rank == 4
    assert [list(found) for found in ask(generate, raw, temperature=0, logprobs=2).logprobs] == [[0, 1]] * 4
    assert [list(found) for found in ask(generate, raw, temperature=0, logprobs=0).logprobs] == [[0]] * 4
    assert ask(generate, raw).logprobs is None
    assert ask(generate, raw).cumulative_logprob is None


@pytest.mark.parametrize(("keywords", "expected"), [
    ({"logprob_token_ids": [5, 3]}, [0, 5, 3]),
    ({"logprob_token_ids": [5, 0], "logprobs": 0}, [0, 5]),
    ({"logprob_token_ids": [5, 1], "logprobs": 2}, [0, 1, 5]),
    ({"logprob_token_ids": []}, [0]),
    ({"logprob_token_ids": [2, 5], "logprobs": -1}, [0, 1, 2, 3, 4, 5]),
])  # fmt: skip
def test_listed_ids(raw: EngineCore, generate: Any, keywords: dict[str, Any], expected: list[int]) -> None:
    for found in ask(generate, raw, temperature=0, **keywords).logprobs:
        assert list(found) == expected
        ranks = 1 + (LOGITS[None] > LOGITS[expected, None]).sum(axis=1)
        assert [entry.rank for entry in found.values()] == ranks.tolist()
        np.testing.assert_allclose([entry.logprob for entry in found.values()], RAW[expected], atol=1e-5)


def test_requests_of_a_batch_get_what_each_asked_for(raw: EngineCore, drive: Any) -> None:
    asked = [{"logprobs": 3}, {}, {"logprob_token_ids": [4]}, {"logprobs": -1}]
    for i, keywords in enumerate(asked):
        raw.add_request(str(i), [0], SamplingParams(temperature=0, max_tokens=3, **keywords))
    done = {i: output.outputs[0].logprobs for i, output in drive(raw).items()}
    assert [list(found) for found in done["0"]] == [[0, 1, 2]] * 3
    assert done["1"] is None
    assert [list(found) for found in done["2"]] == [[0, 4]] * 3
    assert [len(found) for found in done["3"]] == [V] * 3


@pytest.mark.parametrize(("limit", "keywords"), [
    (2, {"logprobs": 3}), (2, {"logprobs": -1}), (2, {"prompt_logprobs": 3}), (2, {"prompt_logprobs": -1}),
    (2, {"logprob_token_ids": [1, 2, 3]}), (0, {"logprobs": 1}), (20, {"logprobs": V + 1}), (-1, {"logprobs": V + 1}),
    (2, {"logprob_token_ids": [V]}), (-1, {"logprobs": -2}), (-1, {"logprob_token_ids": [-1]}),
])  # fmt: skip
def test_limits(make_engine: Any, limit: int, keywords: dict[str, Any]) -> None:
    """Named: the field and the value; nothing is queued."""
    engine = make_engine(MODEL, max_logprobs=limit, **CONFIG)
    with pytest.raises(ValueError, match=next(iter(keywords))):
        engine.add_request("x", [0], SamplingParams(**keywords))
    assert not engine.has_unfinished()


def test_the_limit_itself_is_served(make_engine: Any, generate: Any) -> None:
    engine = make_engine(MODEL, max_logprobs=2, **CONFIG)
    done = ask(generate, engine, temperature=0, logprobs=2, logprob_token_ids=[5, 4])
    assert [list(found) for found in done.logprobs] == [[0, 1, 5, 4]] * 4


def test_deltas_put_together_are_the_whole(raw: EngineCore) -> None:
    params = {"max_tokens": 8, "seed": 5, "logprobs": 2, "logprob_token_ids": [5]}
    for name, kind in (("delta", RequestOutputKind.DELTA), ("whole", RequestOutputKind.CUMULATIVE)):
        raw.add_request(name, [0], SamplingParams(output_kind=kind, **params))
    deltas, whole = [], None
    while raw.has_unfinished():
        for output in raw.step():
            if output.request_id == "delta":
                deltas.append(output.outputs[0])
            else:
                whole = output.outputs[0]
    assert whole is not None
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert [found for delta in deltas for found in delta.logprobs] == whole.logprobs
    assert deltas[-1].cumulative_logprob == whole.cumulative_logprob
    assert len(deltas) > 1


@pytest.mark.parametrize("threshold", [0, 2, 12])
def test_prompt_logprobs_twice(make_engine: Any, random_markov: Any, generate: Any, threshold: int) -> None:
    """The same 33 tokens, the second time from the cache: an entry for every token, and equal ones. Also where chunks
    end within a tile."""
    model = random_markov(12)
    engine = make_engine(model, max_num_seqs=2, max_model_len=64, block_size=16, long_prefill_token_threshold=threshold)
    prompt = np.random.default_rng(3).integers(0, 12, 33).tolist()
    params = SamplingParams(prompt_logprobs=1, max_tokens=1, temperature=0)
    first, second = (generate(engine, prompt, params) for _ in range(2))
    assert second.num_cached_tokens == 32
    assert len(first.prompt_logprobs) == 33
    assert first.prompt_logprobs[0] is None
    assert first.prompt_logprobs == second.prompt_logprobs
    padded = [12, *prompt]  # row V of the table: no token before
    for i in range(1, 33):
        logits = model.table[padded[i - 1], padded[i]].astype(np.float64)
        exact = logits - np.log(np.exp(logits).sum())
        found = first.prompt_logprobs[i]
        assert set(found) == {prompt[i], int(np.argmax(logits))}
        assert next(iter(found)) == prompt[i]
        for token, entry in found.items():
            assert entry.logprob == pytest.approx(exact[token], abs=1e-5)
            assert entry.rank == 1 + (logits > logits[token]).sum()


def scores(number: int, length: int) -> PromptScores:
    made = PromptScores(length, number)
    none = np.zeros((length - 1, 0), np.float32)
    tokens, top = np.arange(1.0, length, dtype=np.float32), np.zeros((length - 1, number), np.float32)
    made.put(1, Logprobs(tokens, tokens, top, top, top, none, none))
    return made


def test_remembered_scores_are_bounded_by_their_size() -> None:
    """Blocks of 4 tokens with 9 more log-probabilities each are 40; three fit in 120."""
    cache = ScoreCache(capacity=120)
    for name in (b"a", b"b", b"c"):
        cache.remember(scores(9, 9), [name + b"0", name + b"1"], 4)
    again = scores(9, 9)
    fresh = PromptScores(9, 9)
    cache.recall(fresh, [b"a0"])
    assert fresh.num_known == 1
    cache.recall(fresh, [b"c0", b"c1"])
    assert fresh.num_known == 8
    assert [entry.token for entry in fresh.block(1, 4)] == [entry.token for entry in again.block(1, 4)]
    cache.remember(scores(0, 9), [b"d0", b"d1"], 4)  # 4 each: c stays, more or less
    fewer = PromptScores(9, 0)
    cache.recall(fewer, [b"c0", b"c1"])
    assert fewer.num_known == 8


def test_logprobs_do_not_depend_on_what_a_mate_asks_for(raw: EngineCore, generate: Any, drive: Any) -> None:
    alone = ask(generate, raw, logprobs=1, seed=3)
    raw.add_request("a", [0], SamplingParams(max_tokens=4, logprobs=1, seed=3))
    raw.add_request("b", [0], SamplingParams(max_tokens=9, logprobs=-1, top_k=2, presence_penalty=1.0))
    both = drive(raw)["a"].outputs[0]
    assert (both.token_ids, both.logprobs) == (alone.token_ids, alone.logprobs)
