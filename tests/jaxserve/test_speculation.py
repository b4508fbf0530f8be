"""Speculation through the engine: it changes how many tokens a step makes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxserve import LogitsProcessor, RequestOutputKind, Row, SamplingParams
from jaxserve.speculative.draft_model import DraftModelProposer
from models import MarkovLM
from tests.jaxserve.spelled import EOS, PADDED, SPELLED, SpelledTokenizer

V = 12
PROMPTS = [[1, 2], [3], [4, 5, 4, 5], [1], [7, 8, 9, 7, 8, 9, 7, 8]]
REQUESTS = [
    SamplingParams(temperature=0, max_tokens=30),
    SamplingParams(seed=1, max_tokens=25, logprobs=2),
    SamplingParams(seed=2, max_tokens=30, frequency_penalty=0.7, presence_penalty=-0.3, repetition_penalty=1.2),
    SamplingParams(seed=3, max_tokens=40, top_k=4, min_p=0.02, min_tokens=12, stop_token_ids=[2, 5]),
    SamplingParams(seed=4, max_tokens=30, top_p=0.9, logit_bias={3: 2.0, 7: -4.0}, bad_words=["bc", "d"]),
    SamplingParams(seed=5, max_tokens=30, thinking_token_budget=3, temperature=0.8),
    SamplingParams(seed=6, max_tokens=30, extra_args={"step": 5}),
    SamplingParams(temperature=0, max_tokens=30, allowed_token_ids=[1, 2, 3, 4, 6], frequency_penalty=2.0),
]


class Every(LogitsProcessor):
    """Every extra_args["step"]-th token is forced to be token 0."""

    arguments = ("step",)

    def row(self, params: SamplingParams) -> Any | None:
        step = (params.extra_args or {}).get("step")
        return None if step is None else np.int32(step)

    def empty_row(self) -> Any:
        return np.int32(0)

    def apply(self, logits: Any, row: Row) -> Any:
        forced = (row.output_len + 1) % jnp.maximum(row.params, 1) == 0
        return jnp.where(forced & (jnp.arange(logits.shape[0]) != 0), -jnp.inf, logits)


@pytest.fixture(scope="module")
def model(random_markov: Callable[..., MarkovLM]) -> MarkovLM:
    return random_markov(V, spread=2.5)


@pytest.fixture(scope="module")
def run(model: MarkovLM, letters: Any, make_engine: Callable[..., Any], drive: Any) -> Callable[..., Any]:
    def serve(
        speculation: dict[str, Any] | None, requests: list[SamplingParams] = REQUESTS, **config: Any
    ) -> tuple[dict[str, Any], Any]:
        reasoning = {"start": [9], "end": [10, 11]}
        engine = make_engine(
            model,
            letters,
            logits_processors=[Every],
            reasoning_config=reasoning,
            speculative_config=speculation,
            **config,
        )
        for i, params in enumerate(requests * 2):
            engine.add_request(str(i), PROMPTS[i % len(PROMPTS)], params)
        outputs = {name: output.outputs[0] for name, output in drive(engine).items()}
        assert engine.kv.pool.num_free == engine.kv.pool.num_usable
        return outputs, engine

    return serve


@pytest.fixture(scope="module")
def plain(run: Callable[..., Any]) -> dict[str, Any]:
    return run(None)[0]


def same_weights(config: Any, target: Any) -> DraftModelProposer:
    return DraftModelProposer(target.model, config.max_drafts, V, config.probabilistic)


def other_weights(config: Any, target: Any) -> DraftModelProposer:
    table = 2.5 * np.random.default_rng(9).standard_normal((V + 1, V, V))
    return DraftModelProposer(MarkovLM(table.astype(np.float32)), config.max_drafts, V, config.probabilistic)


PROPOSERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
    "same model": {"method": "custom", "proposer": same_weights},
    "other model": {"method": "custom", "proposer": other_weights},
}


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("name", PROPOSERS)
def test_the_tokens_are_those_without_speculation(run: Any, plain: Any, name: str, k: int) -> None:
    """Seeded and greedy, with every processor on: token for token, and log-probability for log-probability."""
    outputs, engine = run(PROPOSERS[name] | {"num_speculative_tokens": k})
    for i, output in outputs.items():
        expected = plain[i]
        assert output.token_ids == expected.token_ids, i
        assert (output.finish_reason, output.stop_reason) == (expected.finish_reason, expected.stop_reason)
        if expected.logprobs is not None:
            for ours, theirs in zip(output.logprobs, expected.logprobs, strict=True):
                assert {t: x.rank for t, x in ours.items()} == {t: x.rank for t, x in theirs.items()}
    found = engine.stats().speculation
    assert found.num_drafts > 0
    assert found.num_accepted_tokens > 0


@pytest.mark.parametrize("penalty", [-2.0, 0.0, 2.0])
def test_a_text_that_comes_again_and_again(make_engine: Any, drive: Any, penalty: float) -> None:
    """48 tokens of 60, repeated; a penalty of 2 soon forbids what the n-gram proposer goes on to draft."""
    table = np.random.default_rng(0).standard_normal((60, 60))
    table[range(48), [*range(1, 48), 0]] = 10
    params = SamplingParams(temperature=0, max_tokens=240, frequency_penalty=penalty)
    speculation = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 4}
    outputs = []
    for asked in (None, speculation):
        engine = make_engine(MarkovLM(table.astype(np.float32)), speculative_config=asked, max_model_len=400)
        engine.add_request("one", [*range(48)] * 3, params)
        outputs.append(drive(engine)["one"].outputs[0].token_ids)
    plain, drafted = outputs
    assert drafted == plain
    found = engine.stats().speculation
    if penalty > 0:
        assert plain != [*range(48)] * 5
        assert 0.0 < found.acceptance_rate < 1.0
    else:
        assert plain == [*range(48)] * 5
        assert found.acceptance_rate == 1.0


@pytest.mark.parametrize(("proposer", "low", "high"), [(same_weights, 1.0, 1.0), (other_weights, 0.0, 0.3)])
def test_acceptance_is_that_of_the_drafts(make_engine: Any, model: Any, drive: Any, proposer: Any, low: float,
                                          high: float) -> None:  # fmt: skip
    """A draft model with the target's weights is always right about a greedy request, another one rarely."""
    speculation = {"method": "custom", "proposer": proposer, "num_speculative_tokens": 3}
    engine = make_engine(model, speculative_config=speculation)
    engine.add_request("one", [1, 2, 3], SamplingParams(temperature=0, max_tokens=41))
    drive(engine)
    found = engine.stats().speculation
    assert low <= found.acceptance_rate <= high
    if low == 1.0:
        assert found.num_drafts == 10  # the first token, then ten windows of four


