"""The engine as a whole: whatever else goes on, a request gets the tokens it gets alone, and pays its pages back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve import LLM, EngineCore, RequestOutput, RequestOutputKind, SamplingParams
from models.base import ForwardInputs
from tests.jaxserve.test_detokenizer import byte_tokenizer

Drive = Callable[..., dict[str, RequestOutput]]
Generate = Callable[..., RequestOutput]
MakeEngine = Callable[..., EngineCore]


# ---- traffic


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it comes, and the step before which its user gives up."""

    name: str
    at: int
    prompt: list[int]
    params: SamplingParams
    abort_at: int | None = None
    priority: int = 0


def serve(engine: EngineCore, arrivals: list[Arrival], max_steps: int = 20_000) -> dict[str, RequestOutput]:
    last: dict[str, RequestOutput] = {}
    final = max([a.at for a in arrivals] + [a.abort_at or 0 for a in arrivals])
    for now in range(max_steps):
        for arrival in arrivals:
            if arrival.at == now:
                engine.add_request(arrival.name, arrival.prompt, arrival.params, priority=arrival.priority)
            if arrival.abort_at == now:
                engine.abort([arrival.name])
        for output in engine.step():
            assert not (output.request_id in last and last[output.request_id].finished), "an output after the last one"
            last[output.request_id] = output
        if now >= final and not engine.has_unfinished():
            return last
    raise AssertionError(f"unfinished after {max_steps} steps")


def check_alone(
    alone: EngineCore, generate: Generate, arrivals: list[Arrival], served: dict[str, RequestOutput]
) -> None:
    """Everyone got what they get alone; who gave up, the beginning of it."""
    assert set(served) == {a.name for a in arrivals}
    for arrival in arrivals:
        got, expected = served[arrival.name].outputs[0], generate(alone, arrival.prompt, arrival.params).outputs[0]
        assert served[arrival.name].finished
        if got.finish_reason == "abort":
            assert arrival.abort_at is not None
            assert got.token_ids == expected.token_ids[: len(got.token_ids)]
        else:
            assert (arrival.name, got.token_ids) == (arrival.name, expected.token_ids)
            assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)


def check_no_leak(engine: EngineCore) -> None:
    pool = engine.kv.pool
    assert pool.num_free == pool.num_usable
    assert not engine.runner.slots.requests or all(r.status.is_finished for r in engine.runner.slots.requests)


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.5, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.7, "ignore_eos": True},
    {"top_k": 100, "top_p": 0.5, "logprobs": 0},
]


def mixed_traffic(vocab: int, count: int = 64) -> list[Arrival]:
    """Prompts of 1 to 70 tokens, many with a prefix in common, outputs of up to 50, one in eight aborted."""
    rng = np.random.default_rng(vocab)
    shared = rng.integers(1, vocab, 48).tolist()
    arrivals = []
    for i in range(count):
        prefix = shared[: int(rng.integers(8, 48))] if i % 3 == 0 else []
        prompt = prefix + rng.integers(1, vocab, int(rng.integers(1, 70 - len(prefix)))).tolist()
        params = SamplingParams(seed=i, max_tokens=int(rng.integers(1, 50)), **PARAMETERS[i % len(PARAMETERS)])
        at = int(rng.integers(0, 60))
        arrivals.append(Arrival(f"r{i}", at, prompt, params, at + int(rng.integers(0, 40)) if i % 8 == 5 else None))
    return arrivals


