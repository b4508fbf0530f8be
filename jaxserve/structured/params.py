"""What a request asks of structured output, checked when it is made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxserve.structured.json_keywords import refused_keyword
from jaxserve.structured.regex_syntax import check_regex, strip_anchors

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_JSON_KINDS = ("json", "json_object")
BACKENDS = ("auto", "table", "llguidance")
_TAG_LISTS = ("structures", "triggers")
MAX_CHARS = 1 << 20  # of the text of a grammar
MAX_DEPTH = 64  # of nested objects and arrays in a schema
MAX_CHOICES = 10_000


class GrammarKey(NamedTuple):
    """Equal keys compile to the same grammar, for one tokenizer. options: (name, value) of what is not the default."""

    kind: str
    text: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_json(self) -> bool:
        """Whether every text of the grammar is JSON."""
        return self.kind in _JSON_KINDS


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The language that an output must belong to: exactly one of the first six fields. Names are vLLM's.

    json: a JSON Schema: a dict, its text, or a pydantic model class.
    json_object: any JSON object.
    regex: a regular expression (Rust syntax) that the whole output matches. Anchors may stand at its two ends only.
    choice: the output is one of these strings.
    grammar: Lark, or EBNF as llama.cpp writes it (GBNF).
    structural_tag: free text with tagged sections, as vLLM's JSON: {"structures": [{"begin", "schema", "end"}],
        "triggers": [...]}.
    whitespace_pattern: regex of what may stand between the tokens of JSON, "" is nothing; None is at most one space,
        so that no model can spin on whitespace.
    disable_any_whitespace: JSON with no whitespace between its tokens. Excludes whitespace_pattern.
    disable_additional_properties: objects of a schema that does not say so are closed.
    lenient: keywords of a schema that cannot be enforced are ignored, with a warning, instead of refused. Only the
        llguidance backend knows it, so it excludes backend="table".
    backend: "table" (regular languages, no host work per step), "llguidance" (everything, masks made on the host), or
        "auto": a table where the language has one within the limits, else llguidance.

    Raises ValueError that names the field, also for a regex that does not compile as such or uses look-around,
    back-references or word boundaries, and for a keyword of a schema that no backend enforces.
    """

    json: str | dict[str, Any] | type | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    lenient: bool = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            raise ValueError(f"structured_outputs needs exactly one of {', '.join(KINDS)}; got {given or 'none'}")
        if self.backend not in BACKENDS:
            raise ValueError(f"structured_outputs.backend={self.backend!r} must be one of {', '.join(BACKENDS)}")
        self._check_options(given[0])
        text = getattr(self, f"_text_of_{given[0]}")()
        if len(text) > MAX_CHARS:
            raise ValueError(f"structured_outputs.{given[0]} has {len(text)} characters, must have at most {MAX_CHARS}")
        object.__setattr__(self, "_key", GrammarKey(given[0], text, self._options()))

    @property
    def kind(self) -> str:
        """Which of the six fields is given."""
        return self.key().kind

    def key(self) -> GrammarKey:
        """What the compiled grammar depends on, hashable."""
        key: GrammarKey = object.__getattribute__(self, "_key")
        return key

    def _options(self) -> tuple[tuple[str, Any], ...]:
        names = (
            "whitespace_pattern",
            "disable_any_whitespace",
            "disable_additional_properties",
            "lenient",
            "backend",
        )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        given = {name: getattr(self, name) for name in names if getattr(self, name) != defaults[name]}
        if "whitespace_pattern" in given:
            given["whitespace_pattern"] = strip_anchors(given["whitespace_pattern"])
        return tuple(given.items())

    def _check_options(self, kind: str) -> None:
        json_only = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "lenient")
        for name in json_only:
            if getattr(self, name) not in (None, False) and kind not in _JSON_KINDS:
                raise ValueError(f"structured_outputs.{name}={getattr(self, name)!r} is for json and json_object only")
        if self.whitespace_pattern is not None:
            if self.disable_any_whitespace:
                raise ValueError("structured_outputs.whitespace_pattern excludes disable_any_whitespace=True")
            if not isinstance(self.whitespace_pattern, str):
                raise ValueError(f"structured_outputs.whitespace_pattern={self.whitespace_pattern!r} must be a string")
            check_regex("structured_outputs.whitespace_pattern", self.whitespace_pattern)
        if self.backend == "table" and kind in ("json_object", "grammar", "structural_tag"):
            raise ValueError(f"structured_outputs.backend='table' cannot hold {kind}: it is not a regular language")
        if self.backend == "table" and self.lenient:
            raise ValueError("structured_outputs.lenient=True needs backend 'auto' or 'llguidance'; got 'table'")

    def _text_of_json(self) -> str:
        schema = self.json
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            _not_empty("json", schema)
            schema = _parse("json", schema)
        if not isinstance(schema, dict | bool):
            raise ValueError(f"structured_outputs.json={schema!r} must be a JSON Schema (an object, true or false)")
        _check_depth("json", schema)
        if not self.lenient:
            _check_keywords("json", schema)
        return _dump("json", schema)

    def _text_of_json_object(self) -> str:
        if self.json_object is not True:
            raise ValueError(f"structured_outputs.json_object={self.json_object!r} must be True or False")
        return '{"type":"object"}'

    def _text_of_regex(self) -> str:
        if not isinstance(self.regex, str):
            raise ValueError(f"structured_outputs.regex={self.regex!r} must be a string")
        _not_empty("regex", self.regex)
        check_regex("structured_outputs.regex", self.regex)
        return self.regex

    def _text_of_choice(self) -> str:
        choices = self.choice
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise ValueError(f"structured_outputs.choice={choices!r} must be a non-empty list of strings")
        if len(choices) > MAX_CHOICES:
            raise ValueError(f"structured_outputs.choice has {len(choices)} entries, must have at most {MAX_CHOICES}")
        for choice in choices:
            if not isinstance(choice, str) or not choice or "\0" in choice:
                raise ValueError(f"structured_outputs.choice: {choice!r} must be a non-empty string without NUL")
        return _dump("choice", list(choices))

    def _text_of_grammar(self) -> str:
        if not isinstance(self.grammar, str):
            raise ValueError(f"structured_outputs.grammar={self.grammar!r} must be a string")
        _not_empty("grammar", self.grammar)
        return self.grammar

    def _text_of_structural_tag(self) -> str:
        tag: Any = self.structural_tag
        if isinstance(tag, str):
            _not_empty("structural_tag", tag)
            tag = _parse("structural_tag", tag)
        if not isinstance(tag, dict) or not all(isinstance(tag.get(n), list) and tag[n] for n in _TAG_LISTS):
            raise ValueError('structured_outputs.structural_tag needs the non-empty lists "structures" and "triggers"')
        _check_depth("structural_tag", tag)
        _check_tags(tag)
        return _dump("structural_tag", tag)


