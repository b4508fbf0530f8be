"""Random JSON Schemas, and random texts drawn token by token from what a matcher allows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.structured.matcher import Matcher
from jaxserve.structured.vocabulary import Vocabulary, legal_ids

NAMES = ["a", "b", "id", "name", 'q"x', "é", "a b", "k\\n", "日本", "x"]
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -3,
    1.5,
    "a",
    "",
    'q"',
    "日",
    "a\n",
    [],
    [1, "a"],
    {},
    {"k": 1},
    {"k": [None], "l": "m"},
]
PATTERNS = ["^a+$", "ab", "^[a-c]{2,3}$", "^(x|yz)*$", r"^\d{2}-\d$", r"^[^\"]?$", r"\\", "^é?[日本]$", "^.$"]
FORMATS = ["date", "ipv4", "uuid", "email", "time", "date-time", "hostname"]


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    """A satisfiable or unsatisfiable schema of everything that a table may enforce, and some of what only llguidance
    does: open objects, several constraints on one string, oneOf, allOf, recursion."""
    leaves = [_integer, _number, _string, _string, _literals, _simple]
    inner = [_object, _object, _array, _any_of, _types, _reference] if depth else []
    return rng.choice(leaves + inner + inner)(rng, depth)


def with_definitions(rng: random.Random, schema: Any) -> Any:
    """The schema's references point somewhere, in one of four cases back to the schema itself."""
    target = random_schema(rng, 1)
    if "$ref" in str(target):
        target = {"type": "integer"}
    if rng.random() < 0.25:
        link = {"anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}]}
        target = {"type": "object", "properties": {"n": link}, "required": ["n"], "additionalProperties": False}
    return {**schema, "$defs": {"d": target}}


def _reference(rng: random.Random, depth: int) -> Any:
    return {"$ref": "#/$defs/d"}


def _simple(rng: random.Random, depth: int) -> Any:
    return {"type": rng.choice(["null", "boolean", "string", "integer", "number"])}


def _bounds(rng: random.Random, value: Callable[[], Any]) -> dict[str, Any]:
    low, high = sorted([value(), value()])
    found = {}
    if rng.random() < 0.6:
        found[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        found[rng.choice(["maximum", "exclusiveMaximum"])] = high
    return found


def _integer(rng: random.Random, depth: int) -> Any:
    schema = {
        "type": "integer",
        **_bounds(rng, lambda: rng.choice([0, 1, -1, 7, 10, -25, 99, 100, 1234, rng.randint(-500, 500)])),
    }
    if rng.random() < 0.1:
        schema["multipleOf"] = rng.choice([1, 2, 3, 5, 7])
    return schema


def _number(rng: random.Random, depth: int) -> Any:
    return {
        "type": "number",
        **_bounds(rng, lambda: rng.choice([0, 1, -1, 0.5, -0.25, 2.75, 10, 99.9, 1e-3, rng.randint(-20, 20)])),
    }


def _string(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "string"}
    kind = rng.randrange(6)
    if kind == 0:
        schema["pattern"] = rng.choice(PATTERNS)
    elif kind == 1:
        schema["format"] = rng.choice(FORMATS)
    if kind == 2 or (kind == 0 and rng.random() < 0.2):
        low = rng.randint(0, 3)
        schema |= {"minLength": low, "maxLength": low + rng.randint(0, 3)}
    return schema


def _literals(rng: random.Random, depth: int) -> Any:
    if rng.random() < 0.3:
        return {"const": rng.choice(VALUES)}
    return {"enum": rng.sample(VALUES, rng.randint(1, 5))}


def _object(rng: random.Random, depth: int) -> Any:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {n: random_schema(rng, depth - 1) for n in names}}
    schema["required"] = [n for n in names if rng.random() < 0.5]
    if rng.random() < 0.75:
        schema["additionalProperties"] = False
    elif rng.random() < 0.5:
        schema["additionalProperties"] = random_schema(rng, 0)
    if rng.random() < 0.15:
        schema[rng.choice(["minProperties", "maxProperties"])] = rng.randint(0, 3)
    return schema


def _array(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "array"}
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        schema["items"] = rng.choice([False, random_schema(rng, 0)])
    else:
        schema["items"] = random_schema(rng, depth - 1)
    if rng.random() < 0.6:
        schema["minItems"] = rng.randint(0, 3)
    if rng.random() < 0.6:
        schema["maxItems"] = schema.get("minItems", 0) + rng.randint(0, 3)
    return schema


def _any_of(rng: random.Random, depth: int) -> Any:
    branches = [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {rng.choice(["anyOf", "anyOf", "oneOf", "allOf"]): branches}


def _types(rng: random.Random, depth: int) -> Any:
    return {"type": rng.sample(["null", "boolean", "integer", "string", "number"], rng.randint(1, 3))}


class Walker:
    """Draws tokens of which those that close something are likelier, so that texts end."""

    def __init__(self, vocabulary: Vocabulary, seed: int = 0) -> None:
        self.vocabulary = vocabulary
        self.rng = np.random.default_rng(seed)
        closing = [bool(b) and b[-1:] in b'"}],' for b in vocabulary.token_bytes]
        self._weight = np.where(closing, 30.0, 1.0)

    def draw(self, row: np.ndarray, stop_ids: frozenset[int]) -> int:
        ids = np.array(legal_ids(row, len(self.vocabulary)))
        weight = np.where(np.isin(ids, list(stop_ids)), 60.0, self._weight[ids])
        return int(self.rng.choice(ids, p=weight / weight.sum()))

    def walk(self, matcher: Matcher, stop_ids: frozenset[int], max_tokens: int = 300) -> tuple[list[int], bool]:
        """Tokens without the stop id, and whether the text came to its end."""
        out, tokens = np.empty((1, -(-len(self.vocabulary) // 32)), np.uint32), []
        while len(tokens) < max_tokens:
            if matcher.exhausted:
                return tokens, True
            matcher.fill((), out)
            token = self.draw(out[0], stop_ids)
            matcher.accept([token])
            if token in stop_ids:
                return tokens, True
            tokens.append(token)
        return tokens, False
