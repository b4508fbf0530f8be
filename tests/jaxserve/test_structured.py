"""Structured output through the whole engine: whoever masks and whatever is drafted, the same legal tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

import models
from jaxserve import EngineCore, RequestOutput, SamplingParams, StructuredOutputsParams
from jaxserve.speculative.draft_model import DraftModelProposer
from tests.jaxserve.spelled import SpelledTokenizer, spelled_model

MakeEngine = Callable[..., EngineCore]
Drive = Callable[..., dict[str, RequestOutput]]
Generate = Callable[..., RequestOutput]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["foo", "foobar", "bar"]}, "n": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name"],
    "additionalProperties": False,
}
MULTIPLE = {"type": "array", "items": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 98}, "maxItems": 3}
LARK = 'start: "foo" tail\ntail: "bar" | "(" tail ")"'
REGEX = r"(foo|foobar)-[0-9]{1,3}(ab|abc)*"
CHOICES = ["foo", "foobar", "true", "null bar"]
ASKED: dict[str, dict[str, Any]] = {
    "choice": {"choice": CHOICES},
    "regex": {"regex": REGEX},
    "json": {"json": SCHEMA},
    "multiple": {"json": MULTIPLE},
    "lark": {"grammar": LARK},
    "object": {"json_object": True},
}
TABLES = ("choice", "regex", "json")


def is_valid(name: str, text: str) -> bool:
    if name == "choice":
        return text in CHOICES
    if name == "regex":
        return re.fullmatch(REGEX, text) is not None
    if name == "lark":
        return re.fullmatch(r"foo(\()*bar(\))*", text) is not None and text.count("(") == text.count(")")
    value = json.loads(text)
    if name == "object":
        return isinstance(value, dict)
    jsonschema.validate(value, SCHEMA if name == "json" else MULTIPLE)
    return True


@pytest.fixture(scope="module")
def tokenizer() -> SpelledTokenizer:
    return SpelledTokenizer()


@pytest.fixture(scope="module")
def model() -> models.MarkovLM:
    return spelled_model()


def params_of(name: str, seed: int, backend: str = "auto", **fields: Any) -> SamplingParams:
    options = {"backend": backend} if backend == "llguidance" or name in TABLES else {}
    asked = StructuredOutputsParams(**ASKED[name], **options) if name in ASKED else None
    defaults = {"max_tokens": 60, "seed": seed, "temperature": 1.0 if seed % 3 else 0.0}
    return SamplingParams(structured_outputs=asked, **(defaults | fields))


def traffic(backend: str = "auto") -> dict[str, SamplingParams]:
    """Every kind, greedy and seeded, beside a request without a grammar and with everything else there is."""
    asked = {f"{name}{seed}": params_of(name, seed, backend) for name in [*ASKED, "free"] for seed in range(3)}
    everything = {
        "logit_bias": {0: -3.0, 3: 2.0},
        "bad_words": ["12"],
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
        "min_tokens": 4,
        "min_p": 0.01,
        "top_p": 0.95,
        "logprobs": 2,
    }
    return asked | {f"{name}9": params_of(name, 10, backend, **everything) for name in ("regex", "json", "multiple")}


def serve(engine: EngineCore, drive: Drive, asked: dict[str, SamplingParams]) -> dict[str, RequestOutput]:
    for name, params in asked.items():
        engine.add_request(name, [len(name), 5], params)
    return drive(engine)


NO_DRAFTS = {"structured_outputs_config": {"num_forced_tokens": 0}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": NO_DRAFTS,
    "matchers": NO_DRAFTS,
    "forced": {"structured_outputs_config": {"num_forced_tokens": 3}},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
    "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
    "no room": {"structured_outputs_config": {"num_forced_tokens": 0, "pool_bytes": 2 << 16}},
    "preempted": {"num_blocks": 9, **NO_DRAFTS, "watermark": 0.0},
    "preempted, forced": {"num_blocks": 9, "structured_outputs_config": {"num_forced_tokens": 3}, "watermark": 0.0},
    "preempted, suffix": {
        "num_blocks": 9,
        "speculative_config": {"method": "suffix", "num_speculative_tokens": 3},
        "watermark": 0.0,
    },
}


@pytest.fixture(scope="module")
def served(
    make_engine: MakeEngine, drive: Drive, model: models.MarkovLM, tokenizer: SpelledTokenizer
) -> Callable[[str], dict[str, RequestOutput]]:
    """The traffic under a setting, once."""
    done: dict[str, dict[str, RequestOutput]] = {}

    def get(setting: str) -> dict[str, RequestOutput]:
        if setting not in done:
            engine = make_engine(model, tokenizer, max_num_seqs=4, max_model_len=64, **SETTINGS[setting])
            done[setting] = serve(engine, drive, traffic("llguidance" if setting == "matchers" else "auto"))
            stats = engine.stats()
            assert not stats.grammar_violations
            assert stats.scheduler.kv_usage == 0
            assert bool(stats.scheduler.num_preemptions) == setting.startswith("preempted")
            engine.shutdown()
        return done[setting]

    return get


def test_outputs_are_valid(served: Callable[[str], dict[str, RequestOutput]]) -> None:
    ended = 0
    for name, output in served("plain").items():
        (got,) = output.outputs
        assert got.error is None
        if name.startswith("free"):
            continue
        assert got.finish_reason in ("stop", "length")
        if got.finish_reason == "stop":
            ended += 1
            assert is_valid(name.rstrip("0123456789"), got.text), (name, got.text)
    assert ended > 15


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s != "plain"])
def test_same_tokens_however_they_come_about(setting: str, served: Callable[[str], dict[str, RequestOutput]]) -> None:
    expected, got = served("plain"), served(setting)
    for name, output in expected.items():
        a, b = output.outputs[0], got[name].outputs[0]
        assert (name, a.token_ids, a.finish_reason) == (name, b.token_ids, b.finish_reason)


def test_what_is_forced_takes_fewer_steps(
    make_engine: MakeEngine, drive: Drive, model: models.MarkovLM, tokenizer: SpelledTokenizer
) -> None:
    """No two tokens of this vocabulary spell the same part of the text: every token is forced."""
    asked = {"r": SamplingParams(max_tokens=60, structured_outputs={"regex": "(zxwvu){6}"})}
    steps = []
    for count in (0, 4):
        engine = make_engine(
            model, tokenizer, max_num_seqs=1, max_model_len=64, structured_outputs_config={"num_forced_tokens": count}
        )
        assert serve(engine, drive, asked)["r"].outputs[0].text == 6 * "zxwvu"
        steps.append(engine.stats().num_steps)
    assert steps[0] >= 30
    assert steps[1] < 0.5 * steps[0]


@pytest.mark.parametrize("backend", ["auto", "llguidance"])
def test_a_draft_model_has_kv_of_what_was_forced(
    make_engine: MakeEngine, model: models.MarkovLM, tokenizer: SpelledTokenizer, backend: str
) -> None:
    """A draft model with the target's weights has the target's KV, page for page, though it never drafts these texts:
    pages are shared with later requests."""

    def drafts(config: Any, target: Any) -> DraftModelProposer:
        return DraftModelProposer(target.model, config.max_drafts, target.model.vocab_size)

    speculation = {"method": "custom", "proposer": drafts, "num_speculative_tokens": 3}
    engine = make_engine(model, tokenizer, max_num_seqs=2, max_model_len=64, speculative_config=speculation)
    engine.warmup(progress=False)
    engine.add_request("free", [5], SamplingParams(max_tokens=5))
    while engine.has_unfinished():
        engine.step()
    for i, regex in enumerate(["(zxwvu){6}", "(zx|y)(wvu[a-c]{3}){6}"]):
        asked = StructuredOutputsParams(regex=regex, backend=backend)
        engine.add_request(str(i), [5, 6, 7 + i], SamplingParams(seed=i, max_tokens=40, structured_outputs=asked))
    longest: dict[str, tuple[list[int], int]] = {}
    while engine.has_unfinished():
        for request in engine.scheduler.running:
            longest[request.request_id] = engine.kv.block_ids(request), request.num_computed_tokens
        engine.step()
    assert engine.stats().tokens > 1.5 * engine.stats().num_steps  # some were forced
    assert engine.num_compilations == 0
    target, draft = (np.asarray(kv) for kv in (engine.runner.cache.kv, engine.runner.cache.draft_kv))
    for blocks, length in longest.values():
        assert length > 20
        assert draft[blocks].ravel()[:length].tolist() == target[blocks].ravel()[:length].tolist()
