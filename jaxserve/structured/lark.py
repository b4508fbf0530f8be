"""Every kind of structured output as llguidance reads it: a grammar in its dialect of Lark."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from jaxserve.structured.dfa import GrammarError, NoTableError
from jaxserve.structured.gbnf import gbnf_to_lark, is_lark
from jaxserve.structured.json_schema import DEFAULT_WHITESPACE
from jaxserve.structured.params import GrammarKey
from jaxserve.structured.regex_parser import Ranges, map_classes
from jaxserve.structured.regex_syntax import strip_anchors
from jaxserve.structured.structural_tag import structural_tag_to_lark

# Without this, where one continuation is left, only the tokenizer's own spelling of it would be legal.
_NO_FORCING = '%llguidance {"no_forcing": true}'


def to_lark(key: GrammarKey) -> str:
    """The grammar of `key`. Raises GrammarError; whether llguidance takes the grammar is known when it compiles it."""
    text = _TRANSLATORS[key.kind](key.text, dict(key.options))
    if "%llguidance" in text:
        raise GrammarError("grammar: the directive %llguidance is not for requests to give")
    return f"{text}\n{_NO_FORCING}\n"


def _regex(text: str, options: dict[str, Any]) -> str:
    from llguidance import regex_to_lark

    return f"start: /{regex_to_lark(strip_anchors(text), '')}/"


def _choice(text: str, options: dict[str, Any]) -> str:
    return f"start: {' | '.join(json.dumps(choice) for choice in json.loads(text))}"


def _json(text: str, options: dict[str, Any]) -> str:
    return f"start: {_json_rule(json.loads(text), options)}"


def _grammar(text: str, options: dict[str, Any]) -> str:
    return text if is_lark(text) else gbnf_to_lark(text)


def _structural_tag(text: str, options: dict[str, Any]) -> str:
    return structural_tag_to_lark(json.loads(text), lambda schema: _json_rule(schema, options))


_TRANSLATORS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "json": _json,
    "json_object": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}


def _json_rule(schema: Any, options: dict[str, Any]) -> str:
    """The values of a schema. Options of llguidance travel inside the schema, so its own there are refused."""
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise GrammarError("JSON Schema: x-guidance: not enforced; its options are fields of structured_outputs")
    _check_bounds(schema)
    schema = _without_nul(schema)
    if options.get("disable_additional_properties"):
        schema = closed(schema)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": _json_options(options)}
    return f"%json {json.dumps(schema)}"


def _check_bounds(schema: Any) -> None:
    """llguidance 1.9 takes a whole number for legal that is excluded, where the other bound is less than 1 away."""
    for node in _nodes(schema):
        low, high = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
        above, below = _numbers(node.get("maximum"), high), _numbers(node.get("minimum"), low)
        for name, excluded, others in (("exclusiveMinimum", low, above), ("exclusiveMaximum", high, below)):
            for whole in _numbers(excluded):
                if whole == int(whole) and any(abs(other - whole) < 1 for other in others):
                    raise GrammarError(f"JSON Schema: {name}: {whole} is not enforced beside a bound less than 1 away")


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in a schema, itself included."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack += node.values()
        elif isinstance(node, list):
            stack += node


def _numbers(*values: Any) -> list[float]:
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)]


def _json_options(options: dict[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {"lenient": True, "coerce_one_of": True} if options.get("lenient") else {}
    if options.get("disable_any_whitespace"):
        return {**chosen, "whitespace_flexible": False}
    return {**chosen, "whitespace_pattern": options.get("whitespace_pattern") or DEFAULT_WHITESPACE}


_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_OF_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems", "items"}
_OF_ONE = {"items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains"}


def closed(schema: Any) -> Any:
    """`schema` with additionalProperties: false in every object schema that says nothing of it."""

    def close(node: dict[str, Any]) -> dict[str, Any]:
        is_object = "properties" in node or node.get("type") == "object"
        return {"additionalProperties": False, **node} if is_object else node

    return _mapped(schema, close)


def _without_nul(schema: Any) -> Any:
    """llguidance 1.9 takes the escapes of a quote and of a backslash for members of every class that holds all control
    characters, such as [^"]. One that holds not both loses NUL, which no table allows either."""

    def change_class(ranges: Ranges) -> Ranges:
        def holds(low: int, high: int) -> bool:
            return any(first <= low and high <= last for first, last in ranges)

        if holds(0, 0x1F) and not (holds(0x22, 0x22) and holds(0x5C, 0x5C)):
            return ((1, ranges[0][1]), *ranges[1:])
        return ranges

    def plain(regex: Any) -> Any:
        try:
            return map_classes(regex, change_class) if isinstance(regex, str) else regex
        except NoTableError as error:
            if "[^" not in regex:  # a class that llguidance may know
                return regex
            raise GrammarError(f"JSON Schema: pattern: {regex!r} is not enforced: {error}") from error

    def change(node: dict[str, Any]) -> dict[str, Any]:
        changed = dict(node)
        if "pattern" in node:
            changed["pattern"] = plain(node["pattern"])
        if isinstance(by_name := node.get("patternProperties"), dict):
            changed["patternProperties"] = {plain(name): inner for name, inner in by_name.items()}
        return changed

    return _mapped(schema, change)


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """`change` of every schema that is a dict, `schema` and those in it, from inside out; not of the values in them."""
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name, value in schema.items():
        if name in _OF_SCHEMAS and isinstance(value, dict):
            result[name] = {key: _mapped(inner, change) for key, inner in value.items()}
        elif name in _OF_LISTS and isinstance(value, list):
            result[name] = [_mapped(inner, change) for inner in value]
        elif name in _OF_ONE:
            result[name] = _mapped(value, change)
    return change(result)
