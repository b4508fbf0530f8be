"""What llguidance 1.9 gets wrong of JSON Schema, written so that it gets it right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from jaxserve.structured.errors import GrammarError, NoTableError
from jaxserve.structured.json_keywords import OF_LISTS, OF_ONE, OF_SCHEMAS, pointed, points_at_schema
from jaxserve.structured.json_numbers import MAX_FRACTION_DIGITS, closed_bound
from jaxserve.structured.json_strings import FORMATS
from jaxserve.structured.regex_parser import Ranges, map_classes

_LEAST = 10.0**-MAX_FRACTION_DIGITS  # above 0 that is written


def as_enforced(schema: Any, close: bool, lenient: bool) -> Any:
    """`schema` in words that llguidance enforces. close: see `closed`. lenient: what is not enforced stays. Raises
    GrammarError that names a keyword."""

    def change(node: dict[str, Any]) -> dict[str, Any]:
        if not lenient:
            _check(node)
        return _with_formats(_with_closed_bounds(_with_null(_without_uniqueness(node))))

    schema = _mapped(_without_nul(_with_definitions(schema)), change)
    return closed(schema) if close else schema


def _with_definitions(schema: Any) -> Any:
    """What is referred to where no keyword holds schemas, as in #/components/schemas, becomes a definition, where it is
    found by what follows."""
    names: dict[str, str] = {}  # by reference
    definitions: dict[str, Any] = {}

    def change(node: dict[str, Any]) -> dict[str, Any]:
        ref = node.get("$ref")
        if not isinstance(ref, str) or not ref.startswith("#/") or points_at_schema(ref):
            return node
        if ref not in names:
            names[ref] = f"referred.{len(names)}"
            definitions[names[ref]] = _mapped(pointed(schema, ref), change)
        return {**node, "$ref": f"#/$defs/{names[ref]}"}

    changed = _mapped(schema, change)
    return {**changed, "$defs": {**changed.get("$defs", {}), **definitions}} if definitions else changed


def _check(node: dict[str, Any]) -> None:
    if "prefixItems" in node and isinstance(node.get("items"), list):
        raise _refused("prefixItems", "not enforced beside a list of items")
    if node.get("nullable") is True and "type" not in node:
        raise _refused("nullable", "not enforced without a type")
    required, least = node.get("required"), node.get("minProperties")
    named = len(required) if isinstance(required, list) else 0
    is_open = node.get("additionalProperties") is not False or "patternProperties" in node
    if is_open and isinstance(least, int | float) and least > named + 1:
        raise _refused("minProperties", "not enforced where a name that is not required may come twice")


def _refused(keyword: str, why: str) -> GrammarError:
    return GrammarError(f"JSON Schema: {keyword}: {why}")


def _without_uniqueness(node: dict[str, Any]) -> dict[str, Any]:
    """llguidance refuses the keyword also where it asks for nothing."""
    return {k: v for k, v in node.items() if k != "uniqueItems"} if node.get("uniqueItems") is False else node


def _with_null(node: dict[str, Any]) -> dict[str, Any]:
    """`nullable` of OpenAPI, which llguidance takes for an annotation."""
    if "nullable" not in node or "type" not in node:
        return node
    types = node["type"] if isinstance(node["type"], list) else [node["type"]]
    rest = {name: value for name, value in node.items() if name != "nullable"}
    return {**rest, "type": [*types, "null"]} if node["nullable"] is True and "null" not in types else rest


def _with_closed_bounds(node: dict[str, Any]) -> dict[str, Any]:
    """Numbers are held to inclusive bounds, which rounding to a double does not cross; llguidance also lets an excluded
    whole number pass where the other bound is less than 1 away. Bounds of integers stay as exact as they are.

    What it costs: below 0.999999999999999 llguidance takes 0.90, but not 0.9."""
    if node.get("type") == "integer":
        return node
    changed = dict(node)
    for closed_name, open_name, up in (
        ("minimum", "exclusiveMinimum", True),
        ("maximum", "exclusiveMaximum", False),
    ):
        bounds = [_inside(value, True, up) for value in _numbers(node.get(closed_name))]
        if excluded := _numbers(node.get(open_name)):
            bounds += [_inside(value, False, up) for value in excluded]
            del changed[open_name]
        if bounds:
            changed[closed_name] = max(bounds) if up else min(bounds)
    return changed


def _inside(value: int | float, included: bool, up: bool) -> int | float:
    if value == 0 and not included:
        return _LEAST if up else -_LEAST
    bound = closed_bound(Decimal(str(value)), included, up)  # also since llguidance misreads bounds of more digits
    return int(bound) if bound == int(bound) else float(bound)


def _numbers(value: Any) -> list[int | float]:
    """`value` if it is a number that a double holds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return [value] if is_number and abs(value) < 1e300 else []


def _with_formats(node: dict[str, Any]) -> dict[str, Any]:
    """The formats of tables: llguidance's know no leap years, no lengths of hosts, and end in no digits."""
    name = node.get("format")
    if not isinstance(name, str) or name not in FORMATS:
        return node
    rest = {key: value for key, value in node.items() if key != "format"}
    regex = f"^(?:{FORMATS[name]})$"
    if "pattern" not in node:
        return {**rest, "pattern": regex}
    others = node.get("allOf", [])
    return {**rest, "allOf": [*others, {"pattern": regex}]} if isinstance(others, list) else node


def escapes(schema: Any) -> dict[str, Any]:
    r"""llguidance 1.9 takes \u0061 for another key than a, so that what is said of one would not hold for the other. In
    a schema with an object of named and other keys no \u is legal: then every key has one spelling."""
    for node in _nodes(schema):
        is_open = node.get("additionalProperties") is not False and ("properties" in node or "required" in node)
        if is_open or "patternProperties" in node:
            return {"json_allowed_escapes": 'nrbtf\\"'}
    return {}


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


def closed(schema: Any) -> Any:
    """`schema` with additionalProperties: false in every object schema that says nothing of it."""

    def close(node: dict[str, Any]) -> dict[str, Any]:
        if len(node.get("allOf", ())) > 1 or ("allOf" in node and "properties" in node):
            raise _refused(
                "allOf", "not together with disable_additional_properties: each part would exclude the others"
            )
        types = node.get("type")
        is_object = "properties" in node or types == "object" or (isinstance(types, list) and "object" in types)
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
        if name in OF_SCHEMAS and isinstance(value, dict):
            result[name] = {key: _mapped(inner, change) for key, inner in value.items()}
        elif name in OF_LISTS and isinstance(value, list):
            result[name] = [_mapped(inner, change) for inner in value]
        elif name in OF_ONE:
            result[name] = _mapped(value, change)
    return change(result)