ENGINES = ["markov", "llama"]
CROWDED = {"max_num_seqs": 8, "num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 72}
SMALL = {"max_num_seqs": 4, "num_blocks": 30, "block_size": 4, "max_num_batched_tokens": 70, "max_model_len": 100}
SOLITARY = {"max_num_seqs": 1, "block_size": 4, "enable_prefix_caching": False, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def pairs(
    make_engine: MakeEngine, random_markov: Any, make_llama: Any
) -> Iterator[Callable[[str], tuple[EngineCore, EngineCore]]]:
    """By kind of model: a warm engine with few pages for many requests, and one that serves one at a time."""
    made: dict[str, tuple[EngineCore, EngineCore]] = {}

    def get(kind: str) -> tuple[EngineCore, EngineCore]:
        if kind not in made:
            model = random_markov(32, eos_token_ids=(0,)) if kind == "markov" else make_llama()
            crowded, alone = make_engine(model, **CROWDED), make_engine(model, **SOLITARY)
            crowded.warmup(progress=False)
            made[kind] = crowded, alone
        return made[kind]

    return get


@pytest.mark.parametrize("kind", ENGINES)
def test_everyone_gets_what_they_get_alone(pairs: Any, generate: Generate, compilations: list[str], kind: str) -> None:
    crowded, alone = pairs(kind)
    arrivals = mixed_traffic(crowded.vocab_size)
    del compilations[:]  # those of the warm-up
    served = serve(crowded, arrivals)
    assert compilations == []
    assert crowded.num_compilations == 0
    stats = crowded.stats().scheduler
    assert stats.num_preemptions > 0, "the pool was to be too small"
    assert stats.prefix_hit_tokens > 0, "prefixes were to be shared"
    assert {o.outputs[0].finish_reason for o in served.values()} == {"stop", "length", "abort"}
    check_no_leak(crowded)
    check_alone(alone, generate, arrivals, served)


@st.composite
def traffic(draw: st.DrawFn) -> list[Arrival]:
    shared = [1 + i % 7 for i in range(24)]
    arrivals = []
    for i in range(draw(st.integers(1, 12))):
        prompt = shared[: draw(st.integers(0, 24))] + draw(st.lists(st.integers(0, 31), min_size=1, max_size=60))
        params = SamplingParams(
            seed=draw(st.integers(0, 3)), max_tokens=draw(st.integers(1, 60)), **draw(st.sampled_from(PARAMETERS))
        )
        at = draw(st.integers(0, 20))
        arrivals.append(Arrival(f"r{i}", at, prompt, params, draw(st.none() | st.integers(at, at + 30))))
    return arrivals


@given(traffic())
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_traffic(pairs: Any, generate: Generate, arrivals: list[Arrival]) -> None:
    crowded, alone = pairs("markov")
    served = serve(crowded, arrivals)
    check_no_leak(crowded)
    check_alone(alone, generate, arrivals, served)
    assert crowded.num_compilations == 0


@pytest.mark.parametrize(
    "config",
    [
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 132},
        {"long_prefill_token_threshold": 10},
        {"scheduling_policy": "priority"},
        {"enable_prefix_caching": False},
        {"max_model_len": 101, "block_size": 7, "num_blocks": 17},
    ],
    ids=lambda config: next(iter(config)),
)
def test_configurations_change_nothing(
    pairs: Any, make_engine: MakeEngine, generate: Generate, compilations: list[str], config: dict[str, Any]
) -> None:
    _, alone = pairs("markov")
    engine = make_engine(alone.model, **(SMALL | config))
    engine.warmup(progress=False)
    arrivals = [a for a in mixed_traffic(32, 24) if len(a.prompt) + (a.params.max_tokens or 0) < 100]
    if "scheduling_policy" in config:
        arrivals = [replace(a, priority=i % 3 - 1) for i, a in enumerate(arrivals)]
    del compilations[:]
    served = serve(engine, arrivals)
    assert compilations == []
    assert engine.num_compilations == 0
    assert engine.stats().scheduler.num_preemptions > 0
    check_no_leak(engine)
    check_alone(alone, generate, arrivals, served)


def test_the_less_urgent_yield_their_pages(pairs: Any, make_engine: MakeEngine, generate: Generate) -> None:
    """Urgent requests that come late take the pages of others, in order of urgency, and end before them."""
    _, alone = pairs("markov")
    engine = make_engine(alone.model, scheduling_policy="priority", **SMALL)
    params = SamplingParams(seed=1, max_tokens=50, ignore_eos=True)
    names = {"idle": (0, 5), "normal": (0, 1), "urgent": (20, -1), "late": (21, 0)}
    arrivals = [Arrival(name, at, [1, 2, 3], params, priority=rank) for name, (at, rank) in names.items()]
    served = serve(engine, arrivals)
    check_alone(alone, generate, arrivals, served)
    finished = {name: output.metrics.finished_time for name, output in served.items()}
    assert sorted(finished, key=finished.get) == ["normal", "urgent", "late", "idle"]
    preempted = {name: output.metrics.num_preemptions for name, output in served.items()}
    assert preempted["idle"] > 0
    assert preempted["urgent"] == 0
    check_no_leak(engine)


def test_warmup_covers_the_longest_requests(make_engine: MakeEngine, alphabet: Any, compilations: list[str]) -> None:
    """Every prompt length, and outputs up to the last position; nothing is compiled."""
    engine = make_engine(alphabet, max_num_seqs=5, max_model_len=100, block_size=8, max_num_batched_tokens=70)
    engine.warmup(progress=False)
    del compilations[:]
    params = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    arrivals = [Arrival(f"r{n}", 0, [0] * n, params) for n in range(1, 100)]
    served = serve(engine, arrivals)
    assert [len(served[f"r{n}"].outputs[0].token_ids) for n in range(1, 100)] == [100 - n for n in range(1, 100)]
    assert compilations == []
    assert engine.num_compilations == 0
    check_no_leak(engine)


def test_programs_compiled_while_serving_are_counted(make_engine: MakeEngine, pairs: Any, generate: Generate) -> None:
    engine = make_engine(pairs("markov")[1].model, **SOLITARY)
    generate(engine, [1, 2], max_tokens=3)
    assert engine.num_compilations > 0


# ---- seeds


def test_a_seed_is_a_seed_in_any_company(pairs: Any, generate: Generate) -> None:
    crowded, alone = pairs("markov")
    params = SamplingParams(seed=11, max_tokens=30, ignore_eos=True)
    expected = generate(alone, [3, 4], params).outputs[0].token_ids
    assert generate(crowded, [3, 4], params).outputs[0].token_ids == expected
    for mate in PARAMETERS:
        mates = [Arrival(f"m{i}", 0, [5, 6 + i], SamplingParams(seed=i, max_tokens=5 + i, **mate)) for i in range(4)]
        # The mates come first and leave first: the request changes slots, then has those of others.
        served = serve(crowded, [*mates, Arrival("a", 1, [3, 4], params), Arrival("b", 14, [3, 4], params)])
        assert served["a"].outputs[0].token_ids == served["b"].outputs[0].token_ids == expected


def test_other_seeds_give_other_tokens(pairs: Any, generate: Generate) -> None:
    _, alone = pairs("markov")
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63 - 1, -2, -(2**63)]
    outputs = {tuple(generate(alone, [3], seed=s, max_tokens=20, ignore_eos=True).outputs[0].token_ids) for s in seeds}
    assert len(outputs) == len(seeds)


