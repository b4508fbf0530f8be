"""Free text with tagged sections, each held to a JSON Schema, as a grammar in Lark."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def structural_tag_to_lark(tag: dict[str, Any], json_rule: Callable[[Any], str]) -> str:
    """tag: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, checked. json_rule: the grammar's
    expression of a schema's values.

    Text is free up to the first trigger, however often it is written; then one of the structures that begin with it
    must come, and text is free again behind its end. Where two triggers fit a structure the shorter one counts: it is
    written first.
    """
    text = "TEXT: /(.|\\n)*/"  # a trigger ends it: rules marked lazy stop at their first match
    sections, rules = [], []
    for index, (trigger, structures) in enumerate(_by_trigger(tag).items()):
        bodies = [_body(trigger, structure, json_rule) for structure in structures]
        sections.append(f"section_{index}")
        rules.append(f"trigger_{index}[lazy]: TEXT {json.dumps(trigger)}")
        rules.append(f"section_{index}: trigger_{index} ({' | '.join(bodies)})")
    return "\n".join([f"start: ({' | '.join(sections)})* TEXT", text, *rules])


def _by_trigger(tag: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for structure in tag["structures"]:
        trigger = min((t for t in tag["triggers"] if structure["begin"].startswith(t)), key=len)
        groups.setdefault(trigger, []).append(structure)
    return groups


def _body(trigger: str, structure: dict[str, Any], json_rule: Callable[[Any], str]) -> str:
    """What follows a trigger."""
    begin, end = structure["begin"][len(trigger) :], structure["end"]
    parts = [json.dumps(begin) if begin else "", json_rule(structure["schema"]), json.dumps(end) if end else ""]
    return " ".join(part for part in parts if part)