def _check_tags(tag: dict[str, Any]) -> None:
    if tag.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f'structured_outputs.structural_tag: type={tag["type"]!r} must be "structural_tag"')
    _only_keys(tag, "type", *_TAG_LISTS)
    triggers = tag["triggers"]
    if not all(isinstance(t, str) and t for t in triggers):
        raise ValueError(f"structured_outputs.structural_tag: triggers={triggers!r} must be non-empty strings")
    for part in tag["structures"]:
        if not isinstance(part, dict) or not isinstance(part.get("begin"), str) or not isinstance(part.get("end"), str):
            raise ValueError(f'structured_outputs.structural_tag: {part!r} needs the strings "begin" and "end"')
        _only_keys(part, "begin", "schema", "end")
        if not isinstance(part.get("schema"), dict):
            raise ValueError(f'structured_outputs.structural_tag: {part["begin"]!r} needs an object as "schema"')
        _check_keywords("structural_tag", part["schema"])
        if not any(part["begin"].startswith(trigger) for trigger in triggers):
            raise ValueError(f"structured_outputs.structural_tag: {part['begin']!r} starts with none of {triggers!r}")


def _check_keywords(field: str, schema: Any) -> None:
    if (name := refused_keyword(schema)) is not None:
        lenient = "; lenient=True ignores it" if field == "json" else ""
        raise ValueError(f"structured_outputs.{field} has the keyword {name!r}, which cannot be enforced{lenient}")


def _only_keys(part: dict[str, Any], *known: str) -> None:
    if unknown := sorted(map(str, set(part) - set(known))):
        raise ValueError(f"structured_outputs.structural_tag has the keys {unknown}; known are {', '.join(known)}")


def _not_empty(field: str, text: str) -> None:
    if not text.strip():
        raise ValueError(f"structured_outputs.{field}={text!r} must not be empty")
    if "\0" in text:
        raise ValueError(f"structured_outputs.{field} holds NUL, which no output may contain")
    if len(text) > MAX_CHARS:  # before anything reads it
        raise ValueError(f"structured_outputs.{field} has {len(text)} characters, must have at most {MAX_CHARS}")


def _parse(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise _too_deep(field) from None
    except ValueError as error:
        raise ValueError(f"structured_outputs.{field} is not JSON: {error}") from None


def _dump(field: str, value: Any) -> str:
    """Compact, keys in their order: the order of declared properties is part of the language."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"structured_outputs.{field} is not JSON: {error}") from None


def _check_depth(field: str, value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        nested = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [item for items in nested for item in items]
        if not level:
            return
    raise _too_deep(field)


def _too_deep(field: str) -> ValueError:
    return ValueError(f"structured_outputs.{field} is nested deeper than {MAX_DEPTH} levels")