@pytest.mark.parametrize("name", ["ngram", "other model"])
def test_little_memory_and_little_budget_change_nothing(run: Any, plain: Any, name: str) -> None:
    """Preemption with drafts in flight, and steps that have no room for drafts."""
    speculation = PROPOSERS[name] | {"num_speculative_tokens": 3}
    outputs, engine = run(speculation, num_blocks=9, max_num_batched_tokens=30)
    assert engine.stats().scheduler.num_preemptions > 0
    assert {i: o.token_ids for i, o in outputs.items()} == {i: o.token_ids for i, o in plain.items()}


def drafts_of_steps(engine: Any, prompts: list[list[int]], drive: Any) -> list[tuple[int, int, int]]:
    """(requests that decode, requests that wait, K) of every step."""
    steps, start = [], engine.runner.start

    def watch(scheduled: Any) -> Any:
        if scheduled.decode:
            steps.append((len(scheduled.decode), engine.scheduler.num_waiting, scheduled.num_positions - 1))
        return start(scheduled)

    engine.runner.start = watch
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=10 + 5 * i, ignore_eos=True))
    drive(engine)
    return steps


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"disable_by_batch_size": 2}, {1: 3, 2: 3, 3: 0, 4: 0}),
        ({"num_speculative_tokens_per_batch_size": [(1, 1, 3), (2, 3, 1), (4, 8, 0)]}, {1: 3, 2: 1, 3: 1, 4: 0}),
    ],
)
def test_drafts_by_batch_size(
    make_engine: Any, model: Any, drive: Any, limits: dict[str, Any], expected: dict[int, int]
) -> None:
    """Requests of different lengths end one by one."""
    speculation = PROPOSERS["ngram"] | {"num_speculative_tokens": 3} | limits
    engine = make_engine(model, speculative_config=speculation)
    steps = {(n, k) for n, _, k in drafts_of_steps(engine, [[1, 2, 3, i] for i in range(4)], drive)}
    assert expected.items() <= steps
    for n, k in steps:  # one whose end is in flight counts, but decodes no more
        assert k in {expected[n], expected.get(n + 1)}


