"""Random schemas, expressions and grammars through the whole engine, with flat logits and drafts of every kind: what
ends is valid, and what is cut is a legal beginning."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np
import pytest

import models
from jaxserve import EngineCore, RequestOutput, SamplingParams
from jaxserve.speculative.draft_model import DraftModelProposer
from jaxserve.structured.compiler import GrammarCompiler
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.matcher import Matcher, new_matcher
from jaxserve.structured.params import StructuredOutputsParams
from tests.jaxserve import spelled
from tests.jaxserve.spelled import SpelledTokenizer
from tests.structured.schemas import random_schema, with_definitions
from tests.structured.test_dfa import random_regex

MakeEngine = Callable[..., EngineCore]
Drive = Callable[..., dict[str, RequestOutput]]
# All of ASCII that JSON holds, and the pieces of `spelled`: no grammar leads to where no token can follow.
SPELLED = list(dict.fromkeys([*map(chr, range(32, 127)), "\n", "\t", *spelled.SPELLED[:-2]]))
EOS, EOT, PADDED = len(SPELLED), len(SPELLED) + 1, 128
STOPS = frozenset({EOS, EOT})
TIMEOUT = 120
ENDINGS = [SPELLED.index(text) for text in ('"', "}", "]", '"}')]


def flat_model(seed: int) -> models.MarkovLM:
    """Hardly prefers any token, but what closes a text to what does not, so that texts end."""
    table = 0.7 * np.random.default_rng(seed).standard_normal((PADDED, PADDED)).astype(np.float32)
    table[:, ENDINGS] += 2.5
    table[:, list(STOPS)] += 3
    return models.MarkovLM(table, eos_token_ids=(EOS, EOT))


def draft_model(config: Any, target: Any) -> DraftModelProposer:
    return DraftModelProposer(flat_model(1), config.max_drafts, PADDED, config.probabilistic)


@dataclass
class Asked:
    """A request's grammar, whether a whole text is right, and what follows a text."""

    params: StructuredOutputsParams
    is_valid: Callable[[str], bool]
    matcher: Callable[[], Matcher]


def asked_schemas(rng: random.Random) -> list[tuple[StructuredOutputsParams, Callable[[str], bool]]]:
    found: list[tuple[StructuredOutputsParams, Callable[[str], bool]]] = []
    for index in range(100):
        schema = with_definitions(rng, random_schema(rng, 2))
        validator = jsonschema.Draft202012Validator(schema)
        backend = "llguidance" if index % 3 == 0 else "auto"
        params = StructuredOutputsParams(json=schema, backend=backend)
        found.append((params, lambda text, validator=validator: validator.is_valid(json.loads(text))))
    return found


def asked_regexes(rng: random.Random) -> list[tuple[StructuredOutputsParams, Callable[[str], bool]]]:
    found: list[tuple[StructuredOutputsParams, Callable[[str], bool]]] = []
    for index in range(40):
        regex = f"(?:{random_regex(rng, 2)})" + "[ab]{0,3}[0-9]?"
        backend = "llguidance" if index % 3 == 0 else "auto"
        params = StructuredOutputsParams(regex=regex, backend=backend)
        found.append((params, lambda text, regex=regex: re.fullmatch(regex, text) is not None))
    return found


def is_nested(text: str) -> bool:
    depth = text.count("(")
    return text == "(" * depth + "x" + ")" * depth


def is_sum(text: str) -> bool:
    return re.fullmatch(r"[0-9()+]+", text) is not None and isinstance(eval(text.replace("0", "9")), int)


GRAMMARS: list[tuple[str, Callable[[str], bool]]] = [
    ('root ::= "(" root ")" | "x"', is_nested),
    ('start: "(" start ")" | "x"', is_nested),
    ('root ::= term ("+" term){0,3}\nterm ::= [1-9] | "(" root ")"', is_sum),
    ('start: a\na: "foo" a "bar" | "=" a "=" | "12"', lambda text: "12" in text),
]


