"""The structure of JSON Schema: which keywords hold schemas, and which are enforced by no backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    for node in _schemas(schema):
        for name in node:
            if name in ENFORCED_NOWHERE:
                return name
    return None


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas that are dicts, from outside in, without those in definitions."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for name, value in node.items():
            if name in OF_SCHEMAS - DEFINITIONS and isinstance(value, dict):
                stack += value.values()
            elif name in OF_LISTS and isinstance(value, list):
                stack += value
            elif name in OF_ONE:
                stack.append(value)
