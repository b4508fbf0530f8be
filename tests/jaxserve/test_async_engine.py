"""LLM and AsyncEngine over a fake core: delivery, order, aborts, errors; and once over the real one."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from transformers import PreTrainedTokenizerFast

from jaxserve.admission import PreparedRequest, parse_prompt
from jaxserve.async_engine import AsyncEngine, EngineDeadError
from jaxserve.config import EngineConfig
from jaxserve.engine import EngineCore
from jaxserve.llm import LLM, deferred_interrupt, render_chat
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import RequestOutput
from jaxserve.request import Request
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from models.markov import MarkovLM
from tests.jaxserve.test_detokenizer import byte_tokenizer

DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
)


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    from tokenizers import pre_tokenizers

    tokenizer = byte_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


class FakeCore:
    """EngineCore without a model: every request is answered with its own prompt, over and over, a token a step."""

    default_sampling_params = SamplingParams()

    def __init__(self, step_seconds: float = 0.0, crash_at: int | None = None) -> None:
        self.tokenizer = chat_tokenizer()
        self.outputs = OutputProcessor(self.tokenizer)
        self.running: dict[str, Request] = {}
        self.pending: list[RequestOutput] = []
        self.step_seconds, self.crash_at = step_seconds, crash_at
        self.num_steps, self.aborted, self.threads, self.is_shut_down = 0, [], set[threading.Thread](), False  # type: ignore[var-annotated]
        self.preparing = set[threading.Thread]()
        self.on_step: Any = lambda: None

    def prepare(self, prompt: Any, params: SamplingParams) -> PreparedRequest:
        self.preparing.add(threading.current_thread())
        given, salt = parse_prompt(prompt)
        text, ids = (given, self.tokenizer.encode(given)) if isinstance(given, str) else (None, given)
        params.verify(256, 1000, len(ids))
        return PreparedRequest(text, ids, salt, params, ())

    def add_request(self, name: str, prompt: Any, params: SamplingParams) -> None:
        self.add_prepared(name, self.prepare(prompt, params))

    def add_prepared(self, name: str, prepared: PreparedRequest, **kwargs: Any) -> None:
        self.threads.add(threading.current_thread())
        text, ids, params = prepared.text, prepared.token_ids, prepared.params
        if name in self.outputs:
            raise ValueError(f"request_id {name!r} is in use")
        arrival = kwargs.pop("arrival_time", None) or time.time()
        for index in range(params.n):
            child = name if params.n == 1 else f"{name}#{index}"
            self.running[child] = Request(
                request_id=child, prompt_token_ids=ids, sampling_params=params, max_model_len=1000, **kwargs
            )
            parent = None if params.n == 1 else name
            self.outputs.add(child, text, ids, params, arrival, parent_id=parent, index=index)

    def abort(self, request_ids: Iterable[str]) -> None:
        running, outputs = self.outputs.abort(request_ids)
        self.aborted += running
        for name in running:
            del self.running[name]
        self.pending += outputs

    def has_unfinished(self) -> bool:
        return bool(self.running or self.pending)

    def step(self) -> list[RequestOutput]:
        self.threads.add(threading.current_thread())
        self.num_steps += 1
        time.sleep(self.step_seconds)
        self.on_step()
        if self.num_steps == self.crash_at:
            raise RuntimeError("device lost")
        outputs, self.pending = self.pending, []
        for request in list(self.running.values()):
            token = request.prompt_token_ids[len(request.output_token_ids) % len(request.prompt_token_ids)]
            request.append_token(token)
            request.status = request.check_stop(token) or request.status
            result = self.outputs.process(request, [token], None)
            if result.stop is not None or request.status.is_finished:
                del self.running[request.request_id]
            if result.output is not None:
                outputs.append(result.output)
        return outputs + self.outputs.flush()

    def warmup(self, progress: bool = True) -> None: ...

    def stats(self) -> int:
        return self.num_steps

    def shutdown(self) -> None:
        self.is_shut_down = True


def fake_llm(monkeypatch: pytest.MonkeyPatch, core: FakeCore | None = None) -> LLM:
    core = core or FakeCore()
    monkeypatch.setattr(EngineCore, "from_model", lambda *args: core)
    return LLM("model")


def serve(core: FakeCore) -> AsyncEngine:
    return AsyncEngine.from_core(core)  # type: ignore[arg-type]


def markov_core(**config: Any) -> EngineCore:
    """Counts upwards modulo 8, greedily."""
    table = np.where(np.eye(8, k=1) + np.eye(8, k=-7) > 0, 5.0, 0.0).astype(np.float32)
    return EngineCore.from_model(MarkovLM(table, max_model_len=64), None, EngineConfig(max_num_seqs=4, **config))


# ---- LLM ----


def test_the_arguments_are_those_of_the_config() -> None:
    expected = {f.name: f.default for f in fields(EngineConfig)}
    for kind, quiet in ((LLM, True), (AsyncEngine, False)):
        parameters = list(inspect.signature(kind.__init__).parameters.values())[3:]
        assert {p.name: p.default for p in parameters} == expected | {"disable_log_stats": quiet}


def test_arguments_reach_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(EngineCore, "from_model", lambda *args: seen.append(args) or FakeCore())
    values = {f.name: f.default for f in fields(EngineConfig)} | {"max_num_seqs": 3, "dtype": "float32", "seed": 7}
    LLM("model", "tokenizer", **values)
    AsyncEngine("model", "tokenizer", disable_log_stats=True, **values).shutdown()
    assert seen == [("model", "tokenizer", EngineConfig(**values))] * 2


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], [None]),
        (np.array([97, 98]), [None]),
        ([[97, 98], [99]], [None, None]),
        ({"prompt": "ab"}, ["ab"]),
        ([{"prompt": "ab"}, {"prompt_token_ids": [99], "cache_salt": "s"}, "d", [101]], ["ab", None, "d", None]),
        ([], []),
    ],
)
def test_forms_of_prompts(prompts: Any, texts: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = fake_llm(monkeypatch).generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    assert [o.prompt for o in outputs] == texts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1] * len(texts)


@pytest.mark.parametrize(
    "prompt",
    [
        *(3, None, b"a", {}, {"text": "a"}, {3: "a", "prompt": "a"}, {"prompt": "a", "prompt_token_ids": [1]}),
        *({"prompt": 1}, {"prompt": [1]}, {"prompt_token_ids": "a"}),
    ],
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"a prompt (must be|given as a dict)|^prompt(_token_ids)? is .* must be"):
        parse_prompt(prompt)


def test_outputs_in_order_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(max_tokens=n, output_kind=DELTA) for n in (5, 1, 3)]
    outputs = fake_llm(monkeypatch).generate(["abc", "d", "ef"], params, use_tqdm=False, priority=[2, 0, 1])
    assert [o.outputs[0].text for o in outputs] == ["abcab", "d", "efe"]
    assert all(o.finished for o in outputs)


def test_lengths_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_llm(monkeypatch)
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(ValueError, match="priority has 3 entries for 2 prompts"):
        llm.generate(["a", "b"], priority=[1, 2, 3])
    with pytest.raises(ValueError, match="sampling_params must be a SamplingParams or a list"):
        llm.generate("a", {"temperature": 0})  # type: ignore[arg-type]


def test_one_bad_prompt_stops_all_before_any_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    core = FakeCore()
    llm = fake_llm(monkeypatch, core)
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate(["a", [], "b"], use_tqdm=False)
    assert not core.has_unfinished()
    assert llm.generate("a", SamplingParams(n=2, max_tokens=1), use_tqdm=False)[0].outputs[1].text == "a"


def test_interrupt_aborts_what_is_outstanding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = FakeCore()
    llm = fake_llm(monkeypatch, core)
    interrupted: list[bool] = []

    def press() -> None:
        if core.num_steps == 3:
            signal.raise_signal(signal.SIGINT)
            interrupted.append(False)  # the step goes on to its end

    core.on_step = press
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=100), use_tqdm=False)
    assert interrupted == [False]
    assert core.aborted == ["0", "1"]
    assert not core.running
    outputs = llm.generate(["c", "d"], SamplingParams(max_tokens=2))
    assert [o.outputs[0].text for o in outputs] == ["cc", "dd"], "the engine serves on"
    assert "2/2" in capsys.readouterr().err.split("\r")[-1], "the ends of the aborted ones are not counted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_does_not_wait() -> None:
    pressed = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():  # noqa: PT012
        for i in range(3):
            pressed.append(i)
            signal.raise_signal(signal.SIGINT)
    assert pressed == [0, 1]


def test_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_llm(monkeypatch)
    one = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(one, SamplingParams(max_tokens=4), use_tqdm=False)
    assert (output.prompt, output.outputs[0].text) == ("user:hi;bot:", "user")
    two = llm.chat([one, [*one, {"role": "bot", "content": "ho"}]], use_tqdm=False, add_generation_prompt=False)
    assert [o.prompt for o in two] == ["user:hi;", "user:hi;bot:ho;"]
    (output,) = llm.chat(one, use_tqdm=False, chat_template="{{ x }}!", chat_template_kwargs={"x": "y"})
    assert output.prompt == "y!"


@pytest.mark.parametrize(
    ("tokenizer", "messages", "message"),
    [
        (None, [{"role": "user", "content": "hi"}], "needs a tokenizer"),
        (chat_tokenizer(None), [{"role": "user", "content": "hi"}], "no chat template"),
        (chat_tokenizer(), [], "messages is empty"),
        (chat_tokenizer(), ["hi"], "must be a dict"),
        (chat_tokenizer(), [{"content": "hi"}], "must be a dict with 'role'"),
        (chat_tokenizer("{{ raise_exception('no system') }}"), [{"role": "s", "content": ""}], "refuses .* no system"),
    ],
)
def test_chat_refused(tokenizer: Any, messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render_chat(tokenizer, messages)


# ---- AsyncEngine ----


async def collect(engine: AsyncEngine, prompt: Any, params: SamplingParams, **kwargs: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **kwargs)]


def test_output_kinds() -> None:
    async def run() -> None:
        async with serve(FakeCore()) as engine:
            deltas = await collect(engine, "abc", SamplingParams(max_tokens=5, output_kind=DELTA))
            assert [o.outputs[0].text for o in deltas] == ["a", "b", "c", "a", "b"]
            assert [o.finished for o in deltas] == [False] * 4 + [True]
            (final,) = await collect(engine, "abc", SamplingParams(max_tokens=5, output_kind=FINAL_ONLY))
            assert final.outputs[0].text == "abcab"
            states = await collect(engine, {"prompt": "abc"}, SamplingParams(max_tokens=5))
            assert states[-1].outputs[0].text == "abcab"
            assert all("abcab".startswith(o.outputs[0].text) for o in states)
            several = await collect(engine, "ab", SamplingParams(n=3, max_tokens=2, output_kind=FINAL_ONLY))
            assert [o.text for o in several[0].outputs] == ["ab"] * 3
            assert await engine.stats() > 0
            await engine.warmup(progress=False)
            assert engine.get_tokenizer() is not None

    asyncio.run(run())


def test_a_slow_consumer_sees_the_newest_state_and_every_delta() -> None:
    async def run() -> None:
        async with serve(FakeCore()) as engine:
            for kind, count in ((RequestOutputKind.CUMULATIVE, 2), (DELTA, 50)):
                outputs = []
                async for output in engine.generate("ab", SamplingParams(max_tokens=50, output_kind=kind)):
                    outputs.append(output)
                    await asyncio.sleep(0.2 if len(outputs) == 1 else 0)
                assert len(outputs) <= count
                assert outputs[-1].finished
                text = "".join(o.outputs[0].text for o in outputs) if kind is DELTA else outputs[-1].outputs[0].text
                assert text == "ab" * 25

    asyncio.run(run())


def test_many_callers_in_several_loops_use_one_engine_thread() -> None:
    core = FakeCore()
    engine = serve(core)
    results: dict[str, str] = {}

    async def one(prompt: str) -> None:
        outputs = await collect(engine, prompt, SamplingParams(max_tokens=8, output_kind=DELTA))
        results[prompt] = "".join(o.outputs[0].text for o in outputs)

    async def many(letter: str) -> None:
        await asyncio.gather(*(one(f"{letter}{i}") for i in range(50)))

    threads = [threading.Thread(target=lambda letter=letter: asyncio.run(many(letter))) for letter in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.shutdown()
    assert results == {f"{c}{i}": (f"{c}{i}" * 8)[:8] for c in "xyz" for i in range(50)}
    assert len(core.threads) == 1
    assert core.preparing.isdisjoint(core.threads | {*threads})  # nobody waits for a prompt
    assert core.is_shut_down


def test_without_parameters_those_of_the_model_are_taken() -> None:
    core = FakeCore()
    core.default_sampling_params = SamplingParams(max_tokens=5, output_kind=FINAL_ONLY)

    async def run() -> None:
        async with serve(core) as engine:
            (final,) = [output async for output in engine.generate("abc")]
            assert final.outputs[0].text == "abcab"

    asyncio.run(run())


def test_bad_input_is_raised_in_the_caller() -> None:
    async def run() -> None:
        async with serve(FakeCore(0.001)) as engine:
            for prompt, params in (
                ("", SamplingParams()),
                ("a", SamplingParams(stop_token_ids=[999])),
                (3, None),
                ("a", 3),
            ):
                with pytest.raises(ValueError, match=r"prompt|stop_token_ids|sampling_params"):
                    await collect(engine, prompt, params)  # type: ignore[arg-type]
            first = engine.generate("abc", SamplingParams(max_tokens=30), request_id="same")
            await anext(first)
            with pytest.raises(ValueError, match="in use"):
                await collect(engine, "x", SamplingParams(), request_id="same")
            outputs = [output async for output in first]
            assert outputs[-1].outputs[0].finish_reason == "length", "the refused one did not abort the first"

    asyncio.run(run())


def test_cancelling_and_closing_abort_the_request() -> None:
    core = FakeCore(0.001)

    async def run() -> None:
        async with serve(core) as engine:
            params = SamplingParams(max_tokens=None, output_kind=DELTA)
            task = asyncio.create_task(collect(engine, "ab", params, request_id="cancelled"))
            await asyncio.sleep(0.03)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stream = engine.generate("ab", params, request_id="closed")
            await anext(stream)
            await stream.aclose()
            again = await collect(engine, "cd", SamplingParams(max_tokens=2), request_id="closed")
            assert again[-1].outputs[0].text == "cd", "a freed id is not given the end of its former owner"
            early = asyncio.create_task(collect(engine, "ab", params, request_id="early"))
            await asyncio.sleep(0)
            early.cancel()
            await asyncio.gather(early, return_exceptions=True)
            await asyncio.sleep(0.05)
            assert not core.has_unfinished()

    asyncio.run(run())
    assert core.aborted[:2] == ["cancelled", "closed"]


def test_abort_gives_the_waiting_consumer_a_last_output() -> None:
    async def run() -> None:
        async with serve(FakeCore(0.001)) as engine:
            kinds = list(RequestOutputKind)
            params = [SamplingParams(max_tokens=None, output_kind=kind) for kind in kinds]
            tasks = [asyncio.create_task(collect(engine, "ab", p, request_id=p.output_kind.name)) for p in params]
            await asyncio.sleep(0.03)
            await engine.abort("unknown")
            await engine.abort([kind.name for kind in kinds])
            for outputs in await asyncio.gather(*tasks):
                assert outputs[-1].finished
                assert outputs[-1].outputs[0].finish_reason == "abort"

    asyncio.run(run())


def test_a_crash_reaches_every_caller() -> None:
    async def run() -> None:
        core = FakeCore(0.001, crash_at=10)
        engine = serve(core)
        params = SamplingParams(max_tokens=None)
        results = await asyncio.gather(*(collect(engine, "ab", params) for _ in range(5)), return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineDeadError)
            assert "device lost" in str(result)
            assert isinstance(result.__cause__, RuntimeError)
        assert not engine.is_running
        with pytest.raises(EngineDeadError, match="device lost"):
            await collect(engine, "ab", params)
        engine.shutdown()
        assert core.is_shut_down  # a core that failed frees its memory too

    asyncio.run(run())


def test_shutdown_ends_what_is_running() -> None:
    core = FakeCore(0.001)

    async def run() -> None:
        engine = serve(core)
        task = asyncio.create_task(collect(engine, "ab", SamplingParams(max_tokens=None)))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(engine.shutdown)
        assert (await task)[-1].outputs[0].finish_reason == "abort"
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(engine, "ab", SamplingParams())

    asyncio.run(run())
    assert core.is_shut_down


def test_a_loop_that_is_gone_does_not_hurt_the_others() -> None:
    core = FakeCore(0.001)
    engine = serve(core)
    loop = asyncio.new_event_loop()
    stream = engine.generate("ab", SamplingParams(max_tokens=None))
    loop.run_until_complete(anext(stream))
    loop.close()
    other = asyncio.run(collect(engine, "cd", SamplingParams(max_tokens=50)))
    assert other[-1].outputs[0].finish_reason == "length"
    assert len(core.aborted) == 1
    engine.shutdown()


def test_the_thread_sleeps_when_there_is_nothing_to_do() -> None:
    core = FakeCore()
    engine = serve(core)
    asyncio.run(collect(engine, "ab", SamplingParams(max_tokens=2)))
    steps = core.num_steps
    time.sleep(0.05)
    assert core.num_steps == steps
    engine.shutdown()


def test_with_the_real_core() -> None:
    async def run() -> None:
        async with AsyncEngine.from_core(markov_core()) as engine:
            params = [SamplingParams(temperature=0, max_tokens=n, output_kind=DELTA) for n in range(1, 9)]
            endless = asyncio.create_task(collect(engine, [0], SamplingParams(temperature=0, max_tokens=None)))
            results = await asyncio.gather(*(collect(engine, [i], p) for i, p in enumerate(params[:8])))
            for start, (p, outputs) in enumerate(zip(params, results, strict=True)):
                tokens = [token for o in outputs for token in o.outputs[0].token_ids]
                assert tokens == [(start + 1 + i) % 8 for i in range(p.max_tokens or 0)]
            endless.cancel()
            assert (await collect(engine, [3], SamplingParams(temperature=0, max_tokens=2)))[-1].finished

    asyncio.run(run())


@pytest.mark.parametrize("prefix", ["jaxserve:", "vllm:"])
def test_counters_of_speculation_live_on_in_a_registry(prefix: str) -> None:
    """Registered before the first request, read after the last: what the requests' own metrics add up to."""

    async def run() -> tuple[CollectorRegistry, RequestOutput]:
        registry = CollectorRegistry()
        speculation = {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2
        }  # fmt: skip
        async with AsyncEngine.from_core(markov_core(speculative_config=speculation)) as engine:
            await engine.register_metrics(registry, {"model_name": "markov"}, prefix)
            assert registry.get_sample_value(f"{prefix}spec_decode_num_drafts_total", {"model_name": "markov"}) == 0
            return registry, (await collect(engine, [0, 1, 2], SamplingParams(temperature=0, max_tokens=40)))[-1]

    registry, output = asyncio.run(run())
    metrics = output.metrics
    assert metrics is not None
    assert metrics.num_accepted_tokens > 0
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        value = registry.get_sample_value(f"{prefix}spec_decode_num_{name}_total", {"model_name": "markov"})
        assert value == getattr(metrics, f"num_{name}")