@pytest.fixture(scope="module")
def asked() -> dict[str, Asked]:
    """Those that compile; their compiled grammars follow the outputs."""
    compiler, rng = GrammarCompiler(SpelledTokenizer(SPELLED), PADDED), random.Random(0)
    cases = [*asked_schemas(rng), *asked_regexes(rng)]
    texts = [params.key().text for params, _ in cases]
    cases = [case for case, text in zip(cases, texts, strict=True) if text.isascii() and "\\u00" not in text]
    cases += [(StructuredOutputsParams(grammar=grammar), check) for grammar, check in GRAMMARS for _ in range(3)]
    futures = [compiler.submit(params, STOPS) for params, _ in cases]
    made: dict[str, Asked] = {}
    for index, ((params, check), future) in enumerate(zip(cases, futures, strict=True)):
        with contextlib.suppress(GrammarError):
            grammar = future.result(TIMEOUT)
            made[str(index)] = Asked(params, check, lambda grammar=grammar: new_matcher(grammar))
    compiler.shutdown()
    assert len(made) > 75
    return made


DRAWN = {"draft_sample_method": "probabilistic", "rejection_sample_method": "standard"}
CUSTOM = {"method": "custom", "proposer": draft_model, "num_speculative_tokens": 3}
LITTLE = {"num_blocks": 9, "watermark": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"structured_outputs_config": {"num_forced_tokens": 0}},
    "forced": {"structured_outputs_config": {"num_forced_tokens": 3}},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
    "draft model": {"speculative_config": CUSTOM},
    "drawn drafts": {"speculative_config": CUSTOM | DRAWN},
    "preempted, ngram": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}, **LITTLE
    },
    "preempted, draft model": {"speculative_config": CUSTOM, **LITTLE},
}  # fmt: skip


@pytest.fixture(scope="module")
def served(make_engine: MakeEngine, drive: Drive, asked: dict[str, Asked]) -> Callable[[str], dict[str, Any]]:
    done: dict[str, dict[str, Any]] = {}

    def get(setting: str) -> dict[str, Any]:
        if setting not in done:
            engine = make_engine(flat_model(0), SpelledTokenizer(SPELLED), max_num_seqs=8, **SETTINGS[setting])
            for name, one in asked.items():
                params = SamplingParams(max_tokens=70, seed=int(name), structured_outputs=one.params)
                engine.add_request(name, [int(name) % 26, 5], params)
            done[setting] = {name: output.outputs[0] for name, output in drive(engine).items()}
            stats = engine.stats()
            assert stats.grammar_violations == 0
            assert bool(stats.scheduler.num_preemptions) == setting.startswith("preempted")
            if "speculative_config" in SETTINGS[setting]:
                assert stats.speculation.num_accepted_tokens > 0
            engine.shutdown()
        return done[setting]

    return get


@pytest.mark.parametrize("setting", SETTINGS)
def test_outputs_are_valid_or_a_beginning(
    served: Callable[[str], dict[str, Any]], asked: dict[str, Asked], setting: str
) -> None:
    ended = 0
    for name, output in served(setting).items():
        assert output.error is None, (asked[name].params, output.error)
        matcher = asked[name].matcher()
        matcher.accept(output.token_ids)  # raises where it is illegal
        text = "".join(SPELLED[t] for t in output.token_ids if t not in STOPS)
        if output.finish_reason == "stop":
            ended += 1
            assert asked[name].is_valid(text), (asked[name].params, text)
            assert matcher.is_done or matcher.exhausted
        else:
            assert output.finish_reason == "length"
    assert ended > 0.6 * len(asked)


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s not in ("none", "drawn drafts")])
def test_the_tokens_are_those_without_drafts(served: Callable[[str], dict[str, Any]], setting: str) -> None:
    expected = {name: output.token_ids for name, output in served("none").items()}
    assert {name: output.token_ids for name, output in served(setting).items()} == expected


def test_tables_send_no_masks(make_engine: MakeEngine, drive: Drive) -> None:
    """Also with drafts, and beside requests that are free; one request of a matcher does."""
    engine = make_engine(flat_model(0), SpelledTokenizer(SPELLED), max_num_seqs=4, **SETTINGS["ngram"])
    for index in range(6):
        held = {"regex": "[a-f]{3,9}(foo|bar)*"} if index % 3 else None
        engine.add_request(str(index), [index, 5], SamplingParams(seed=index, max_tokens=20, structured_outputs=held))
    drive(engine)
    assert engine.stats().mask_bytes == 0
    engine.add_request("matcher", [1, 5], SamplingParams(max_tokens=20, structured_outputs={"json_object": True}))
    drive(engine)
    assert engine.stats().mask_bytes > 0
    engine.shutdown()