def test_requests_without_a_seed(make_engine: MakeEngine, pairs: Any, generate: Generate) -> None:
    """They differ among each other, and are the same when the engine is made again."""

    def run(seed: int) -> list[list[int]]:
        engine = make_engine(pairs("markov")[1].model, seed=seed, **SOLITARY)
        return [generate(engine, [3], max_tokens=20, ignore_eos=True).outputs[0].token_ids for _ in range(3)]

    first, again, other = run(0), run(0), run(1)
    assert first == again
    assert len({tuple(tokens) for tokens in first + other}) == 6


def test_n_sequences(pairs: Any, generate: Generate) -> None:
    crowded, alone = pairs("markov")
    params: dict[str, Any] = {"seed": 5, "max_tokens": 20, "ignore_eos": True}
    several = generate(crowded, [3, 4, 5], n=4, **params)
    tokens = [c.token_ids for c in several.outputs]
    assert [c.index for c in several.outputs] == [0, 1, 2, 3]
    assert len({tuple(t) for t in tokens}) == 4
    assert [c.token_ids for c in generate(crowded, [3, 4, 5], n=4, **params).outputs] == tokens
    assert [c.token_ids for c in generate(alone, [3, 4, 5], n=4, **params).outputs] == tokens, "one after the other"
    assert generate(alone, [3, 4, 5], **params).outputs[0].token_ids == tokens[0]
    check_no_leak(crowded)


def test_one_of_n_sequences_is_aborted_with_all(pairs: Any, drive: Drive) -> None:
    crowded, _ = pairs("markov")
    crowded.add_request("x", [3, 4, 5], SamplingParams(n=3, max_tokens=50, ignore_eos=True))
    for _ in range(5):
        crowded.step()
    crowded.abort(["x", "x", "unknown"])
    crowded.abort("r1")  # one id, not the letters of several
    output = drive(crowded)["x"]
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 3
    check_no_leak(crowded)


# ---- how a request ends


@pytest.fixture(scope="module")
def speller(make_engine: MakeEngine, alphabet: Any, letters: Any) -> EngineCore:
    """Continues the alphabet; "z" is its end of sequence."""
    return make_engine(alphabet, letters, max_model_len=64)


