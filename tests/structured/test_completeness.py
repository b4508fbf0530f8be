"""Valid texts, however a real tokenizer's vocabulary cuts them into tokens, are legal from token to token."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxserve.structured.dfa import GrammarLimits
from jaxserve.structured.errors import NoTableError
from jaxserve.structured.lark import to_lark
from jaxserve.structured.matcher import LLTokens, Matcher, MatcherGrammar, TableMatcher
from jaxserve.structured.params import StructuredOutputsParams
from jaxserve.structured.vocabulary import Vocabulary
from jaxserve.structured.worker import compile_grammar

STOPS = frozenset({2})
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    },
    "required": ["name"],
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "status": {"enum": ["open", "paid", "sent"]},
        "total": {"type": "number", "minimum": 0, "exclusiveMaximum": 10000},
        "lines": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"sku": {"type": "string"}, "count": {"type": "integer", "minimum": 1}},
                "required": ["sku", "count"],
                "additionalProperties": False,
            },
        },
        "note": {"type": ["string", "null"]},
    },
    "required": ["id", "lines"],
    "additionalProperties": False,
}
EVENT = {
    "anyOf": [
        {"type": "object", "properties": {"kind": {"const": "click"}, "at": {"type": "array", "prefixItems": [
            {"type": "integer"}, {"type": "integer"}], "items": False}}, "required": ["kind", "at"],
            "additionalProperties": False},
        {"type": "object", "properties": {"kind": {"const": "key"}, "key": {"type": "string", "maxLength": 3}},
            "required": ["kind", "key"], "additionalProperties": False},
    ]
}  # fmt: skip
CASES: list[tuple[Any, list[Any]]] = [
    (PERSON, [{"name": "Ada"}, {"name": "José \"Pepe\" Ñandú\n", "email": "jose.n@mail.example.co.uk", "tags": []},
              {"name": "日本 🙂", "born": "2024-02-29", "tags": ["a", "b\\c"], "more": {"x": [1.5e-3, None, True]}}]),
    ({**PERSON, "additionalProperties": False}, [{"name": "x", "email": "me@localhost", "tags": ["", "0"]}]),
    (TREE, [{"value": -0.5}, {"value": 1e10, "children": [{"value": 2, "children": []}, {"value": 3.25}]}]),
    (ORDER, [{"id": "AB-1234", "lines": [{"sku": "x/1", "count": 12}]},
             {"id": "ZZ-0000", "status": "paid", "total": 1234.56, "lines": [{"sku": "", "count": 1}] * 3,
              "note": None}]),
    (EVENT, [{"kind": "click", "at": [12, -7]}, {"kind": "key", "key": "é\t"}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b c": -20, "日": 3}]),
    ({"type": "object", "patternProperties": {"^x-": {"type": "boolean"}}, "additionalProperties": False},
     [{"x-a": True, "x-b": False}]),
    ({"type": "array", "items": {"type": ["integer", "string", "null"]}, "minItems": 2}, [[1, "two", None], ["", ""]]),
    ({"type": "object"}, [{"any": {"thing": [[], {}, "\u001b", 1e-7]}}]),
    ({"type": "object", "properties": {"t": {"type": "string", "nullable": True}}, "additionalProperties": False},
     [{}, {"t": "a"}]),
    ({"type": "string", "format": "date-time"}, ["1996-12-19T16:39:57.123456-08:00"]),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}, [3, 9]),
    ({"enum": ["red", 1, None, {"a": [1, {}]}]}, ["red", 1, None, {"a": [1, {}]}]),
]  # fmt: skip


def random_tokens(vocabulary: Vocabulary, text: bytes, rng: random.Random) -> list[int]:
    """Any of the ways to spell `text`: at every place a token of any length that fits."""
    tokens, at = [], 0
    while at < len(text):
        fits = [size for size in range(1, min(16, len(text) - at) + 1) if text[at : at + size] in vocabulary._id_of]
        size = rng.choice(fits)
        tokens.append(vocabulary._id_of[text[at : at + size]])
        at += size
    return tokens


def matchers(schema: Any, vocabulary: Vocabulary, tokens: LLTokens) -> dict[str, Any]:
    """What makes a matcher, by backend."""
    key = StructuredOutputsParams(json=schema).key()
    grammar = MatcherGrammar(tokens, to_lark(key), STOPS, is_json=True)
    made: dict[str, Any] = {"llguidance": grammar.new_matcher}
    try:
        table = compile_grammar(key, vocabulary, STOPS, GrammarLimits())
    except NoTableError:
        return made
    return {**made, "table": lambda: TableMatcher(table)}


def first_illegal(matcher: Matcher, tokens: list[int], words: int) -> int | None:
    legal = matcher.fill([*tokens, 2], np.empty((len(tokens) + 2, words), np.uint32))
    return None if legal == len(tokens) + 1 else legal


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_tokenisation_of_a_valid_text_is_legal(smollm: Vocabulary, smollm_tokens: LLTokens, case: int) -> None:
    schema, values = CASES[case]
    rng, words = random.Random(case), -(-len(smollm) // 32)
    for value in values:
        jsonschema.validate(value, schema)
        for name, make in matchers(schema, smollm, smollm_tokens).items():
            for separators in ((",", ":"), (", ", ": ")):
                text = json.dumps(value, ensure_ascii=False, separators=separators).encode()
                for spelling in [smollm.tokenize(text), *(random_tokens(smollm, text, rng) for _ in range(20))]:
                    place = first_illegal(make(), spelling, words)
                    assert place is None, (name, text, smollm.decode(spelling[:place]))


def test_schemas_that_neither_enforces_are_refused(smollm_tokens: LLTokens) -> None:
    for schema in ({"type": "array", "uniqueItems": True}, {"not": {}}, {"type": "object", "minProperties": 2}):
        with pytest.raises(ValueError, match="|".join(schema)):
            MatcherGrammar(smollm_tokens, to_lark(StructuredOutputsParams(json=schema).key()), STOPS)
