"""What becomes of requests with grammars: thinking first, ending, failing, being refused; and what others see of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from jaxserve import EngineCore, ReasoningConfig, RequestOutput, SamplingParams, StructuredOutputsConfig
from jaxserve.structured.constraint import Constraint
from jaxserve.structured.errors import GrammarError
from tests.jaxserve.spelled import END, EOS, EOT, PADDED, SPELLED, THINK, SpelledTokenizer, spelled_model

MakeEngine = Callable[..., EngineCore]
Drive = Callable[..., dict[str, RequestOutput]]
Generate = Callable[..., RequestOutput]

CONST = {"const": {"name": "foo", "n": 12}}
TEXT = '{"name":"foo","n":12}'
REGEX = "(foo|bar)+x"
LARK = 'start: ("foo" | "bar")+ "x"'  # the same language, which only a matcher takes
KINDS: dict[str, dict[str, Any]] = {"table": {"regex": REGEX}, "matcher": {"grammar": LARK}}


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> EngineCore:
    """With thinking sections, and forced tokens."""
    return make_engine(spelled_model(), SpelledTokenizer(), max_num_seqs=2, reasoning_config="qwen3")


@pytest.fixture(scope="module")
def plain(make_engine: MakeEngine) -> EngineCore:
    return make_engine(spelled_model(), SpelledTokenizer(), max_num_seqs=2)


def outlines(text: str) -> str:
    return text.replace(" ", "")


# ---- thinking


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [0, 5])
def test_grammar_begins_when_thinking_ends(engine: EngineCore, generate: Generate, kind: str, budget: int) -> None:
    for seed in range(4):
        params = SamplingParams(
            seed=seed,
            max_tokens=60,
            thinking_token_budget=budget,
            structured_outputs=KINDS[kind],
            logit_bias={END: -99, EOS: -99, EOT: -99},
        )
        output = generate(engine, [3, THINK], params).outputs[0]
        assert output.token_ids.index(END) == budget
        text = "".join(SPELLED[t] for t in output.token_ids[budget + 1 :] if t not in (EOS, EOT))
        assert output.finish_reason == "stop"
        assert text.endswith("x")
        assert not text[:-1].replace("foo", "").replace("bar", "")


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_that_is_done_thinking_is_held_at_once(engine: EngineCore, generate: Generate, kind: str) -> None:
    params = SamplingParams(seed=1, max_tokens=60, structured_outputs=KINDS[kind])
    output = generate(engine, [THINK, 3, END, 4], params).outputs[0]
    assert output.text[:3] in ("foo", "bar")
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_end_of_thinking_nothing_is_held(engine: EngineCore, generate: Generate, kind: str) -> None:
    free = SamplingParams(seed=2, max_tokens=20, logit_bias={END: -99}, ignore_eos=True)
    held = SamplingParams(seed=2, max_tokens=20, logit_bias={END: -99}, ignore_eos=True, structured_outputs=KINDS[kind])
    assert (
        generate(engine, [3, THINK], held).outputs[0].token_ids
        == generate(engine, [3, THINK], free).outputs[0].token_ids
    )


def test_enable_in_reasoning(make_engine: MakeEngine, generate: Generate) -> None:
    engine = make_engine(
        spelled_model(),
        SpelledTokenizer(),
        max_num_seqs=2,
        reasoning_config=ReasoningConfig(start=[THINK], end=[END]),
        structured_outputs_config=StructuredOutputsConfig(enable_in_reasoning=True, num_forced_tokens=0),
    )
    for kind in KINDS.values():
        params = SamplingParams(seed=3, max_tokens=60, structured_outputs=kind)
        assert generate(engine, [3, THINK], params).outputs[0].text[:3] in ("foo", "bar")


FOO = SpelledTokenizer().encode("foo foo bar")
LONG_END = (SPELLED.index("<"), SPELLED.index("/"), SPELLED.index(">"))
LOOKUP: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
    "suffix": {"method": "suffix", "num_speculative_tokens": 3},
}


def thought(make_engine: MakeEngine, drive: Drive, speculation: dict[str, Any] | None) -> tuple[dict[str, Any], Any]:
    """Outputs that think, with an end marker of three tokens that the prompt has shown before, and words behind it."""
    engine = make_engine(
        spelled_model(),
        SpelledTokenizer(),
        max_num_seqs=4,
        reasoning_config=ReasoningConfig(start=[THINK], end=LONG_END),
        structured_outputs_config={"num_forced_tokens": 0},
        speculative_config=speculation,
    )
    likely = dict.fromkeys(LONG_END, 5.0) | {THINK: -99, EOS: -99, EOT: -99}
    for seed in range(8):
        for name, kind in KINDS.items():
            for budget in (None, 6):
                prompt = [3, *LONG_END, *FOO, 4, *LONG_END, *FOO, THINK, seed]
                params = SamplingParams(
                    seed=seed, max_tokens=50, thinking_token_budget=budget, logit_bias=likely, structured_outputs=kind
                )
                engine.add_request(f"{name} {seed} {budget}", prompt, params)
    return {name: output.outputs[0] for name, output in drive(engine).items()}, engine.stats()


@pytest.fixture(scope="module")
def thought_plainly(make_engine: MakeEngine, drive: Drive) -> dict[str, Any]:
    return thought(make_engine, drive, None)[0]


@pytest.mark.parametrize("method", LOOKUP)
def test_drafts_across_a_long_end_of_thinking(
    make_engine: MakeEngine, drive: Drive, thought_plainly: dict[str, Any], method: str
) -> None:
    outputs, stats = thought(make_engine, drive, LOOKUP[method])
    begun = 0
    for name, output in outputs.items():
        assert output.error is None
        assert output.token_ids == thought_plainly[name].token_ids, name
        tokens = tuple(output.token_ids)
        end = next((i for i in range(3, len(tokens) + 1) if tokens[i - 3 : i] == LONG_END), None)
        if end is None:
            continue
        begun += 1
        text = "".join(SPELLED[t] for t in tokens[end:] if t not in (EOS, EOT))
        left = text.replace("foo", "").replace("bar", "")
        assert left == "x" if output.finish_reason == "stop" else left in ("", "f", "fo", "b", "ba")
    assert begun > 16
    assert stats.grammar_violations == 0
    assert stats.speculation.num_accepted_tokens > 20


# ---- ending


@pytest.mark.parametrize("backend", ["table", "llguidance"])
def test_ends_when_nothing_more_can_be_said(plain: EngineCore, generate: Generate, backend: str) -> None:
    """Also where min_tokens asks for more: the grammar wins."""
    for min_tokens in (0, 64):
        params = SamplingParams(
            max_tokens=100, min_tokens=min_tokens, structured_outputs={"json": CONST, "backend": backend}
        )
        output = generate(plain, [1], params).outputs[0]
        assert outlines(output.text) == TEXT
        assert output.finish_reason == "stop"
        assert output.token_ids[-1] not in (EOS, EOT)


def test_length_limit_on_the_last_token_is_no_cut(plain: EngineCore, generate: Generate) -> None:
    for backend in ("table", "llguidance"):
        asked = {"choice": ["abc"], "backend": backend}
        allowed = [SPELLED.index("abc")]
        output = generate(plain, [1], SamplingParams(max_tokens=1, allowed_token_ids=allowed, structured_outputs=asked))
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abc", "stop")


@pytest.mark.parametrize("kind", KINDS)
def test_every_stop_id_ends_a_whole_text_and_no_other(plain: EngineCore, generate: Generate, kind: str) -> None:
    """REGEX wants "x" at its end; with (foo|bar)* stop ids may come anywhere between words."""
    star = {"table": {"regex": "(foo|bar)*"}, "matcher": {"grammar": 'start: ("foo" | "bar")*'}}[kind]
    own = SPELLED.index("z")
    ends = set()
    for seed in range(24):
        params = SamplingParams(
            seed=seed, max_tokens=40, stop_token_ids=[own], logit_bias={own: 4.0, EOT: 2.0}, structured_outputs=star
        )
        output = generate(plain, [1], params).outputs[0]
        words = [SPELLED[t] for t in output.token_ids if t < len(SPELLED) and t != own]
        assert not "".join(words).replace("foo", "").replace("bar", "")
        assert max(output.token_ids) < len(SPELLED) + 2
        if output.finish_reason == "stop":
            ends.add(output.token_ids[-1])
    assert {own, EOT} <= ends <= {own, EOS, EOT}


def test_ignoring_the_end_of_sequence_a_text_ends_with_its_grammar(plain: EngineCore, generate: Generate) -> None:
    for kind in KINDS.values():
        params = SamplingParams(seed=0, max_tokens=60, ignore_eos=True, structured_outputs=kind)
        output = generate(plain, [1], params).outputs[0]
        assert (output.text[-1], output.finish_reason, output.stop_reason) == ("x", "stop", None)


# ---- beside everything else


@pytest.mark.parametrize("kind", KINDS)
def test_grammar_wins_over_what_would_leave_nothing(plain: EngineCore, generate: Generate, kind: str) -> None:
    params = SamplingParams(
        seed=0,
        max_tokens=40,
        bad_words=["foo", "bar", "f", "b", "foobar"],
        allowed_token_ids=[0],
        structured_outputs=KINDS[kind],
    )
    output = generate(plain, [1], params).outputs[0]
    assert output.error is None
    assert output.text[:3] in ("foo", "bar")


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_of_what_the_grammar_allows(plain: EngineCore, generate: Generate, kind: str) -> None:
    params = SamplingParams(seed=0, max_tokens=8, logprobs=4, structured_outputs=KINDS[kind])
    output = generate(plain, [1], params).outputs[0]
    assert output.logprobs is not None
    first = [e for e in output.logprobs[0].values() if e.logprob > -np.inf]
    assert {e.decoded_token for e in first} <= {"f", "b", "foo", "bar", "foobar"}
    assert output.logprobs[0][output.token_ids[0]].logprob > -np.inf


def test_model_logprobs_are_of_the_model(make_engine: MakeEngine, generate: Generate) -> None:
    engine = make_engine(
        spelled_model(),
        SpelledTokenizer(),
        max_num_seqs=1,
        logprobs_mode="model_logprobs",
        structured_outputs_config={},
    )
    asked = SamplingParams(seed=0, max_tokens=1, logprobs=20, structured_outputs=KINDS["table"])
    free = SamplingParams(seed=0, max_tokens=1, logprobs=20)
    a, b = (generate(engine, [1], p).outputs[0].logprobs for p in (asked, free))
    assert a is not None
    assert b is not None
    both = a[0].keys() & b[0].keys()
    assert len(both) >= 19
    assert all(a[0][t].logprob == pytest.approx(b[0][t].logprob, abs=1e-5) for t in both)


# ---- failing


def test_grammar_that_does_not_compile_ends_its_request_alone(plain: EngineCore, drive: Drive) -> None:
    schema = {"type": "array", "uniqueItems": True}
    plain.add_request("bad", [1, 2], SamplingParams(structured_outputs={"json": schema}))
    plain.add_request("lark", [1, 2], SamplingParams(structured_outputs={"grammar": "start: missing"}))
    plain.add_request("good", [1, 2], SamplingParams(max_tokens=40, structured_outputs={"json": CONST}))
    plain.add_request("free", [1, 2], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    done = drive(plain)
    assert outlines(done["good"].outputs[0].text) == TEXT
    assert done["free"].outputs[0].finish_reason == "length"
    for name, word in (("bad", "uniqueItems"), ("lark", "missing")):
        output = done[name].outputs[0]
        assert output.finish_reason == "error"
        assert output.error is not None
        assert output.error.startswith("structured_outputs: ")
        assert word in output.error


def test_what_cannot_be_is_refused_at_the_door(make_engine: MakeEngine, plain: EngineCore) -> None:
    for asked, message in [
        ({"regex": "("}, "structured_outputs.regex"),
        ({"regex": "a\0"}, "NUL"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"json": ""}, "structured_outputs.json"),
        ({"json": {"type": "object", "unevaluatedProperties": False}}, "unevaluatedProperties"),
        ({"json": {}, "regex": "a"}, "exactly one"),
        ({"colour": "red"}, "structured_outputs has the keys"),
    ]:
        with pytest.raises(ValueError, match=message):
            SamplingParams(structured_outputs=asked)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="structured_outputs is 7"):
        SamplingParams(structured_outputs=7)  # type: ignore[arg-type]
    asked = SamplingParams(structured_outputs={"choice": ["a"]})
    for engine, why in [
        (make_engine(spelled_model()), "has no tokenizer"),
        (make_engine(spelled_model(), SpelledTokenizer(), structured_outputs_config=None), "structured_outputs_config"),
    ]:
        with pytest.raises(ValueError, match=f"structured_outputs.choice was given, and this engine .*{why}"):
            engine.add_request("r", [1], asked)
    assert not plain.has_unfinished()


def test_a_grammar_that_fails_while_a_step_is_scheduled(
    plain: EngineCore, drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step goes without its request, which ends with the next one."""
    compiled: Future[Any] = Future()
    schedule = plain.scheduler.schedule

    def fail_first() -> Any:
        if not compiled.done():
            compiled.set_exception(GrammarError("too late"))
        return schedule()

    plain.add_request("mate", [1, 2], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    with monkeypatch.context() as patch:
        patch.setattr(plain._admission.structured, "constraint", lambda *args: Constraint(compiled, None))
        plain.add_request("late", [1, 2], SamplingParams(structured_outputs=KINDS["table"]))
    monkeypatch.setattr(plain.scheduler, "schedule", fail_first)
    done = drive(plain)
    assert done["late"].outputs[0].error == "structured_outputs: too late"
    assert done["mate"].outputs[0].finish_reason == "length"


def test_aborts_leave_nothing_behind(plain: EngineCore, drive: Drive) -> None:
    for step in range(6):
        for index, kind in enumerate([*KINDS.values(), {"json": CONST}]):
            plain.add_request(f"{index}", [1, 2], SamplingParams(seed=step, max_tokens=40, structured_outputs=kind))
        for _ in range(step):
            plain.step()
        plain.abort(["0", "1", "2"])
        done = drive(plain)
        assert all(o.outputs[0].finish_reason in ("abort", "stop") for o in done.values())
    assert plain.stats().scheduler.kv_usage == 0
    grammars = plain.runner.grammars
    assert grammars is not None
    drive(plain)
    plain.add_request("last", [1], SamplingParams(max_tokens=1))
    drive(plain)
    plain.step()
    assert grammars.num_held == 0


def test_several_outputs_share_a_grammar(plain: EngineCore, generate: Generate) -> None:
    before = plain.stats().scheduler.prefix_hit_tokens
    output = generate(plain, [1] * 40, SamplingParams(n=3, seed=7, max_tokens=60, structured_outputs=KINDS["table"]))
    assert plain.stats().scheduler.prefix_hit_tokens - before == 64  # two of them found the prompt of the first
    texts = [o.text for o in output.outputs]
    assert len(set(texts)) > 1
    assert all(text.endswith("x") and text[:3] in ("foo", "bar") for text in texts)
    again = generate(plain, [1] * 40, SamplingParams(n=3, seed=7, max_tokens=60, structured_outputs=KINDS["matcher"]))
    assert again.num_cached_tokens == 32
    assert [o.text for o in again.outputs] == texts


# ---- with drafts


@pytest.mark.parametrize("method", ["standard", "block", "synthetic"])
def test_illegal_drafts_are_never_kept(make_engine: MakeEngine, drive: Drive, method: str) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1, "rejection_sample_method": method}
    if method == "synthetic":
        config["synthetic_acceptance_rates"] = [1.0, 1.0, 1.0]
    engine = make_engine(spelled_model(), SpelledTokenizer(), max_num_seqs=2, speculative_config=config)
    for seed in range(12):
        for name, kind in KINDS.items():
            prompt = [*SpelledTokenizer().encode("foozoofoobarxbar"), seed % 26]
            engine.add_request(
                f"{name}{seed}", prompt, SamplingParams(seed=seed, max_tokens=30, structured_outputs=kind)
            )
    ended = 0
    for output in drive(engine).values():
        (got,) = output.outputs
        assert got.error is None
        text = got.text.replace("foo", "").replace("bar", "")
        ended += got.finish_reason == "stop"
        assert text == "x" if got.finish_reason == "stop" else text in ("", "f", "fo", "b", "ba")
    assert ended > 6
    assert engine.stats().speculation.num_draft_tokens > 10
    assert engine.stats().grammar_violations == 0