ENDS: list[tuple[str, dict[str, Any], str, str, str | int | None]] = [
    # prompt, parameters, text, finish_reason, stop_reason
    ("abc", {"max_tokens": 4}, "defg", "length", None),
    ("abc", {"max_tokens": 1}, "d", "length", None),
    ("w", {}, "xy", "stop", None),
    ("w", {"ignore_eos": True, "max_tokens": 5}, "xyzab", "length", None),
    ("w", {"ignore_eos": True, "max_tokens": 5, "stop_token_ids": [0]}, "xyz", "stop", 0),
    ("w", {"ignore_eos": True, "max_tokens": 5, "stop_token_ids": [25]}, "xy", "stop", 25),
    ("a", {"stop_token_ids": [6]}, "bcdef", "stop", 6),
    ("a", {"stop_token_ids": [*range(8, 26), 6]}, "bcdef", "stop", 6),  # more than the device looks at
    ("a", {"stop": "fg"}, "bcde", "stop", "fg"),
    ("a", {"stop": ["xx", "ghi", "de"]}, "bc", "stop", "de"),
    ("a", {"stop": "def", "include_stop_str_in_output": True}, "bcdef", "stop", "def"),
    ("a", {"stop": "bc"}, "", "stop", "bc"),
    ("ab", {"stop": "bc", "max_tokens": 3}, "cde", "length", None),  # a match must lie in the output
    ("a", {"stop": "bcdefg", "max_tokens": 5}, "bcdef", "length", None),
    ("a" * 61, {"max_tokens": None}, "bcd", "length", None),
    ("a" * 61, {"max_tokens": 100}, "bcd", "length", None),
    ("a" * 63, {"max_tokens": None}, "b", "length", None),
]


@pytest.mark.parametrize(("prompt", "keywords", "text", "reason", "stop_reason"), ENDS)
def test_ends(
    speller: EngineCore,
    generate: Generate,
    prompt: str,
    keywords: dict[str, Any],
    text: str,
    reason: str,
    stop_reason: Any,
) -> None:
    output = generate(speller, prompt, temperature=0, **keywords)
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, reason, stop_reason)
    start = ord(prompt[-1]) - ord("a") + 1
    count = len(completion.token_ids)
    assert completion.token_ids == [(start + i) % 26 for i in range(count)]
    assert output.prompt == prompt
    assert count == len(text) if reason == "length" else count >= len(text)
    check_no_leak(speller)


def test_nothing_follows_a_stop_that_only_the_host_sees(speller: EngineCore, drive: Drive) -> None:
    """The device is a step ahead by then; neighbours go on, and the pages serve others at once."""
    speller.add_request("stops", "a", SamplingParams(temperature=0, stop="ef", max_tokens=40))
    speller.add_request("goes on", "a", SamplingParams(temperature=0, max_tokens=40))
    outputs = drive(speller)
    assert outputs["stops"].outputs[0].text == "bcd"
    assert outputs["stops"].outputs[0].token_ids == [1, 2, 3, 4, 5]
    assert outputs["goes on"].outputs[0].text == "bcdefghijklmnopqrstuvwxy"
    check_no_leak(speller)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_output_kinds(speller: EngineCore, kind: RequestOutputKind) -> None:
    speller.add_request("x", "a", SamplingParams(temperature=0, max_tokens=6, output_kind=kind, logprobs=0))
    texts, finished = [], []
    while speller.has_unfinished():
        for output in speller.step():
            texts.append(output.outputs[0].text)
            finished.append(output.finished)
            assert len(output.outputs[0].logprobs or []) == len(output.outputs[0].token_ids)
    assert finished == [False] * (len(finished) - 1) + [True]
    expected = {
        RequestOutputKind.CUMULATIVE: ["b", "bc", "bcd", "bcde", "bcdef", "bcdefg"],
        RequestOutputKind.DELTA: list("bcdefg"),
        RequestOutputKind.FINAL_ONLY: ["bcdefg"],
    }
    assert texts == expected[kind]


def test_logprobs(pairs: Any, generate: Generate, exact_distribution: Any) -> None:
    """Of the model's own distribution, whatever the filters leave of it."""
    crowded, _ = pairs("markov")
    output = generate(crowded, [3, 4], temperature=0.7, top_k=3, seed=0, max_tokens=20, ignore_eos=True, logprobs=0)
    completion = output.outputs[0]
    history = [3, 4, *completion.token_ids]
    expected = [
        np.log(exact_distribution(crowded.model.table[a, b])[c])
        for a, b, c in zip(history, history[1:], history[2:], strict=False)
    ]
    assert completion.logprobs is not None
    got = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert completion.cumulative_logprob == pytest.approx(sum(expected), abs=1e-4)


