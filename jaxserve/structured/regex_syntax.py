"""What of a regular expression's syntax has no meaning for an output that must match as a whole, found by name."""

from __future__ import annotations

import re
from collections.abc import Iterator

_GROUPS = {
    "(?=": "look-ahead",
    "(?!": "look-ahead",
    "(?<=": "look-behind",
    "(?<!": "look-behind",
    "(?P=": "a back-reference",
    "(?>": "an atomic group",
    "(?(": "a conditional",
    "(?#": "a comment",
}
_ESCAPES = {"b": "a word boundary", "B": "a word boundary", "<": "a word boundary", ">": "a word boundary"}
_ESCAPES |= {letter: "an anchor inside the expression" for letter in "AzZG"} | {"k": "a back-reference"}
_ESCAPES |= {digit: "a back-reference" for digit in "123456789"} | {"0": "NUL"}
_NUL = re.compile(r"\\(?:x00|x\{0+\}|u0000|u\{0+\}|U0{8}|U\{0+\})")


def check_regex(field: str, regex: str) -> str:
    """`regex` without the anchors at its two ends.

    Raises ValueError that names `field` and what is wrong: a feature that a full match has no use for or a DFA cannot
    hold, or brackets that do not match. Whether everything else compiles is known when it is compiled.
    """
    if "\0" in regex:
        raise ValueError(f"{field} holds NUL, which no output may contain")
    body = strip_anchors(regex)
    depth = 0
    for item in _items(field, body):
        name = _unsupported(item)
        if name is not None:
            raise ValueError(f"{field}={_shown(regex)} uses {name} ({item}), which is not supported")
        depth += (item[0] == "(") - (item == ")")
        if depth < 0:
            raise ValueError(f"{field}={_shown(regex)} is not a regular expression: unopened group")
    if depth:
        raise ValueError(f"{field}={_shown(regex)} is not a regular expression: unclosed group")
    return body


def strip_anchors(regex: str) -> str:
    """`regex` without ^ at its start and an unescaped $ at its end: the whole output matches anyway."""
    regex = regex.removeprefix("^")
    if regex.endswith("$"):
        escapes = len(regex) - 1 - len(regex[:-1].rstrip("\\"))
        if escapes % 2 == 0:
            return regex[:-1]
    return regex


def _items(field: str, regex: str) -> Iterator[str]:
    """Escapes, openings of groups, and single characters; what is inside a character class is left out."""
    at = 0
    while at < len(regex):
        if regex[at] == "\\":
            nul = _NUL.match(regex, at)
            size = len(nul[0]) if nul else 2
            if at + 1 >= len(regex):
                raise ValueError(f"{field}={_shown(regex)} is not a regular expression: it ends in a backslash")
        elif regex[at] == "[":
            size = _class_length(field, regex, at)
        else:
            size = next((len(g) for g in _GROUPS if regex.startswith(g, at)), 1)
        yield regex[at : at + size]
        at += size


def _class_length(field: str, regex: str, start: int) -> int:
    at, depth = start + 1, 1
    at += regex.startswith("^", at)
    at += regex.startswith("]", at)  # first in a class it stands for itself
    while depth and at < len(regex):
        if regex[at] == "\\":
            at += 1
        elif regex[at] == "[":  # classes nest: [a[bc]], [[:alpha:]]
            depth += 1
        elif regex[at] == "]":
            depth -= 1
        at += 1
    if depth:
        raise ValueError(f"{field}={_shown(regex)} is not a regular expression: unclosed character class")
    return at - start


def _unsupported(item: str) -> str | None:
    if item in ("^", "$"):
        return "an anchor inside the expression"
    if item[0] == "\\":
        return "NUL" if _NUL.fullmatch(item) else _ESCAPES.get(item[1])
    return _GROUPS.get(item)


def _shown(regex: str) -> str:
    return repr(regex if len(regex) <= 80 else regex[:77] + "...")