def test_whom_memory_keeps_waiting_counts_for_nothing(make_engine: Any, model: Any, drive: Any) -> None:
    """Two fit, six wait: K is that of two."""
    speculation = PROPOSERS["ngram"] | {"num_speculative_tokens": 3, "disable_by_batch_size": 2}
    engine = make_engine(model, speculative_config=speculation, num_blocks=7, max_model_len=48, watermark=0.0)
    steps = drafts_of_steps(engine, [[(i + j) % 12 for j in range(18)] for i in range(8)], drive)
    found = [k for n, waiting, k in steps if n <= 2 and waiting]
    assert found.count(3) > 0.7 * len(found) > 7


@pytest.mark.parametrize("name", ["ngram", "other model"])
def test_automatic_drafts_change_nothing(run: Any, plain: Any, name: str) -> None:
    outputs, engine = run(PROPOSERS[name] | {"num_speculative_tokens": "auto"})
    assert {i: o.token_ids for i, o in outputs.items()} == {i: o.token_ids for i, o in plain.items()}
    assert engine.stats().speculation.num_drafts > 0


def test_nothing_is_compiled_after_warm_up(run: Any, plain: Any, model: Any, letters: Any, make_engine: Any, drive: Any,
                                           compilations: list[str]) -> None:  # fmt: skip
    schedule = [(1, 2, 3), (3, 5, 1), (6, 8, 0)]
    speculation = PROPOSERS["ngram"] | {
        "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": schedule,
    }  # fmt: skip
    engine = make_engine(model, letters, logits_processors=[Every], reasoning_config={"start": [9], "end": [10, 11]},
                         speculative_config=speculation, max_model_len=64)  # fmt: skip
    engine.warmup(progress=False)
    del compilations[:]
    for i, params in enumerate(REQUESTS):
        engine.add_request(str(i), PROMPTS[i % len(PROMPTS)], params)
    outputs = {name: output.outputs[0].token_ids for name, output in drive(engine).items()}
    assert outputs == {i: plain[i].token_ids for i in outputs}
    assert compilations == []
    assert engine.num_compilations == 0


def judged(method: str, table: np.ndarray, k: int) -> dict[str, Any]:
    """k drafts of a MarkovLM with this table, drawn unless the method is coupled."""

    def proposer(config: Any, target: Any) -> DraftModelProposer:
        return DraftModelProposer(MarkovLM(table), config.max_drafts, table.shape[-1], config.probabilistic)

    return {
        "method": "custom", "proposer": proposer, "num_speculative_tokens": k, "rejection_sample_method": method,
        "draft_sample_method": "greedy" if method == "coupled" else "probabilistic",
    }  # fmt: skip


@pytest.mark.parametrize(("method", "temperature"), [("standard", 1.0), ("block", 0.6), ("coupled", 1.0)])
def test_the_joint_distribution_is_the_targets(
    make_engine: Any, drive: Any, exact_distribution: Any, method: str, temperature: float
) -> None:
    """All strings of three tokens after a prompt, over many requests, with drafts drawn from another distribution."""
    vocab, length, count = 4, 3, 16_000
    random = np.random.default_rng(3)
    table, draft_table = (1.2 * random.standard_normal((2, vocab, vocab))).astype(np.float32)

    engine = make_engine(
        MarkovLM(table), max_num_seqs=64, max_model_len=32,
        speculative_config=judged(method, draft_table, 3),
    )  # fmt: skip
    kind = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(temperature=temperature, top_k=3, n=count, seed=11, max_tokens=length, output_kind=kind)
    engine.add_request("many", [1], params)
    counts = np.zeros((vocab,) * length)
    for output in drive(engine, max_steps=100_000)["many"].outputs:
        counts[tuple(output.token_ids)] += 1
    after = np.stack([exact_distribution(row, temperature, top_k=3) for row in table])
    exact = np.einsum("a,ab,bc->abc", after[1], after, after)
    assert counts[exact == 0].sum() == 0
    assert counts.sum() == count
    p = stats.chisquare(counts[exact > 0], count * exact[exact > 0]).pvalue
    assert p > 1e-4, p
    assert engine.stats().speculation.num_accepted_tokens > count * 0.1


