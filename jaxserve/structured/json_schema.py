"""The regular part of JSON Schema as a regular expression over JSON text.

Every text of the expression is valid. Every valid text is in it as well, up to: the order of properties (the declared
one), whitespace (between tokens, as given), numbers (MAX_INTEGER_DIGITS and MAX_FRACTION_DIGITS; integers without point
and exponent; no exponent where there are bounds), and literals and patterns (escaped only where JSON asks for it).
Whatever is outside raises Unsupported with the keyword's name, and nothing is ever ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from jaxserve.structured.errors import GrammarError, LimitError, NoTableError
from jaxserve.structured.json_disjoint import disjoint, types_of
from jaxserve.structured.json_keywords import pointed
from jaxserve.structured.json_numbers import (
    MAX_INTEGER_DIGITS,
    alternatives,
    closed_bound,
    integer_range,
    number_range,
)
from jaxserve.structured.json_strings import FORMATS, enclosed, literal, pattern, string

DEFAULT_WHITESPACE = "[ ]?"
_ANNOTATIONS = {
    "$schema", "$comment", "$defs", "definitions", "title", "description", "default", "example", "examples",
    "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "discriminator",
}  # fmt: skip
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "boolean": set(),
    "null": set(),
}
_TYPED = set().union(*_OF_TYPE.values())
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class Unsupported(NoTableError):
    """A schema that no table is made of: `keyword` is what stands in the way."""

    def __init__(self, keyword: str, why: str) -> None:
        super().__init__(f"JSON Schema: {keyword}: {why}")
        self.keyword = keyword


def schema_to_regex(
    schema: dict[str, Any] | bool,
    *,
    whitespace: str = DEFAULT_WHITESPACE,
    close_objects: bool = False,
    max_chars: int = 64 * 1024,
) -> str:
    """The expression of the JSON texts that are valid under `schema` and have no whitespace around them.

    whitespace: expression of what may stand between tokens. close_objects: an object schema without
    additionalProperties has additionalProperties: false. Raises Unsupported, LimitError when the expression is longer
    than max_chars, and GrammarError when nothing is valid.
    """
    space = f"(?:{whitespace})" if whitespace else ""
    emitter = _Emitter(schema, space, close_objects, max_chars)
    result = emitter.emit(schema)
    if result is None:
        raise GrammarError("JSON Schema: no value is valid")
    return result


@dataclass
class _Emitter:
    """Expressions of schemas; None where no value is valid."""

    root: Any
    space: str
    close_objects: bool
    max_chars: int
    _open_refs: list[str] = field(default_factory=list)
    _known_refs: dict[str, str | None] = field(default_factory=dict)

    def emit(self, schema: Any) -> str | None:
        if schema is False:
            return None
        if schema is True:
            raise Unsupported("true", "any value may stand there, which is not regular")
        if not isinstance(schema, dict):
            raise GrammarError(f"JSON Schema: {schema!r} is not a schema")
        result = self._emit_object(schema)
        if result is not None and len(result) > self.max_chars:
            raise LimitError(f"JSON Schema: the expression is longer than {self.max_chars} characters")
        return result

    def _emit_object(self, schema: dict[str, Any]) -> str | None:
        for name in ("$ref", "enum", "const", "anyOf", "oneOf", "allOf"):
            if name in schema:
                break
        else:
            return self._typed(schema)
        emit: dict[str, Callable[[dict[str, Any]], str | None]] = {
            "$ref": self._reference,
            "enum": self._literals,
            "const": self._literals,
            "anyOf": self._any_of,
            "oneOf": self._one_of,
            "allOf": self._all_of,
        }
        return emit[name](schema)

    def _only(self, schema: dict[str, Any], *allowed: str) -> None:
        """Refuses keywords beside `allowed` ones and annotations."""
        for name in schema:
            if name not in allowed and name not in _ANNOTATIONS:
                beside = ", ".join(a for a in allowed if a in schema)
                raise Unsupported(name, f"no table enforces it{' beside ' if beside else ''}{beside}")

    def _reference(self, schema: dict[str, Any]) -> str | None:
        self._only(schema, "$ref")
        ref = schema["$ref"]
        if ref in self._open_refs:
            raise Unsupported("$ref", f"{ref!r} is recursive")
        if ref not in self._known_refs:
            self._open_refs.append(ref)
            self._known_refs[ref] = self.emit(resolve(self.root, ref))
            self._open_refs.pop()
        return self._known_refs[ref]

    def _literals(self, schema: dict[str, Any]) -> str | None:
        self._only(schema, "enum", "const", "type", "nullable")
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(values, list):
            raise GrammarError(f"JSON Schema: enum: {values!r} is not a list")
        if "enum" in schema and "const" in schema:
            values = [v for v in values if _same(v, schema["const"])]
        if "type" in schema:
            allowed = types_of({"type": schema["type"]}) | ({"null"} if schema.get("nullable") else set())
            values = [v for v in values if types_of({"const": v}) & allowed]
        return alternatives([literal(v, self.space) for v in values])

    def _any_of(self, schema: dict[str, Any], name: str = "anyOf") -> str | None:
        self._only(schema, name)
        branches = [self.emit(branch) for branch in _schemas(schema, name)]
        return alternatives([branch for branch in branches if branch is not None])

    def _one_of(self, schema: dict[str, Any]) -> str | None:
        branches = [self._resolved(branch) for branch in _schemas(schema, "oneOf")]
        for i, one in enumerate(branches):
            if not all(disjoint(one, other, self._resolved) for other in branches[:i]):
                raise Unsupported("oneOf", "the branches are not provably disjoint")
        return self._any_of(schema, "oneOf")

    def _resolved(self, schema: Any) -> Any:
        seen: set[str] = set()
        while isinstance(schema, dict) and "$ref" in schema and schema["$ref"] not in seen:
            seen.add(schema["$ref"])
            schema = resolve(self.root, schema["$ref"])
        return schema

    def _all_of(self, schema: dict[str, Any]) -> str | None:
        self._only(schema, "allOf")
        branches = _schemas(schema, "allOf")
        if len(branches) != 1:
            raise Unsupported("allOf", "more than one schema has to hold at once")
        return self.emit(branches[0])

    def _typed(self, schema: dict[str, Any]) -> str | None:
        if "type" not in schema:
            self._only(schema, *_TYPED)
            raise Unsupported("type", "it is missing, and any value may stand there, which is not regular")
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        for name in types:
            if name not in _OF_TYPE:
                raise GrammarError(f"JSON Schema: type: {name!r} is none of {', '.join(_OF_TYPE)}")
        # A keyword of another type says nothing about these.
        self._only(schema, "type", "nullable", *_TYPED)
        options = [getattr(self, f"_{name}")(schema) for name in dict.fromkeys(types)]
        if schema.get("nullable") is True:
            options.append("null")
        return alternatives([option for option in options if option is not None])

    def _null(self, schema: dict[str, Any]) -> str:
        return "null"

    def _boolean(self, schema: dict[str, Any]) -> str:
        return "(?:true|false)"

    def _integer(self, schema: dict[str, Any]) -> str | None:
        low, high, low_included, high_included = _bounds(schema)
        first = None if low is None else math.ceil(low) + (not low_included and low == math.ceil(low))
        last = None if high is None else math.floor(high) - (not high_included and high == math.floor(high))
        self._check_size(schema, first, last)
        return integer_range(first, last)

    def _number(self, schema: dict[str, Any]) -> str | None:
        low, high, low_included, high_included = _bounds(schema)
        if low is not None and _is_crossed(low, low_included):
            low, low_included = closed_bound(low, low_included, up=True), True
        if high is not None and _is_crossed(high, high_included):
            high, high_included = closed_bound(high, high_included, up=False), True
        self._check_size(schema, low, high)
        return number_range(low, high, low_included, high_included)

    @staticmethod
    def _check_size(schema: dict[str, Any], low: Decimal | int | None, high: Decimal | int | None) -> None:
        size = 10**MAX_INTEGER_DIGITS
        if (low is not None and low >= size) or (high is not None and high <= -size):
            name = next(n for n in _BOUNDS if schema.get(n) is not None and abs(schema[n]) >= size // 10)
            raise Unsupported(name, f"a number has at most {MAX_INTEGER_DIGITS} digits")

    def _string(self, schema: dict[str, Any]) -> str | None:
        low, high = _count(schema, "minLength"), _count(schema, "maxLength")
        bounded = bool(low) or high is not None
        if bounded + ("pattern" in schema) + ("format" in schema) > 1:
            names = [n for n in ("minLength", "maxLength", "pattern", "format") if n in schema]
            raise Unsupported(" and ".join(names), "not enforced together")
        if "pattern" in schema:
            return pattern(schema["pattern"])
        if "format" in schema:
            if schema["format"] not in FORMATS:
                raise Unsupported("format", f"{schema['format']!r} is none of {', '.join(FORMATS)}")
            return f'"(?:{FORMATS[schema["format"]]})"'
        return None if high is not None and high < (low or 0) else string(low or 0, high)

    def _array(self, schema: dict[str, Any]) -> str | None:
        if schema.get("uniqueItems") and _count(schema, "maxItems") not in (0, 1):
            raise Unsupported("uniqueItems", "not regular")
        low, high = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        prefix, rest = _item_schemas(schema)
        if high is not None:
            prefix = prefix[:high]
        items = [self.emit(item) for item in prefix]
        if None in items:  # no value for this place, so arrays end before it
            high = items.index(None)
            items = items[:high]
        tail = self.emit(rest) if high is None or high > len(items) else None
        if tail is None:
            high = len(items)
        return None if high is not None and high < low else self._sequence([i or "" for i in items], tail, low, high)

    def _sequence(self, items: list[str], tail: str | None, low: int, high: int | None) -> str:
        """An array of `items`, then `tail` again and again; `low` to `high` values in all."""
        comma = f"{self.space},{self.space}"
        body = ""
        if tail is not None:
            first, most = max(low - len(items), 0), None if high is None else high - len(items)
            body = _repeated(tail, comma, first, most, leading=bool(items))
        for i in range(len(items) - 1, -1, -1):
            body = (comma if i else "") + items[i] + body
            if i >= low:
                body = f"(?:{body})?"
        return enclosed(r"\[", [body] if body else [], r"\]", self.space)

    def _object(self, schema: dict[str, Any]) -> str | None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        closed = schema.get("additionalProperties", not self.close_objects)
        if closed is not False:
            raise Unsupported("additionalProperties", "objects with other properties than the declared are not regular")
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise GrammarError("JSON Schema: properties must be an object and required a list")
        members = []
        for name, value in properties.items():
            text = self.emit(value)
            if text is None and name in required:
                return None
            if text is not None:
                key = f"{literal(name, '')}{self.space}:{self.space}{text}"
                members.append((key, name in required))
        if set(required) - set(properties):
            return None
        low, high = _count(schema, "minProperties") or 0, _count(schema, "maxProperties")
        needed = sum(is_required for _, is_required in members)
        if low > needed or (high is not None and high < len(members)):
            if len(members) < low or (high is not None and high < needed):
                return None
            raise Unsupported("minProperties" if low > needed else "maxProperties", "optional properties are counted")
        return enclosed(r"\{", [self._members(members)] if members else [], r"\}", self.space)

    def _members(self, members: list[tuple[str, bool]]) -> str:
        """Members in order, some optional. The first one that is there has no comma before it."""
        comma = f"{self.space},{self.space}"
        first = next((i for i, (_, required) in enumerate(members) if required), None)
        if first is not None:
            head = "".join(f"(?:{text}{comma})?" for text, _ in members[:first])
            return head + members[first][0] + self._rest(members[first + 1 :], comma)
        return f"(?:{self._some(members, comma)})?"

    def _some(self, members: list[tuple[str, bool]], comma: str) -> str:
        """At least one of members that are all optional: some of the first half and any of the second, or some of the
        second. So n members are written n log n times in all; one expression for each that may come first takes n^2."""
        if len(members) == 1:
            return members[0][0]
        one, other = members[: len(members) // 2], members[len(members) // 2 :]
        made = f"(?:{self._some(one, comma)}{self._rest(other, comma)}|{self._some(other, comma)})"
        if len(made) > self.max_chars:
            raise LimitError(f"JSON Schema: the expression is longer than {self.max_chars} characters")
        return made

    @staticmethod
    def _rest(members: list[tuple[str, bool]], comma: str) -> str:
        return "".join(f"{comma}{text}" if required else f"(?:{comma}{text})?" for text, required in members)


def _repeated(item: str, comma: str, low: int, high: int | None, leading: bool) -> str:
    """`item` `low` to `high` times with commas between, and one before the first if `leading`."""
    if high == 0:
        return ""
    if leading:
        return f"(?:{comma}{item}){{{low},{'' if high is None else high}}}"
    more = f"(?:{comma}{item}){{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
    return f"{item}{more}" if low else f"(?:{item}{more})?"


def resolve(root: Any, ref: Any) -> Any:
    """The schema at a reference inside `root`: "#" or a JSON pointer. Raises Unsupported, GrammarError."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise Unsupported("$ref", f"{ref!r} is no JSON pointer inside the schema")
    return pointed(root, ref)


