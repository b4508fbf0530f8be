"""When two JSON Schemas provably have no value in common."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_ALL = frozenset({"object", "array", "string", "number", "boolean", "null"})
_TYPE_OF = {dict: "object", list: "array", str: "string", int: "number", float: "number", bool: "boolean"}


def types_of(schema: Any) -> set[str]:
    """The JSON types that a valid value may have; "integer" counts as "number" unless a literal is asked for.

    A literal integer has both, so that it passes either.
    """
    values = _literals(schema)
    if values is not None:
        return set().union(*(_types_of_value(v) for v in values))
    if not isinstance(schema, dict) or "type" not in schema:
        return set(_ALL)
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return set(types) | ({"null"} if schema.get("nullable") else set())


def _types_of_value(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    found = {_TYPE_OF[type(value)]}
    if found == {"number"} and value == int(value):
        found.add("integer")
    return found


def _literals(schema: Any) -> list[Any] | None:
    if isinstance(schema, dict) and "const" in schema:
        return [schema["const"]]
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        return schema["enum"]
    return None


def disjoint(one: Any, other: Any, resolved: Callable[[Any], Any], depth: int = 4) -> bool:
    """Whether no value is valid under both: by type, by literals, or by a property that both require."""
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    first, second = _broad(types_of(one)), _broad(types_of(other))
    if not first & second:
        return True
    literals, others = _literals(one), _literals(other)
    if literals is not None and others is not None:
        return not {_canonical(v) for v in literals} & {_canonical(v) for v in others}
    if first & second != {"object"} or depth == 0:
        return False
    return _disjoint_property(one, other, resolved, depth)


def _broad(types: set[str]) -> set[str]:
    return {"number" if t == "integer" else t for t in types}


def _disjoint_property(one: Any, other: Any, resolved: Callable[[Any], Any], depth: int) -> bool:
    """A property that one requires and the other, closed, does not know; or that both describe, disjointly."""
    for this, that in ((one, other), (other, one)):
        for name in this.get("required", []):
            theirs = that.get("properties", {})
            if name not in theirs:
                if that.get("additionalProperties") is False:
                    return True
            elif name in this.get("properties", {}):
                ours = resolved(this["properties"][name])
                if disjoint(ours, resolved(theirs[name]), resolved, depth - 1):
                    return True
    return False


def _canonical(value: Any) -> str:
    """Equal for equal JSON values; 1 and 1.0 are equal."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_canonical(v)}" for k, v in sorted(value.items())) + "}"
    return json.dumps(value)