@pytest.mark.parametrize("method", ["coupled", "standard", "block"])
def test_the_joint_distribution_with_processors(
    make_engine: Any, drive: Any, letters: Any, exact_distribution: Any, method: str
) -> None:
    """What a draft does to the rows behind it counts: penalties of what it repeats, bad words that it begins."""
    vocab, count = 5, 8_000
    table, draft_table = np.random.default_rng(5).standard_normal((2, vocab, vocab)).astype(np.float32)

    engine = make_engine(
        MarkovLM(table), letters, max_num_seqs=64, max_model_len=32, logits_processors=[Every],
        speculative_config=judged(method, draft_table, 3),
    )  # fmt: skip
    filters = {"temperature": 1.3, "min_p": 0.05, "top_p": 0.95}
    params = SamplingParams(
        n=count, seed=13, max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY, frequency_penalty=1.5,
        presence_penalty=0.7, logit_bias={3: 0.8}, bad_words=["c", "bd"], extra_args={"step": 4}, **filters,
    )  # fmt: skip
    engine.add_request("many", [1], params)
    counts = np.zeros((vocab,) * 3)
    for output in drive(engine, max_steps=100_000)["many"].outputs:
        assert output.token_ids[3] == 0  # the custom processor's
        counts[tuple(output.token_ids[:3])] += 1

    def after(said: tuple[int, ...]) -> np.ndarray:
        logits = table[(1, *said)[-1]].astype(np.float64)
        said_times = np.bincount(said, minlength=vocab)
        logits = logits - 1.5 * said_times - 0.7 * (said_times > 0) + 0.8 * (np.arange(vocab) == 3)
        logits[[2, 3] if said[-1:] == (1,) else [2]] = -np.inf
        return exact_distribution(logits, **filters)

    exact = np.zeros_like(counts)
    for a, b in np.ndindex(vocab, vocab):
        exact[a, b] = after(())[a] * after((a,))[b] * after((a, b))
    assert counts[exact == 0].sum() == 0
    p = stats.chisquare(counts[exact > 0], count * exact[exact > 0]).pvalue
    assert p > 1e-4, p
    assert engine.stats().speculation.num_accepted_tokens > count * 0.3


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("name", ["ngram", "other model"])
def test_greedy_requests_say_the_same_by_every_method(run: Any, name: str, method: str) -> None:
    """With every processor on."""
    greedy = [replace(params, temperature=0) for params in REQUESTS]
    drawn = {"draft_sample_method": "probabilistic"} if name == "other model" else {}
    speculation = PROPOSERS[name] | {"num_speculative_tokens": 3, "rejection_sample_method": method} | drawn
    (expected, _), (outputs, engine) = run(None, greedy), run(speculation, greedy)
    assert {i: o.token_ids for i, o in outputs.items()} == {i: o.token_ids for i, o in expected.items()}
    assert engine.stats().speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("backend", ["table", "llguidance"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_the_joint_distribution_under_a_grammar(make_engine: Any, drive: Any, method: str, backend: str) -> None:
    """Drafts that are drawn without regard to the grammar, half of which are illegal."""
    count, legal = 2_000, [SPELLED.index(c) for c in "wxyz"]
    random = np.random.default_rng(4)
    table, draft_table = (1.2 * random.standard_normal((2, PADDED, PADDED))).astype(np.float32)
    draft_table[:, [*legal, *range(4)]] += 5

    engine = make_engine(
        MarkovLM(table, eos_token_ids=(EOS,)), SpelledTokenizer(), max_num_seqs=32, max_model_len=32,
        speculative_config=judged(method, draft_table, 2),
    )  # fmt: skip
    params = SamplingParams(
        n=count, seed=12, max_tokens=8, output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs={"regex": "[wxyz]{3}", "backend": backend},
    )  # fmt: skip
    engine.add_request("many", [1], params)
    counts = np.zeros((len(legal),) * 3)
    for output in drive(engine, max_steps=100_000)["many"].outputs:
        counts[tuple(legal.index(token) for token in output.token_ids[:3])] += 1
    weights = np.exp(table[:, legal].astype(np.float64))
    after = weights / weights.sum(1, keepdims=True)
    exact = np.einsum("a,ab,bc->abc", after[1], after[legal], after[legal])
    assert counts.sum() == count
    p = stats.chisquare(counts.ravel(), count * exact.ravel()).pvalue
    assert p > 1e-4, p
    found = engine.stats().speculation
    assert count * 0.1 < found.num_accepted_tokens < found.num_draft_tokens * 0.8


def test_synthetic_acceptance_has_the_rates_asked_for(make_engine: Any, random_markov: Any, drive: Any) -> None:
    rates = [0.8, 0.4, 0.1]
    engine = make_engine(
        random_markov(V, spread=0.3), max_num_seqs=32,
        speculative_config={
            "method": "custom", "proposer": other_weights, "num_speculative_tokens": 3,
            "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates,
        },
    )  # fmt: skip
    engine.add_request("many", [1], SamplingParams(n=64, seed=1, max_tokens=100))
    drive(engine)
    found = engine.stats().speculation
    np.testing.assert_allclose(found.acceptance_rate_per_pos, rates, atol=0.04)
