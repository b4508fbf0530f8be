"""Every kind of structured output as llguidance reads it: a grammar in its dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jaxserve.structured.errors import GrammarError
from jaxserve.structured.gbnf import gbnf_to_lark, is_lark
from jaxserve.structured.json_guided import as_enforced, escapes
from jaxserve.structured.json_schema import DEFAULT_WHITESPACE
from jaxserve.structured.params import GrammarKey
from jaxserve.structured.regex_syntax import strip_anchors
from jaxserve.structured.structural_tag import structural_tag_to_lark

# Without this, where one continuation is left, only the tokenizer's own spelling of it would be legal.
_NO_FORCING = '%llguidance {"no_forcing": true}'


def to_lark(key: GrammarKey) -> str:
    """The grammar of `key`. Raises GrammarError; whether llguidance takes the grammar is known when it compiles it."""
    text = _TRANSLATORS[key.kind](key.text, dict(key.options))
    if key.kind == "grammar" and is_lark(key.text) and "%llguidance" in text:
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
    schema = as_enforced(schema, bool(options.get("disable_additional_properties")), bool(options.get("lenient")))
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {**_json_options(options), **escapes(schema)}}
    return f"%json {json.dumps(schema)}"


def _json_options(options: dict[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {"lenient": True, "coerce_one_of": True} if options.get("lenient") else {}
    space = options.get("whitespace_pattern", DEFAULT_WHITESPACE)
    if options.get("disable_any_whitespace") or not space:
        return {**chosen, "whitespace_flexible": False}
    return {**chosen, "whitespace_pattern": space}
