"""Regular expressions of JSON strings: by length, by pattern, by format; and of literal JSON values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from jaxserve.structured.errors import GrammarError, NoTableError

_HEX = "[0-9a-fA-F]"
_ESCAPED_SURROGATES = rf"\\u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
_ESCAPED_UNIT = rf"\\u(?:[0-9abcefABCEF]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}})"
# 0x7f is legal in JSON, but llguidance does not offer it, and no text needs it.
CHARACTER = rf'(?:[^"\\\x00-\x1f\x7f]|\\["\\/bfnrt]|{_ESCAPED_UNIT}|{_ESCAPED_SURROGATES})'
_SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_LAST = 0x10FFFF
Ranges = list[tuple[int, int]]  # of code points, both ends included


class UnsupportedPattern(NoTableError):
    """A `pattern` outside what can be rewritten for the text between the quotes of a JSON string."""


def escape(text: str) -> str:
    """The expression that matches `text` and nothing else."""
    return re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", text)


def string(min_length: int = 0, max_length: int | None = None) -> str:
    """Strings of so many characters. An escape, and an escaped surrogate pair, is one character."""
    if min_length == 0 and max_length is None:
        return f'"{CHARACTER}*"'
    return f'"{CHARACTER}{{{min_length},{"" if max_length is None else max_length}}}"'


def literal(value: Any, whitespace: str) -> str:
    """Exactly this JSON value, as json.dumps writes it, with whitespace between its tokens."""
    if isinstance(value, dict):
        colon = f"{whitespace}:{whitespace}"
        items = [f"{literal(k, whitespace)}{colon}{literal(v, whitespace)}" for k, v in value.items()]
        return enclosed(r"\{", items, r"\}", whitespace)
    if isinstance(value, list):
        return enclosed(r"\[", [literal(v, whitespace) for v in value], r"\]", whitespace)
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise GrammarError(f"{json.dumps(value)} holds half a surrogate pair, which no output can contain") from None
    return escape(text)


def enclosed(start: str, items: list[str], end: str, whitespace: str) -> str:
    comma = f"{whitespace},{whitespace}"
    return f"{start}{whitespace}{comma.join(items)}{whitespace}{end}" if items else f"{start}{whitespace}{end}"


def pattern(regex: str) -> str:
    """Strings in which `regex` (ECMA 262 syntax, as in JSON Schema) is found, anywhere unless it is anchored.

    Characters that JSON escapes are matched by their escapes. Escapes that JSON does not ask for (a for a) are not
    offered. Raises UnsupportedPattern that names the feature.
    """
    try:
        tree = _parser.parse(regex)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedPattern(f"pattern {regex!r} is not understood: {error}") from None
    if tree.state.flags & ~re.UNICODE.value:
        raise UnsupportedPattern(f"pattern {regex!r} sets flags")
    branches = [list(b) for b in tree[0][1][1]] if len(tree) == 1 and tree[0][0] is ops.BRANCH else [list(tree)]
    return f'"(?:{"|".join(_searched(branch) for branch in branches)})"'


def _searched(branch: list[Any]) -> str:
    at_start = bool(branch) and branch[0] == (ops.AT, ops.AT_BEGINNING)
    branch = branch[at_start:]
    at_end = bool(branch) and branch[-1] == (ops.AT, ops.AT_END)
    body = _sequence(branch[: len(branch) - at_end])
    return f"{'' if at_start else CHARACTER + '*'}{body}{'' if at_end else CHARACTER + '*'}"


def _sequence(nodes: Iterable[Any]) -> str:
    return "".join(_node(op, value) for op, value in nodes)


def _node(op: Any, value: Any) -> str:
    if op in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN):
        return encoded(_ranges(op, value))
    if op is ops.SUBPATTERN and not value[1] and not value[2]:
        return f"(?:{_sequence(value[3])})"
    if op is ops.BRANCH:
        return f"(?:{'|'.join(_sequence(branch) for branch in value[1])})"
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):  # which of several matches is found makes no difference
        low, high, body = value
        return f"(?:{_sequence(body)}){{{low},{'' if high is ops.MAXREPEAT else high}}}"
    raise UnsupportedPattern(f"pattern uses {str(op).lower()}, which is not supported here")


def _ranges(op: Any, value: Any) -> Ranges:
    if op is ops.LITERAL:
        return [(value, value)]
    if op is ops.NOT_LITERAL:
        return _complement([(value, value)])
    if op is ops.ANY:
        return _complement([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])
    negated = value[0][0] is ops.NEGATE
    found: Ranges = []
    for kind, item in value[negated:]:
        if kind is ops.RANGE:
            found.append(item)
        elif kind is ops.CATEGORY:
            found += _category(item)
        else:
            found.append((item, item))
    return _complement(found) if negated else found


_SPACES: Ranges = [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
_CATEGORIES: dict[str, Ranges] = {
    "DIGIT": [(48, 57)],
    "SPACE": [*_SPACES, (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)],
    "WORD": [(48, 57), (65, 90), (95, 95), (97, 122)],
}


def _category(item: Any) -> Ranges:
    name = str(item).removeprefix("CATEGORY_")
    ranges = _CATEGORIES[name.removeprefix("NOT_")]
    return _complement(ranges) if name.startswith("NOT_") else ranges


def _complement(ranges: Ranges) -> Ranges:
    result, start = [], 0
    for low, high in sorted(ranges):
        if start < low:
            result.append((start, low - 1))
        start = max(start, high + 1)
    return [*result, (start, _LAST)] if start <= _LAST else result


def encoded(ranges: Ranges) -> str:
    """One character of these ranges as it stands in a JSON string: itself, or the escape that JSON asks for."""
    must_escape = [*range(0x20), 0x22, 0x5C]
    raw = _subtract(ranges, [*must_escape, 0x7F])
    options = [f"[{''.join(_class_part(low, high) for low, high in raw)}]"] if raw else []
    for point in must_escape:
        if any(low <= point <= high for low, high in ranges):
            if point in _SHORT_ESCAPES:
                options.append(escape("\\" + _SHORT_ESCAPES[point]))
            if point < 0x20:
                options.append(rf"\\u00{_any_case(f'{point:02x}')}")
    if not options:
        raise UnsupportedPattern("pattern holds a character class that no character is in")
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _any_case(digits: str) -> str:
    return "".join(f"[{d}{d.upper()}]" if d.isalpha() else d for d in digits)


def _subtract(ranges: Ranges, points: list[int]) -> Ranges:
    """Without `points` and the surrogates, which are no characters."""
    removed = _complement(ranges) + [(p, p) for p in points] + [(0xD800, 0xDFFF)]
    return _complement(removed)


def _class_part(low: int, high: int) -> str:
    start = rf"\x{{{low:x}}}"
    return start if low == high else rf"{start}-\x{{{high:x}}}"


_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    r"(?:"
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,32})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_SHORT_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,24}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
# A host has at most 253 characters, what stands before an @ at most 64. No table counts these and those of a label, or
# between two points, at once: so what has more parts has shorter ones.
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL}){{0,2}}|{_LABEL}(?:\.{_SHORT_LABEL}){{3,7}})"
_MAILBOX = "|".join(
    [rf"{_ATOM}{{1,64}}", rf"{_ATOM}{{1,31}}\.{_ATOM}{{1,32}}", rf"{_ATOM}{{1,15}}(?:\.{_ATOM}{{1,15}}){{2,3}}"]
)
_UUID = rf"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
# What may stand between the quotes. All of them are ASCII without quote and backslash.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "uuid": _UUID,
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "email": f"(?:{_MAILBOX})@{_HOST}",
    "hostname": _HOST,
}
