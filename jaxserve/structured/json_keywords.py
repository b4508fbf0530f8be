"""The structure of JSON Schema: which keywords hold schemas, and which are enforced by no backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from jaxserve.structured.errors import GrammarError

DEFINITIONS = {"$defs", "definitions"}
OF_SCHEMAS = {"properties", "patternProperties", "dependentSchemas"} | DEFINITIONS  # keywords: a dict of schemas
OF_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems", "items"}
OF_ONE = {"items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains"}
ENFORCED_NOWHERE = {
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef"),
}


def refused_keyword(schema: Any) -> str | None:
    """A keyword in `schema` that neither tables nor llguidance enforce, wherever it stands but in definitions, which
    may not be used."""
    return next((name for node in _schemas(schema) for name in node if name in ENFORCED_NOWHERE), None)


def pointed(root: Any, ref: str) -> Any:
    """What a JSON pointer, "#/...", points at. Raises GrammarError."""
    node = root
    for key in _keys(ref):
        if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, dict) and key in node:
            node = node[key]
        else:
            raise GrammarError(f"JSON Schema: $ref: {ref!r} points nowhere")
    return node


def points_at_schema(ref: str) -> bool:
    """Whether a JSON pointer leads through keywords that hold schemas."""
    keys = _keys(ref)
    at = 0
    while at < len(keys):
        rest = keys[at + 1 :]
        if rest and (keys[at] in OF_SCHEMAS or (keys[at] in OF_LISTS and rest[0].isdecimal())):
            at += 2
        elif keys[at] in OF_ONE:
            at += 1
        else:
            return False
    return True


def _keys(ref: str) -> list[str]:
    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in ref.split("/")[1:]]


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas that are dicts, from outside in, without those in definitions."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for name, value in node.items():
            if name in DEFINITIONS:
                continue
            if name in OF_SCHEMAS and isinstance(value, dict):
                stack += value.values()
            elif name in OF_LISTS and isinstance(value, list):
                stack += value
            elif name in OF_ONE:
                stack.append(value)
