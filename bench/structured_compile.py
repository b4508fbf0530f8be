"""How long tables of structured output take to compile, and how large they are.

    python bench/structured_compile.py [--tekken FILE] [--repeats 5] [--json FILE]

On the demo model's vocabulary (49152 tokens), and with --tekken on that of a file in Mistral's tekken format (one of
131072 tokens comes with the package mistral-common). In this process, so the figures are those of one job of a worker,
whose start is not counted. llguidance's column is the time until its matcher has made the first mask, where it takes
the grammar.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve import StructuredOutputsParams
from jaxserve.structured.config import StructuredOutputsConfig
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.lark import to_lark
from jaxserve.structured.matcher import LLTokens, MatcherGrammar
from jaxserve.structured.table import TokenTable
from jaxserve.structured.vocabulary import Vocabulary
from jaxserve.structured.worker import compile_grammar
from models.gguf import demo_model_path
from models.gguf_tokenizer import tokenizer_from_gguf

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "at": {"type": "string", "format": "date-time"},
        "customer": PERSON,
        "lines": {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 5},
        "state": {"enum": ["open", "paid", "sent", "returned"]},
    },
    "required": ["id", "customer", "state"],
    "additionalProperties": False,
}
OPTIONAL = {
    "type": "object",
    "properties": {f"field_{i}": {"type": ["integer", "null"]} for i in range(20)},
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "choice of 3": {"choice": ["positive", "negative", "neutral"]},
    "choice of 500": {"choice": [f"label {i * 7919}" for i in range(500)]},
    "phone number": {"regex": r"\+[0-9]{1,3} [0-9]{3}-[0-9]{4}"},
    "e-mail": {"regex": r"[a-z0-9._]+@[a-z0-9]+(\.[a-z]{2,})+"},
    "any line": {"regex": r"[^\n]{1,200}"},
    "integer": {"json": {"type": "integer"}},
    "number 0 to 100": {"json": {"type": "number", "minimum": 0, "maximum": 100}},
    "string": {"json": {"type": "string"}},
    "string to 20": {"json": {"type": "string", "maxLength": 20}},
    "string to 100": {"json": {"type": "string", "maxLength": 100}},
    "date-time": {"json": {"type": "string", "format": "date-time"}},
    "person": {"json": PERSON},
    "order": {"json": ORDER},
    "20 optional": {"json": OPTIONAL},
    "any of 3": {"json": {"anyOf": [PERSON, {"type": "integer"}, {"type": "array", "items": PERSON, "maxItems": 3}]}},
}


def demo_vocabulary() -> Vocabulary:
    path = demo_model_path()
    assert path is not None, "the demo model is not installed"
    return Vocabulary.from_tokenizer(tokenizer_from_gguf(path))


def tekken_vocabulary(file: Path) -> Vocabulary:
    """Ids of special tokens come first; what the file holds past the vocabulary's size is not used."""
    tekken = json.loads(file.read_text())
    special, size = (tekken["config"][f"default_{name}"] for name in ("num_special_tokens", "vocab_size"))
    spelled = [base64.b64decode(token["token_bytes"]) for token in tekken["vocab"]]
    return Vocabulary((*[None] * special, *spelled[: size - special]))


def timed(make: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Milliseconds (median), and what was made."""
    samples, made = [], None
    for _ in range(repeats):
        started = time.perf_counter()
        made = make()
        samples.append(1e3 * (time.perf_counter() - started))
    return statistics.median(samples), made


def measure(name: str, grammar: dict[str, Any], vocabulary: Vocabulary, tokens: LLTokens, repeats: int) -> dict:
    config = StructuredOutputsConfig()
    key, stop = StructuredOutputsParams(**grammar).key(), frozenset({0})
    found: dict[str, Any] = {"name": name, "vocabulary": len(vocabulary)}
    try:
        found["ms"], table = timed(lambda: compile_grammar(key, vocabulary, stop, config.limits), repeats)
        found |= {"states": table.num_states, "classes": table.transitions.shape[1], "masks": len(table.masks)}
        found["kilobytes"] = table.num_bytes / 1e3
        assert isinstance(table, TokenTable)
    except GrammarError as error:
        found["no_table"] = str(error)

    def first_mask() -> Any:
        return MatcherGrammar(tokens, to_lark(key), stop, config.matcher_limits).new_matcher()

    try:
        found["llguidance_ms"], _ = timed(first_mask, repeats)
    except (GrammarError, ValueError) as error:
        found["no_matcher"] = str(error)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tekken", type=Path, help="a second vocabulary, in Mistral's format")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    vocabularies = [demo_vocabulary()]
    if args.tekken:
        vocabularies.append(tekken_vocabulary(args.tekken))
    results = []
    for vocabulary in vocabularies:
        tokens = LLTokens(vocabulary)
        measure("", {"choice": ["a"]}, vocabulary, tokens, 1)  # what is cached of a vocabulary
        print(f"\n{len(vocabulary)} tokens; ms are medians of {args.repeats}")
        print(f"{'grammar':<16}{'ms':>8}{'states':>8}{'classes':>9}{'masks':>7}{'kB':>8}{'llguidance ms':>15}")
        rows = [measure(name, grammar, vocabulary, tokens, args.repeats) for name, grammar in GRAMMARS.items()]
        for row in rows:
            matcher = f"{row['llguidance_ms']:>15.2f}" if "llguidance_ms" in row else f"{'-':>15}"
            if "ms" in row:
                print(f"{row['name']:<16}{row['ms']:>8.1f}{row['states']:>8}{row['classes']:>9}{row['masks']:>7}"
                      f"{row['kilobytes']:>8.0f}{matcher}")  # fmt: skip
            else:
                print(f"{row['name']:<16}{'no table: ' + row['no_table'][:38]:>40}{matcher}")
        print(f"median of the tables: {statistics.median(row['ms'] for row in rows if 'ms' in row):.1f} ms")
        results += rows
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
