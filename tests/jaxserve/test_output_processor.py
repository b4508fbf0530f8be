"""OutputProcessor: what users see of a request, for every output kind, end and n."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import Logprob, RequestOutput
from jaxserve.request import Request, RequestStatus
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from tests.jaxserve.spelled import SpelledTokenizer, spelled_model
from tests.jaxserve.test_detokenizer import byte_tokenizer

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
EOS = 0


class Harness:
    """The engine's part: appends tokens, lets the request end by its own rules, and calls the processor."""

    def __init__(self, tokenizer: Any = None, **params: Any) -> None:
        self.processor = OutputProcessor(byte_tokenizer() if tokenizer is None else tokenizer)
        params.setdefault("max_tokens", 100)
        self.params = SamplingParams(**params)
        self.requests: list[Request] = []
        n = self.params.n
        for index in range(n):
            name = "r" if n == 1 else f"r#{index}"
            self.requests.append(
                Request(
                    request_id=name,
                    prompt_token_ids=[112],
                    sampling_params=self.params,
                    max_model_len=200,
                    eos_token_ids=frozenset([EOS]),
                )
            )
            parent = None if n == 1 else "r"
            self.processor.add(name, "p", [112], self.params, 1.0, parent_id=parent, index=index)

    def feed(self, text: str | bytes, index: int = 0, logprobs: list[float] | None = None) -> RequestOutput | None:
        """One step in which one sequence gets these tokens."""
        request, new = self.requests[index], []
        for token in text.encode() if isinstance(text, str) else text:
            request.append_token(token)
            new.append(token)
            if status := request.check_stop(token):
                request.status = status
                break
        found = None if logprobs is None else [{t: (v, 1)} for t, v in zip(new, logprobs, strict=True)]
        result = self.processor.process(request, new, found)
        if result.stop is not None:
            request.status = RequestStatus.FINISHED_STOPPED
        return result.output


def only(output: RequestOutput | None) -> Any:
    assert output is not None
    (completion,) = output.outputs
    return completion


def test_cumulative() -> None:
    h = Harness()
    first, second = h.feed("ab"), h.feed("c\0")
    assert first is not None
    assert second is not None
    assert (first.request_id, first.prompt, first.prompt_token_ids, first.finished) == ("r", "p", [112], False)
    assert (only(first).text, only(first).token_ids, only(first).finish_reason) == ("ab", [97, 98], None)
    assert (only(second).text, only(second).token_ids) == ("abc", [97, 98, 99, EOS])
    assert (only(second).finish_reason, only(second).stop_reason, second.finished) == ("stop", None, True)
    assert only(first).token_ids == [97, 98], "an output handed out does not change later"


def test_delta() -> None:
    h = Harness(output_kind=DELTA, max_tokens=5)
    outputs = [only(h.feed(text)) for text in ("ab", b"\xe6\x97", b"\xa5")]
    assert [o.text for o in outputs] == ["ab", "", "日"]
    assert [o.token_ids for o in outputs] == [[97, 98], [0xE6, 0x97], [0xA5]]
    assert [o.finish_reason for o in outputs] == [None, None, "length"]


def test_final_only() -> None:
    h = Harness(output_kind=FINAL_ONLY)
    assert h.feed("ab") is None
    output = h.feed("c\0")
    assert (only(output).text, only(output).finish_reason) == ("abc", "stop")
    assert "r" not in h.processor


def test_stop_string_over_steps() -> None:
    h = Harness(output_kind=DELTA, stop=["STOP"], include_stop_str_in_output=False)
    assert only(h.feed("aS")).text == "a"
    assert only(h.feed("TO")).text == ""
    output = h.feed("Pxyz")
    assert output is not None
    assert output.finished
    assert (only(output).text, only(output).token_ids) == ("", [80]), "tokens behind the match are not part of it"
    assert (only(output).finish_reason, only(output).stop_reason) == ("stop", "STOP")
    assert "r" not in h.processor


def test_stop_string_wins_over_the_end_that_follows_it() -> None:
    for text in ("xENDz\0", "xEND\0", "xEND"):
        h = Harness(stop="END", max_tokens=len(text))
        output = only(h.feed(text))
        assert (output.text, output.finish_reason, output.stop_reason) == ("x", "stop", "END")
        assert bytes(output.token_ids) == b"xEND"