def test_nothing_compiles_after_warmup(make_engine: MakeEngine, drive: Drive, compilations: list[str]) -> None:
    engine = make_engine(
        spelled_model(), SpelledTokenizer(), max_num_seqs=2, max_model_len=64,
        reasoning_config=ReasoningConfig(start=[THINK], end=[END]), structured_outputs_config={"num_forced_tokens": 2},
    )  # fmt: skip
    engine.warmup(progress=False)
    compilations.clear()
    for index, kind in enumerate([*KINDS.values(), {"json": CONST}, {"json_object": True}]):
        engine.add_request(f"{index}", [END, 2], SamplingParams(seed=index, max_tokens=30, structured_outputs=kind))
    engine.add_request("free", [1], SamplingParams(max_tokens=5))
    done = drive(engine)
    assert json.loads(done["2"].outputs[0].text) == CONST["const"]
    assert compilations == []
    assert engine.num_compilations == 0


@pytest.mark.skipif("len(__import__('jax').devices()) < 2", reason="needs two devices")
def test_tensor_parallel(make_engine: MakeEngine, generate: Generate, plain: EngineCore) -> None:
    engine = make_engine(spelled_model(), SpelledTokenizer(), max_num_seqs=2, tensor_parallel_size=2)
    for kind in [*KINDS.values(), {"json": CONST}]:
        params = SamplingParams(seed=4, max_tokens=40, structured_outputs=kind)
        a, b = (generate(e, [1, 2], params).outputs[0] for e in (plain, engine))
        assert a.token_ids == b.token_ids
    assert PADDED % 2 == 0