def test_aborts_at_every_moment(pairs: Any, drive: Drive) -> None:
    crowded, _ = pairs("markov")
    for moment in range(8):
        crowded.add_request("x", list(range(1, 31)) * 2, SamplingParams(max_tokens=30, ignore_eos=True))
        for _ in range(moment):
            crowded.step()
        crowded.abort(["x"])
        # The id is free again at once, and the old request's tokens in flight are not the new one's.
        crowded.add_request("x", [1], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        outputs = []
        while crowded.has_unfinished():
            outputs += [o for o in crowded.step() if o.finished]
        assert [o.outputs[0].finish_reason for o in outputs] == ["abort", "length"]
        assert len(outputs[1].outputs[0].token_ids) == 2
        check_no_leak(crowded)


def test_shutdown_in_the_middle(make_engine: MakeEngine, alphabet: Any) -> None:
    engine = make_engine(alphabet)
    for i in range(3):
        engine.add_request(str(i), [1, 2, 3], SamplingParams(max_tokens=50, n=2, ignore_eos=True))
    engine.step()
    engine.step()
    engine.shutdown()
    check_no_leak(engine)


def test_shutdown_frees_the_device(make_engine: MakeEngine, make_llama: Any) -> None:
    gc.collect()
    before = {id(x) for x in jax.live_arrays()}
    engine = make_engine(make_llama(), max_num_seqs=2)
    engine.add_request("0", [1, 2, 3], SamplingParams(max_tokens=50))
    engine.step()
    engine.shutdown()
    engine.shutdown()
    gc.collect()
    assert sum(x.nbytes for x in jax.live_arrays() if id(x) not in before) < 10_000  # constants
    assert engine.stats().num_steps == 1
    for call in (engine.step, engine.warmup, lambda: engine.add_request("1", [1], SamplingParams())):
        with pytest.raises(RuntimeError, match="shut down"):
            call()


def test_a_request_that_is_refused_late_leaves_nothing(
    make_engine: MakeEngine, alphabet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(alphabet)
    add = engine.scheduler.add_request

    def refuse_the_second(request: Any) -> None:
        if request.request_id.endswith("#1"):
            raise ValueError("no room")
        add(request)

    monkeypatch.setattr(engine.scheduler, "add_request", refuse_the_second)
    with pytest.raises(ValueError, match="no room"):
        engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=5, n=2))
    assert not engine.has_unfinished()
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=5))  # the id is free
    check_no_leak(engine)


def test_the_tokenizers_end_is_an_end(make_engine: MakeEngine, alphabet: Any, letters: Any) -> None:
    class Ending(type(letters)):
        eos_token_id = 7

    for tokenizer, length in ((letters, 24), (Ending(), 6)):
        engine = make_engine(alphabet, tokenizer)
        engine.add_request("a", [1], SamplingParams(temperature=0, max_tokens=50))
        (output,) = [o for _ in range(60) for o in engine.step() if o.finished]
        assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("stop", length)


# ---- prefix cache