def test_no_stop_string_in_the_text_of_the_ending_token() -> None:
    output = only(Harness(stop="b", stop_token_ids=[98]).feed("ab"))
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", 98)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_stop_token(include: bool, text: str) -> None:
    output = only(Harness(stop_token_ids=[98], include_stop_str_in_output=include).feed("abc"))
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == (text, [97, 98], "stop", 98)


def test_end_of_sequence_is_hidden_also_when_it_is_a_stop_token() -> None:
    output = only(Harness(stop_token_ids=[EOS], skip_special_tokens=False).feed("a\0"))
    assert (output.text, output.stop_reason) == ("a", None)


def test_ignore_eos() -> None:
    output = only(Harness(ignore_eos=True, max_tokens=3).feed("a\0b"))
    assert (output.text, output.finish_reason) == ("a\0b", "length")


def test_held_back_text_comes_with_the_last_output() -> None:
    h = Harness(output_kind=DELTA, stop=["END"], max_tokens=3)
    assert only(h.feed("aE")).text == "a"
    assert only(h.feed("N")).text == "EN"


def test_a_grammar_that_is_complete_ends_without_a_stop_token() -> None:
    h = Harness()
    h.requests[0].status = RequestStatus.FINISHED_STOPPED
    assert only(h.processor.process(h.requests[0], [97, 98], None).output).text == "ab"


def test_error() -> None:
    h = Harness(output_kind=DELTA)
    h.feed("a")
    h.requests[0].status, h.requests[0].error = RequestStatus.FINISHED_ERROR, "logits are NaN"
    output = h.processor.process(h.requests[0], [], None).output
    assert output is not None
    assert output.finished
    assert (only(output).finish_reason, only(output).error, only(output).token_ids) == ("error", "logits are NaN", [])


def test_logprobs() -> None:
    h = Harness(logprobs=0, output_kind=DELTA, stop="c")
    first = only(h.feed("ab", logprobs=[-1.0, -0.5]))
    assert first.logprobs == [{97: Logprob(-1.0, 1, "a")}, {98: Logprob(-0.5, 1, "b")}]
    second = only(h.feed("cd", logprobs=[-0.25, -9.0]))
    assert second.logprobs == [{99: Logprob(-0.25, 1, "c")}]
    assert second.cumulative_logprob == -1.75
    plain = only(Harness().feed("ab"))
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)


def test_without_text() -> None:
    assert only(Harness(detokenize=False).feed("ab")).text == ""
    processor = OutputProcessor(None)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        processor.validate(SamplingParams(stop="x"))
    processor.add("r", None, [1], SamplingParams(), 0.0)


def test_metrics() -> None:
    h = Harness(max_tokens=2)
    h.requests[0].first_scheduled_time, h.requests[0].num_cached_tokens = 2.0, 16
    h.requests[0].num_preemptions = 1
    h.feed("a")
    h.requests[0].num_preemptions = 3
    output = h.feed("b")
    assert output is not None
    assert output.num_cached_tokens == 16
    metrics = output.metrics
    assert metrics is not None
    assert (metrics.arrival_time, metrics.first_scheduled_time, metrics.num_preemptions) == (1.0, 2.0, 3)
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.first_token_time <= metrics.finished_time


def test_ids_in_use() -> None:
    h = Harness(n=2)
    assert "r" in h.processor
    assert "r#1" in h.processor
    with pytest.raises(ValueError, match="in use"):
        h.processor.add("r#0", "p", [1], h.params, 0.0, parent_id="r", index=0)
    with pytest.raises(ValueError, match="in use"):
        h.processor.add("r", "p", [1], SamplingParams(), 0.0)


def test_several_sequences_cumulative() -> None:
    h = Harness(n=3, max_tokens=2)
    assert h.feed("a", 0) is None
    assert h.feed("b", 2) is None
    (output,) = h.processor.flush()
    assert [(o.index, o.text) for o in output.outputs] == [(0, "a"), (1, ""), (2, "b")]
    assert h.processor.flush() == []
    for index in (2, 1, 0):
        h.feed("xy"[: 2 if index == 1 else 1], index)
    (output,) = h.processor.flush()
    assert output.request_id == "r"
    assert output.finished
    assert [o.text for o in output.outputs] == ["ax", "xy", "bx"]
    assert [o.finish_reason for o in output.outputs] == ["length"] * 3