def _same(one: Any, other: Any) -> bool:
    """Equality of JSON values: 1 equals 1.0, but not true."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True) or (
        types_of({"const": one}) == types_of({"const": other}) and one == other and not isinstance(one, dict | list)
    )


def _schemas(schema: dict[str, Any], name: str) -> list[Any]:
    branches = schema[name]
    if not isinstance(branches, list) or not branches:
        raise GrammarError(f"JSON Schema: {name}: {branches!r} is not a non-empty list")
    return branches


def _item_schemas(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    """Of the first places, and of all others. Drafts before 2020-12 write both as `items` and `additionalItems`."""
    items = schema.get("items", True)
    if isinstance(items, list):
        if "prefixItems" in schema:
            raise Unsupported("prefixItems", "not enforced beside a list of items")
        return items, schema.get("additionalItems", True)
    if "additionalItems" in schema:
        raise Unsupported("additionalItems", "not enforced without a list of items")
    return schema.get("prefixItems", []), items


def _count(schema: dict[str, Any], name: str) -> int | None:
    value = schema.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise GrammarError(f"JSON Schema: {name}: {value!r} is no count")
    return int(value)


def _is_crossed(bound: Decimal, included: bool) -> bool:
    """Whether a number within the bound may be read as a double past it. Not next to 0, where doubles are denser than
    the decimals that are written; nor where the bound is itself a double and allowed."""
    return bool(bound) if not included else abs(bound) >= 1 << 53


def _bounds(schema: dict[str, Any]) -> tuple[Decimal | None, Decimal | None, bool, bool]:
    """low, high, whether low is included, whether high is."""
    if schema.get("multipleOf", 1) != 1 or ("multipleOf" in schema and schema["type"] != "integer"):
        raise Unsupported("multipleOf", "not enforced")
    values = {}
    for name in _BOUNDS:
        value = schema.get(name)
        if isinstance(value, bool):
            raise Unsupported(name, "true and false, of draft 4, are not enforced")
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise GrammarError(f"JSON Schema: {name}: {value!r} is no number")
        values[name] = None if value is None else Decimal(str(value))
    lows = [(v, i) for v, i in ((values["minimum"], True), (values["exclusiveMinimum"], False)) if v is not None]
    highs = [(v, i) for v, i in ((values["maximum"], True), (values["exclusiveMaximum"], False)) if v is not None]
    low, low_included = max(lows, key=lambda b: (b[0], not b[1]), default=(None, True))
    high, high_included = min(highs, key=lambda b: (b[0], b[1]), default=(None, True))
    return low, high, low_included, high_included