@pytest.mark.parametrize(
    ("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32), (49, 48), (55, 48)]
)
def test_cached_tokens(speller: EngineCore, generate: Generate, length: int, cached: int) -> None:
    """Of a prompt that comes a second time: whole pages, and never the last token."""
    prompt = [(length + 7 * i) % 26 for i in range(length)]  # none is the beginning of another
    keywords: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    first, second = generate(speller, prompt, **keywords), generate(speller, prompt, **keywords)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_output_is_cached_too(speller: EngineCore, generate: Generate) -> None:
    """A conversation's next turn finds the pages of the answer."""
    prompt = [25 - i % 26 for i in range(20)]
    first = generate(speller, prompt, temperature=0, max_tokens=20, ignore_eos=True)
    second = generate(speller, prompt + first.outputs[0].token_ids + [3], temperature=0, max_tokens=2)
    assert second.num_cached_tokens == 32


def test_cache_salts_share_nothing(speller: EngineCore, drive: Drive) -> None:
    prompt, cached = [1 + i % 5 for i in range(40)], {}
    for name, salt in [("a", "x"), ("b", "y"), ("c", "x"), ("d", None)]:
        salted = {"prompt_token_ids": prompt, "cache_salt": salt}
        speller.add_request(name, salted, SamplingParams(max_tokens=2))
        cached |= {name: output.num_cached_tokens for name, output in drive(speller).items()}
    assert cached == {"a": 0, "b": 0, "c": 32, "d": 0}


def test_a_cache_salt_that_is_no_valid_unicode(make_engine: MakeEngine, alphabet: Any, drive: Drive) -> None:
    """JSON can spell half a surrogate pair."""
    engine = make_engine(alphabet)
    engine.add_request("x", {"prompt_token_ids": [1] * 20, "cache_salt": "\ud800"}, SamplingParams(max_tokens=2))
    assert drive(engine)["x"].finished


def test_prefix_caching_can_be_off(make_engine: MakeEngine, alphabet: Any, generate: Generate) -> None:
    engine = make_engine(alphabet, enable_prefix_caching=False)
    assert [generate(engine, [1] * 40, max_tokens=1).num_cached_tokens for _ in range(2)] == [0, 0]


def test_hidden_states_at_page_boundaries(make_engine: MakeEngine, make_llama: Any, generate: Generate) -> None:
    """Also of pages that a decode filled, and of those that a second request found in the cache."""
    model = make_llama()
    engine = make_engine(model, keep_boundary_hidden=True, block_size=4, max_model_len=64, max_num_seqs=1)
    prompt = [(5 * i + 1) % 256 for i in range(21)]
    generate(engine, prompt, max_tokens=2, temperature=0, ignore_eos=True)
    engine.add_request("x", prompt, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    while not engine.scheduler.running or engine.scheduler.running[0].num_tokens < 35:
        engine.step()
    request = engine.scheduler.running[0]
    assert request.num_cached_tokens == 20
    pages = engine.kv.block_ids(request)[: (request.num_tokens - 1) // 4]
    found = np.asarray(engine.runner.cache.boundary)[pages]

    tokens = jnp.asarray([request.token_ids], jnp.int32)
    positions, table = jnp.arange(tokens.shape[1])[None], jnp.arange(1, 17)[None]
    inputs = ForwardInputs(tokens, positions, table)
    forward = jax.jit(lambda params, kv: model.forward(params, kv, inputs, None)[0])
    hidden = forward(engine.runner.params, model.init_kv(17, 4, None))
    np.testing.assert_allclose(found, np.asarray(hidden)[0, 3::4][: len(pages)], atol=1e-4)
    assert len(pages) == 8


def test_stats(make_engine: MakeEngine, alphabet: Any, generate: Generate) -> None:
    engine = make_engine(alphabet)
    generate(engine, [1] * 40, max_tokens=7, ignore_eos=True)
    stats = engine.stats()
    assert stats.tokens == 7
    assert stats.num_steps >= 7
    assert stats.scheduler.num_running == stats.scheduler.num_waiting == 0
    assert stats.scheduler.kv_usage == 0.0


def test_a_tokenizer_of_the_tokenizers_library(make_engine: MakeEngine, random_markov: Callable[..., Any]) -> None:
    engine = make_engine(random_markov(256), byte_tokenizer())
    letters = list(range(ord("a"), ord("z") + 1))
    engine.add_request("a", "abc", SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=letters))
    (output,) = [o for _ in range(10) for o in engine.step() if o.finished]
    assert len(output.prompt_token_ids) == 3
    assert output.outputs[0].text == engine.tokenizer.decode(output.outputs[0].token_ids)


def test_a_model_object_has_its_dtype_already(make_engine: MakeEngine, make_llama: Any, alphabet: Any) -> None:
    for model in (make_llama(), alphabet):
        with pytest.raises(ValueError, match="dtype is 'bfloat16'; the model object given has 'float32'"):
            make_engine(model, dtype="bfloat16")
        make_engine(model, dtype="auto")


def test_what_the_model_recommends_is_the_default(alphabet: Any) -> None:
    """Of generation_config.json, for requests without parameters; a model may have none."""

    class Recommending(type(alphabet)):  # type: ignore[misc]
        generation_config: ClassVar = {"temperature": 0.0, "max_new_tokens": 3, "bos_token_id": 1}

    sizes = {"max_model_len": 64, "max_num_seqs": 2}
    llm = LLM(Recommending(alphabet.table), **sizes)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
    assert llm.generate([[4]], use_tqdm=False)[0].outputs[0].token_ids == [5, 6, 7]
    assert LLM(alphabet, **sizes).get_default_sampling_params() == SamplingParams()