def test_several_sequences_delta() -> None:
    h = Harness(n=3, max_tokens=2, output_kind=DELTA)
    h.feed("b", 2)
    h.feed("a", 0)
    (output,) = h.processor.flush()
    assert [(o.index, o.text) for o in output.outputs] == [(0, "a"), (2, "b")]
    h.feed("c", 0)
    (output,) = h.processor.flush()
    assert [(o.index, o.text, o.finish_reason) for o in output.outputs] == [(0, "c", "length")]
    assert not output.finished
    h.feed("de", 1)
    h.feed("f", 2)
    (output,) = h.processor.flush()
    assert [(o.index, o.text) for o in output.outputs] == [(1, "de"), (2, "f")]
    assert output.finished


def test_several_sequences_final_only() -> None:
    h = Harness(n=2, max_tokens=1, output_kind=FINAL_ONLY)
    h.feed("a", 1)
    assert h.processor.flush() == []
    h.feed("b", 0)
    (output,) = h.processor.flush()
    assert [o.text for o in output.outputs] == ["b", "a"]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_abort(kind: RequestOutputKind) -> None:
    h = Harness(output_kind=kind, stop=["bc"])
    h.feed("ab")
    running, (output,) = h.processor.abort(["r", "unknown", "r"])
    assert running == ["r"]
    assert output.finished
    assert (only(output).finish_reason, only(output).text) == ("abort", "b" if kind is DELTA else "ab")
    assert h.feed("c") is None, "tokens still in flight give nothing"
    assert h.processor.abort(["r"]) == ([], [])


def test_abort_of_several_sequences() -> None:
    h = Harness(n=3, max_tokens=2)
    h.feed("ab", 1)
    running, (output,) = h.processor.abort(["r"])
    assert running == ["r#0", "r#2"]
    assert [o.finish_reason for o in output.outputs] == ["abort", "length", "abort"]
    assert output.finished
    assert h.processor.flush() == []
    assert "r" not in h.processor


def test_abort_of_one_sequence() -> None:
    h = Harness(n=2, max_tokens=2, output_kind=FINAL_ONLY)
    assert h.processor.abort(["r#0"]) == (["r#0"], [])
    h.feed("ab", 1)
    (output,) = h.processor.flush()
    assert [o.finish_reason for o in output.outputs] == ["abort", "length"]


def test_cost_for_64_requests() -> None:
    """A step of 64 streaming requests, a token each: text and outputs in well under a millisecond of host time."""
    processor = OutputProcessor(byte_tokenizer())
    params = SamplingParams(output_kind=DELTA, max_tokens=None, stop=["\n\n"])
    requests = []
    for i in range(64):
        requests.append(
            Request(request_id=str(i), prompt_token_ids=[112] * 100, sampling_params=params, max_model_len=10**6)
        )
        processor.add(str(i), "p", [112] * 100, params, 0.0)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        for request in requests:
            processor.process(request, [97], None)
        processor.flush()
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3


def test_a_tokenizer_that_raises_ends_its_request_alone(make_engine: Any, alphabet: Any, drive: Any) -> None:
    class Picky:
        all_special_ids = ()

        def __len__(self) -> int:
            return alphabet.vocab_size

        def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
            if 3 in ids:
                raise RuntimeError("no such token")
            return "x" * len(ids)

    engine = make_engine(alphabet, Picky(), structured_outputs_config=None)
    for name, token in (("bad", 3), ("good", 2)):
        engine.add_request(name, [1], SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[token]))
    outputs = {name: output.outputs[0] for name, output in drive(engine).items()}
    assert outputs["bad"].finish_reason == "error"
    assert "no such token" in outputs["bad"].error
    assert (outputs["good"].finish_reason, len(outputs["good"].token_ids)) == ("length", 4)


def test_several_outputs_whose_grammar_does_not_compile(make_engine: Any, drive: Any) -> None:
    engine = make_engine(spelled_model(), SpelledTokenizer())
    params = SamplingParams(n=2, structured_outputs={"grammar": "start: ghost"})
    engine.add_request("many", [1], params)
    outputs = drive(engine)["many"].outputs
    assert [output.finish_reason for output in outputs] == ["error"] * 2
