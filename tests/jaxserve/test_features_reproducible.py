"""A seeded request gives its tokens, whatever else happens: neighbours, slots, preemption, devices. And nothing is
compiled for any of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import models
from jaxserve import EngineCore, LogitsProcessor, ReasoningConfig, Row, SamplingParams

V = 26
PROMPT = [1, 2, 3]


class Cool(LogitsProcessor):
    """Scales a request's logits: extra_args cool."""

    argmax_invariant = True
    arguments = ("cool",)

    def row(self, params: SamplingParams) -> Any | None:
        value = (params.extra_args or {}).get("cool")
        return None if value is None else np.float32(value)

    def empty_row(self) -> Any:
        return np.float32(1)

    def apply(self, logits: Any, row: Row) -> Any:
        return logits * row.params


CONFIG = {
    "logits_processors": [Cool],
    "reasoning_config": ReasoningConfig(start=[7], end=[8, 9]),
    "max_model_len": 64,
    "max_logprobs": 5,
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "filters": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "greedy penalties": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    "bias": {"logit_bias": {3: 2.0, 5: -100}},
    "allowed": {"allowed_token_ids": list(range(0, V, 2)), "top_p": 0.95},
    "bad words": {"bad_words": ["a", "bc", "cde"]},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": [4, 5, 6, 11]},
    "thinking": {"thinking_token_budget": 2},
    "custom": {"extra_args": {"cool": 0.5}, "top_k": 9},
    "logprobs": {"logprobs": 3, "logprob_token_ids": [1, 2]},
}
FEATURES["everything"] = {
    name: value for settings in FEATURES.values() for name, value in settings.items() if name != "temperature"
}


def request(name: str, seed: int = 11, **changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 20, "seed": seed} | FEATURES[name] | changes))


def outcome(output: Any) -> tuple[Any, ...]:
    """Everything about a sequence that may not depend on others, without the last bits of floats."""
    done = output.outputs[0]
    rounded = None
    if done.logprobs is not None:
        rounded = [{i: (round(x.logprob, 3), x.rank) for i, x in found.items()} for found in done.logprobs]
    return tuple(done.token_ids), done.finish_reason, done.stop_reason, rounded


@pytest.fixture(scope="module")
def model(random_markov: Any) -> models.MarkovLM:
    return random_markov(V, eos_token_ids=(25,))


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., EngineCore], model: Any, spelled: Any) -> EngineCore:
    return make_engine(model, spelled, max_num_seqs=64, **CONFIG)


@pytest.fixture(scope="module")
def alone(engine: EngineCore, generate: Any) -> dict[str, Any]:
    """What each kind of request gives with nobody else in the engine."""
    return {name: outcome(generate(engine, PROMPT, request(name))) for name in FEATURES}


def test_the_features_matter(alone: dict[str, Any]) -> None:
    """Or the tests below would compare equal things."""
    assert len({tokens for tokens, *_ in alone.values()}) >= len(FEATURES) - 2
    assert all(len(tokens) > 1 for tokens, *_ in alone.values())


def test_again_after_others_used_the_slot(engine: EngineCore, generate: Any, alone: dict[str, Any]) -> None:
    for name in FEATURES:
        assert outcome(generate(engine, PROMPT, request(name))) == alone[name]


@pytest.mark.parametrize("shuffle", [0, 1])
def test_in_a_full_batch_of_all_features(engine: EngineCore, drive: Any, alone: dict[str, Any], shuffle: int) -> None:
    """64 at once, in any order, of other lengths: each kind in many slots, which move as neighbours end."""
    rng = np.random.default_rng(shuffle)
    names = [name for name in FEATURES for _ in range(6)]  # more than there are slots
    for number in rng.permutation(len(names)):
        name = names[number]
        if number % 2:  # a stranger with the same features
            params = request(name, seed=int(number), max_tokens=int(rng.integers(1, 40)), min_tokens=0)
            engine.add_request(f"stranger {number}", rng.integers(0, V, 1 + number % 9).tolist(), params)
        else:
            engine.add_request(f"{name}/{number}", PROMPT, request(name))
    done = drive(engine)
    ours = {key: outcome(output) for key, output in done.items() if "/" in key}
    assert len(ours) == len(names) // 2
    for key, found in ours.items():
        assert found == alone[key.split("/")[0]], key


