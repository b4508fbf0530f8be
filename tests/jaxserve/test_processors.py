"""Logits processors of a user's own: how they are registered, checked and told of parameters, and what they change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import AdapterLogitsProcessor, EngineCore, LogitsProcessor, Row, SamplingParams
from jaxserve.sampling import registry

V = 8
CONFIG = {"max_num_seqs": 4, "max_model_len": 64}


class Force(LogitsProcessor):
    """From output position `at` on nothing but `token`: extra_args force={"at": ..., "token": ...}."""

    arguments = ("force",)

    def validate(self, params: SamplingParams) -> None:
        value = (params.extra_args or {}).get("force")
        if value is not None and not 0 <= value["token"] < self.config.vocab_size:
            raise ValueError(f"extra_args force.token is {value['token']}; it must be in [0, {V - 1}]")

    def row(self, params: SamplingParams) -> Any | None:
        value = (params.extra_args or {}).get("force")
        return None if value is None else np.array([value["at"], value["token"]], np.int32)

    def empty_row(self) -> Any:
        return np.zeros(2, np.int32)  # would force token 0 at once, were it applied

    def apply(self, logits: Any, row: Row) -> Any:
        at, token = row.params
        only = jnp.where(jnp.arange(logits.shape[0]) == token, 0.0, -jnp.inf)
        return jnp.where(row.output_len >= at, only, logits)


class Flatten(LogitsProcessor):
    """Makes all but the most probable token equally probable: extra_args flatten=<their log-weight below the top>."""

    argmax_invariant = True
    arguments = ("flatten",)

    def row(self, params: SamplingParams) -> Any | None:
        value = (params.extra_args or {}).get("flatten")
        return None if value is None else np.float32(value)

    def empty_row(self) -> Any:
        return np.float32(0)

    def apply(self, logits: Any, row: Row) -> Any:
        top = jnp.max(logits)
        return jnp.where((logits < top) & (logits > -jnp.inf), top - row.params, logits)


class NoRepeat(LogitsProcessor):
    """Never the token before, of the prompt or the output; for everyone."""

    def row(self, params: SamplingParams) -> Any | None:
        return ()

    def empty_row(self) -> Any:
        return ()

    def apply(self, logits: Any, row: Row) -> Any:
        return logits.at[row.last(1)[0]].set(-jnp.inf)


# ---- what they change ----


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., EngineCore], random_markov: Any) -> EngineCore:
    return make_engine(random_markov(V), logits_processors=[Force, Flatten], **CONFIG)


def tokens_of(engine: EngineCore, drive: Any, *params: SamplingParams) -> list[list[int]]:
    for i, p in enumerate(params):
        engine.add_request(str(i), [1, 2], p)
    done = drive(engine)
    return [done[str(i)].outputs[0].token_ids for i in range(len(params))]


def test_beside_plain_rows(engine: EngineCore, drive: Any, make_engine: Any, random_markov: Any) -> None:
    """Each request gets its own parameters, and those that use no processor are as without one."""
    plain = [SamplingParams(seed=1, max_tokens=9), SamplingParams(temperature=0, max_tokens=9)]
    forced = [
        SamplingParams(seed=2, max_tokens=9, extra_args={"force": {"at": 4, "token": 5}}),
        SamplingParams(temperature=0, max_tokens=9, extra_args={"force": {"at": 0, "token": 7}}),
    ]
    expected = tokens_of(make_engine(random_markov(V), **CONFIG), drive, *plain, SamplingParams(seed=2, max_tokens=9))
    found = tokens_of(engine, drive, plain[0], forced[0], plain[1], forced[1])
    assert found[0] == expected[0]
    assert found[2] == expected[1]
    assert found[1] == [*expected[2][:4], 5, 5, 5, 5, 5]
    assert found[3] == [7] * 9


def test_a_slot_forgets_its_last_request(engine: EngineCore, drive: Any) -> None:
    plain = SamplingParams(seed=4, max_tokens=6)
    before = tokens_of(engine, drive, plain)
    tokens_of(engine, drive, *[SamplingParams(max_tokens=6, extra_args={"force": {"at": 0, "token": 3}})] * 4)
    assert tokens_of(engine, drive, plain) == before


def test_in_a_window_of_drafts(make_sampler: Any, sample: Any, asked: Any) -> None:
    """The token is forced from the exact position on, whether what is before it is output or draft."""
    sampler = make_sampler(V, (Force,))
    params = SamplingParams(temperature=0, extra_args={"force": {"at": 3, "token": 7}})
    logits = np.zeros((4, 6, V), np.float32)
    logits[..., 5] = 1
    requests = [asked(params, (0,), [5] * n, [5] * 5) for n in range(4)]
    expected = [[5 if n + row < 3 else 7 for row in range(6)] for n in range(4)]
    assert sample(sampler, logits, requests).token.tolist() == expected


def test_an_empty_parameter_tree_and_the_history(make_sampler: Any, sample: Any, asked: Any) -> None:
    logits = np.tile(np.arange(V, dtype=np.float32), (1, 3, 1))
    request = asked(SamplingParams(temperature=0), (1, 7), (), (6, 7))
    assert sample(make_sampler(V, (NoRepeat,)), logits, [request]).token.tolist() == [[6, 7, 6]]


def test_argmax_invariant_after_temperature_and_before_top_k(
    make_sampler: Any, sample: Any, asked: Any, values_by_id: Any
) -> None:
    """min_p leaves five tokens, four of them are made equal whatever the temperature, top_k takes the first two."""
    sampler = make_sampler(V, (Flatten,))
    logits = np.array([0, -1, -2, 3, 1, -20, -20, -20], np.float32)[None, None]
    params = {"temperature": 4.0, "min_p": 0.1, "logprobs": V, "extra_args": {"flatten": 1.0}}
    found = np.exp(values_by_id(sample(sampler, logits, [asked(SamplingParams(**params))]).logprobs)[0, 0])
    weights = np.exp(np.array([-1, -1, -1, 0, -1, -np.inf, -np.inf, -np.inf]))
    np.testing.assert_allclose(found, weights / weights.sum(), atol=1e-6)
    found = np.exp(values_by_id(sample(sampler, logits, [asked(SamplingParams(top_k=3, **params))]).logprobs)[0, 0])
    weights[[2, 4]] = 0
    np.testing.assert_allclose(found, weights / weights.sum(), atol=1e-6)


def test_argmax_invariant_leaves_greedy_rows_alone(engine: EngineCore, drive: Any) -> None:
    greedy = {"temperature": 0, "max_tokens": 8}
    plain = tokens_of(engine, drive, SamplingParams(**greedy))
    assert tokens_of(engine, drive, SamplingParams(extra_args={"flatten": 0.5}, **greedy)) == plain


def test_nothing_is_compiled_when_a_request_comes(
    make_engine: Any, random_markov: Any, drive: Any, compilations: list[str]
) -> None:
    engine = make_engine(random_markov(V), logits_processors=[Force, Flatten], max_num_seqs=2, max_model_len=16)
    engine.warmup(progress=False)
    compilations.clear()
    extra = {"force": {"at": 2, "token": 5}, "flatten": 1.0}
    tokens_of(engine, drive, SamplingParams(extra_args=extra), SamplingParams(), SamplingParams(temperature=0))
    assert compilations == []
    assert engine.num_compilations == 0


# ---- legacy functions ----


class Legacy(AdapterLogitsProcessor):
    """extra_args legacy: 2 or 3 arguments, or "raise"."""

    arguments = ("legacy",)

    def new_request(self, params: SamplingParams) -> Any:
        def two(output: list[int], logits: np.ndarray) -> np.ndarray:
            logits[:] = -np.inf
            logits[len(output) % V] = 0
            return logits

        def three(prompt: list[int], output: list[int], logits: np.ndarray) -> np.ndarray:
            return np.where(np.arange(V) == [*prompt, *output][-2], 0.0, -np.inf)

        def broken(output: list[int], logits: np.ndarray) -> np.ndarray:
            if len(output) == 2:
                raise RuntimeError("no more ideas")
            return logits

        return {None: None, 2: two, 3: three, "raise": broken}[(params.extra_args or {}).get("legacy")]


def test_legacy_functions_beside_plain_and_failing_ones(make_engine: Any, random_markov: Any, drive: Any) -> None:
    engine = make_engine(random_markov(V), logits_processors=[Force, Legacy], **CONFIG)
    asked = {
        "plain": SamplingParams(seed=1, max_tokens=6),
        "two": SamplingParams(max_tokens=6, extra_args={"legacy": 2}),
        "three": SamplingParams(max_tokens=6, extra_args={"legacy": 3}),
        "raise": SamplingParams(max_tokens=6, extra_args={"legacy": "raise"}),
    }
    for name, params in asked.items():
        engine.add_request(name, [1, 2], params)
    done = {name: output.outputs[0] for name, output in drive(engine).items()}
    assert done["two"].token_ids == [0, 1, 2, 3, 4, 5]
    assert done["three"].token_ids == [1, 2, 1, 2, 1, 2]
    assert done["plain"].token_ids == tokens_of(engine, drive, asked["plain"])[0]
    assert done["raise"].finish_reason == "error"
    assert len(done["raise"].token_ids) == 2
    assert "Legacy" in done["raise"].error
    assert "no more ideas" in done["raise"].error


# ---- registration ----


class Raises(NoRepeat):
    def apply(self, logits: Any, row: Row) -> Any:
        raise RuntimeError("not today")


class Branches(NoRepeat):
    def apply(self, logits: Any, row: Row) -> Any:
        return logits if logits[0] > 0 else -logits


class Shorter(NoRepeat):
    def apply(self, logits: Any, row: Row) -> Any:
        return logits[1:]


class HalfPrecision(NoRepeat):
    def apply(self, logits: Any, row: Row) -> Any:
        return logits.astype(jnp.bfloat16)


class Nothing(NoRepeat):
    def apply(self, logits: Any, row: Row) -> Any:
        return None


class Tuple(NoRepeat):
    def apply(self, logits: Any, row: Row) -> Any:
        return logits, row


class NoEmptyRow(LogitsProcessor):
    def apply(self, logits: Any, row: Row) -> Any:
        return logits


class NotMade(NoRepeat):
    def __init__(self, config: Any) -> None:
        raise OSError("no such file")


@pytest.mark.parametrize(
    "kind", [Raises, Branches, Shorter, HalfPrecision, Nothing, Tuple, NoEmptyRow, NotMade], ids=lambda k: k.__name__
)
def test_what_cannot_be_compiled_fails_at_start_with_its_name(make_engine: Any, random_markov: Any, kind: Any) -> None:
    with pytest.raises(ValueError, match=kind.__name__):
        make_engine(random_markov(V), logits_processors=[kind], **CONFIG)


@pytest.mark.parametrize("name", [
    "no_such_module_anywhere:Force", "json:NoSuchClass", "json", "json:", ":Force", "json:loads", "json:decoder", "",
    int, len, None, 3, NoRepeat.apply, SamplingParams(),
])  # fmt: skip
def test_what_is_no_processor_fails_at_start(make_engine: Any, random_markov: Any, name: Any) -> None:
    with pytest.raises(ValueError, match="logits_processors") as error:
        make_engine(random_markov(V), logits_processors=[name], **CONFIG)
    assert repr(name) in str(error.value)


def test_an_instance_is_no_class(make_engine: Any, random_markov: Any, engine: EngineCore) -> None:
    with pytest.raises(ValueError, match="logits_processors"):
        make_engine(random_markov(V), logits_processors=[engine.runner.sampler.processors[-1]], **CONFIG)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("processors_of_a_user")
    module.Force, module.Raises = Force, Raises  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def force_three(make_engine: Any, random_markov: Any, generate: Any, **config: Any) -> list[int]:
    engine = make_engine(random_markov(V), **config, **CONFIG)
    params = SamplingParams(max_tokens=3, extra_args={"force": {"at": 0, "token": 3}})
    return generate(engine, [1], params).outputs[0].token_ids


def test_by_name(make_engine: Any, random_markov: Any, generate: Any, importable: str) -> None:
    named = {"logits_processors": [f"{importable}:Force"]}
    assert force_three(make_engine, random_markov, generate, **named) == [3, 3, 3]


def test_by_entry_point(
    make_engine: Any, random_markov: Any, generate: Any, importable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(group: str) -> list[EntryPoint]:
        return [EntryPoint("force", f"{importable}:{offered}", group)] * (group == "jaxserve.logits_processors")

    monkeypatch.setattr(registry, "entry_points", installed)
    offered = "Force"
    assert force_three(make_engine, random_markov, generate) == [3, 3, 3]
    for offered in ("Raises", "Absent"):
        with pytest.raises(ValueError, match=offered):
            make_engine(random_markov(V), **CONFIG)


# ---- what a request may ask ----


class Misfit(Force):
    def row(self, params: SamplingParams) -> Any | None:
        value = (params.extra_args or {}).get("force")
        return None if value is None else np.zeros(value["at"], np.int32)


@pytest.mark.parametrize(("kind", "extra", "message"), [
    (Force, {"forced": 1}, "forced"),
    (Force, {"force": {"at": 0, "token": 3}, "other": 1}, "other"),
    (Force, {"force": {"at": 0, "token": V}}, "force.token is 8"),
    (Force, {"force": 5}, "Force"),
    (Misfit, {"force": {"at": 3, "token": 0}}, "Misfit"),
])  # fmt: skip
def test_refused_requests(
    make_engine: Any, random_markov: Any, generate: Any, kind: Any, extra: dict[str, Any], message: str
) -> None:
    """Before anything is queued; and the engine goes on."""
    engine = make_engine(random_markov(V), logits_processors=[kind], max_num_seqs=1, max_model_len=16)
    with pytest.raises(ValueError, match=message):
        engine.add_request("x", [1], SamplingParams(extra_args=extra))
    assert not engine.has_unfinished()


def test_extra_args_without_processors_are_refused(make_engine: Any, random_markov: Any) -> None:
    engine = make_engine(random_markov(V), max_num_seqs=1, max_model_len=16)
    with pytest.raises(ValueError, match="extra_args"):
        engine.add_request("x", [1], SamplingParams(extra_args={"force": 1}))