def test_an_unseeded_neighbour_and_an_old_slot_change_nothing(engine: EngineCore, drive: Any) -> None:
    """Ten requests of one seed, then another in a freed slot: as on its own."""

    def run(*params: SamplingParams) -> list[Any]:
        for i, p in enumerate(params):
            engine.add_request(str(i), PROMPT, p)
        done = drive(engine)
        return [outcome(done[str(i)]) for i in range(len(params))]

    (first,) = run(request("plain", seed=0))
    assert len(set(map(str, run(*[request("plain", seed=30)] * 10)))) == 1
    assert run(request("plain", seed=0)) == [first]
    unseeded = SamplingParams(max_tokens=20)
    assert {str(run(request("plain", seed=0), unseeded)[0]) for _ in range(3)} == {str(first)}
    assert run(unseeded) != run(unseeded), "requests without a seed are not all the same"


def test_after_preemption(make_engine: Any, model: Any, spelled: Any, drive: Any, alone: dict[str, Any]) -> None:
    """A pool for two of the requests serves thirteen: counts, sections, slots and positions come back as they were."""
    engine = make_engine(model, spelled, max_num_seqs=8, num_blocks=9, block_size=4, **CONFIG)
    for name in FEATURES:
        engine.add_request(name, PROMPT, request(name))
    done = drive(engine)
    assert engine.scheduler.stats().num_preemptions > 3
    assert {name: outcome(output) for name, output in done.items()} == alone


def test_children_are_distinct_and_reproducible(engine: EngineCore, drive: Any, alone: dict[str, Any]) -> None:
    def children(n: int, others: int, **keywords: Any) -> list[tuple[int, ...]]:
        for i in range(others):
            engine.add_request(f"other {i}", [i], request("penalties", seed=i))
        engine.add_request("parent", PROMPT, request("plain", n=n, **keywords))
        outputs = drive(engine)["parent"].outputs
        assert [output.index for output in outputs] == list(range(n))
        return [tuple(output.token_ids) for output in outputs]

    four = children(4, 0)
    assert len(set(four)) == 4
    assert children(4, 5) == four
    assert children(6, 0)[:4] == four
    assert four[0] == alone["plain"][0], "the first is the request without n"
    assert not set(children(4, 0, seed=12)) & set(four)


def test_equal_and_different_seeds(engine: EngineCore, drive: Any) -> None:
    """All 64 bits count."""
    seeds = [0, 1, -2, 2**31, 2**32, 2**32 + 1, 2**63 - 1, -(2**63), 1 << 40]
    for seed in seeds:
        for copy in "ab":
            engine.add_request(f"{seed}{copy}", PROMPT, request("plain", seed=seed, ignore_eos=True))
    done = {key: output.outputs[0].token_ids for key, output in drive(engine).items()}
    assert all(done[f"{seed}a"] == done[f"{seed}b"] for seed in seeds)
    assert len({tuple(tokens) for tokens in done.values()}) == len(seeds)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("devices", [2, 8])
def test_on_several_devices(
    make_engine: Any, model: Any, spelled: Any, drive: Any, alone: dict[str, Any], devices: int
) -> None:
    """Slots are dealt out over the devices, and move between them as requests of many lengths end."""
    engine = make_engine(model, spelled, max_num_seqs=8, tensor_parallel_size=devices, **CONFIG)
    for number, name in enumerate(FEATURES):
        engine.add_request(f"short {number}", [number], request("penalties", seed=number, max_tokens=1 + number % 7))
        engine.add_request(name, PROMPT, request(name))
    done = drive(engine)
    assert {name: outcome(done[name]) for name in FEATURES} == alone


def test_nothing_is_compiled_after_warm_up(
    make_engine: Any, model: Any, spelled: Any, drive: Any, alone: dict[str, Any], compilations: list[str]
) -> None:
    engine = make_engine(model, spelled, max_num_seqs=4, num_blocks=9, max_num_batched_tokens=36, **CONFIG)
    engine.warmup(progress=False)
    compilations.clear()
    for name in FEATURES:
        engine.add_request(name, PROMPT, request(name))
    engine.add_request("scored", PROMPT * 5, SamplingParams(prompt_logprobs=2, n=3, max_tokens=4))
    done = drive(engine)
    assert compilations == []
    assert engine.num_compilations == 0
    assert {name: outcome(done[name]) for name in FEATURES} == alone
