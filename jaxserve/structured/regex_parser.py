"""Regular expressions, in Rust's syntax, to trees of character sets, sequences, alternatives and repetitions."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NoReturn

from jaxserve.structured.errors import NoTableError

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included; sorted, disjoint
LAST = 0x10FFFF
_COUNT = re.compile(r"\{([0-9]+)(,?)([0-9]*)\}")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_][A-Za-z0-9_.\[\]]*>)?")
_NUMBER = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]{1,8})\}")
_NAMED = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "a": 0x07}
_POSIX = {
    "alpha": "A-Za-z", "digit": "0-9", "alnum": "0-9A-Za-z", "upper": "A-Z", "lower": "a-z", "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f", "space": r"\t\n\v\f\r ", "blank": r"\t ", "punct": r"!-/:-@\[-`{-~", "print": " -~",
    "graph": "!-~", "cntrl": r"\x00-\x1f\x7f", "ascii": r"\x00-\x7f",
}  # fmt: skip


@dataclass(frozen=True)
class Chars:
    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Either:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """high: None is without end."""

    body: Node
    low: int
    high: int | None


Node = Chars | Sequence | Either | Repeat


def parse(regex: str) -> Node:
    """The tree of an expression without anchors. Raises NoTableError for what is not understood: llguidance may be
    able to read it, and knows whether it is wrong."""
    parser = _Parser(regex)
    node = parser.alternatives()
    if parser.at < len(regex):
        parser.fail("an unopened group")
    return node


def map_classes(regex: str, change: Callable[[Ranges], Ranges]) -> str:
    """`regex` with other characters in its bracketed classes; one that `change` gives back as it is stays as written.
    Raises NoTableError for a class that is not understood, or holds nothing any more."""
    parser, written = _Parser(regex), []
    while (start := parser.at) < len(regex):
        if regex[start] != "[":
            parser.at += 2 if regex[start] == "\\" else 1
            written.append(regex[start : parser.at])
            continue
        ranges = parser._char_class()
        changed = change(ranges)
        if changed == ranges:
            written.append(regex[start : parser.at])
        elif changed:
            written.append("[" + "".join(rf"\x{{{low:X}}}-\x{{{high:X}}}" for low, high in changed) + "]")
        else:
            parser.fail(f"the empty class {regex[start : parser.at]}")
    return "".join(written)


class _Parser:
    def __init__(self, regex: str) -> None:
        self.regex, self.at = regex, 0

    def fail(self, what: str) -> NoReturn:
        raise NoTableError(f"{what}, at character {self.at}, is not in the syntax that tables are made of")

    def _peek(self) -> str:
        return self.regex[self.at : self.at + 1]

    def alternatives(self) -> Node:
        options = [self._sequence()]
        while self._peek() == "|":
            self.at += 1
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        """Lazy repetitions match the same texts."""
        while (sign := self._peek()) in ("*", "+", "?", "{") and sign:
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign) or self._count()
            self.at += sign != "{"
            self.at += self._peek() == "?"
            if high is not None and high < low:
                self.fail("a repetition with its bounds reversed")
            node = Repeat(node, low, high)
        return node

    def _count(self) -> tuple[int, int | None]:
        match = _COUNT.match(self.regex, self.at)
        if match is None or (match[3] and not match[2]):
            self.fail("this {")
        self.at = match.end()
        low = int(match[1])
        return low, int(match[3]) if match[3] else None if match[2] else low

    def _atom(self) -> Node:
        char = self._peek()
        if char == "(":
            return self._group()
        if char == "[":
            return Chars(self._char_class())
        if char == "\\":
            return Chars(self._escape())
        if char in "*+?{":
            self.fail("a repetition of nothing")
        if char in "^$":
            self.fail(f"the anchor {char}")
        self.at += 1
        return Chars(complement([(0x0A, 0x0A)]) if char == "." else ((ord(char), ord(char)),))

    def _group(self) -> Node:
        match = _GROUP.match(self.regex, self.at)
        assert match is not None
        self.at = match.end()
        if self._peek() == "?":
            self.fail("a group with flags")
        node = self.alternatives()
        if self._peek() != ")":
            self.fail("an unclosed group")
        self.at += 1
        return node

    def _escape(self) -> Ranges:
        """From the backslash on."""
        self.at += 1
        letter = self._peek()
        number = _NUMBER.match(self.regex, self.at)
        if number is not None:
            self.at = number.end()
            point = int(next(digits for digits in number.groups() if digits), 16)
            if point > LAST or 0xD800 <= point < 0xE000:
                self.fail("a number that is no character")
            return ((point, point),)
        if letter in "dDsSwW" and letter:
            self.at += 1
            ranges = unicode_class(letter.lower())
            return ranges if letter.islower() else complement(ranges)
        if not letter or (letter.isalnum() and letter not in _NAMED) or letter in "<>":
            self.fail(f"\\{letter}")
        self.at += 1
        point = _NAMED.get(letter, ord(letter))
        return ((point, point),)

    def _char_class(self) -> Ranges:
        """From the opening bracket on. Classes nest; their other operators are not understood."""
        self.at += 1
        inverted = self._peek() == "^"
        self.at += inverted
        found: list[tuple[int, int]] = []
        first = True
        while first or self._peek() != "]":
            found += self._class_item()
            first = False
        self.at += 1
        return complement(found) if inverted else merged(found)

    def _class_item(self) -> Ranges:
        if self.regex[self.at : self.at + 2] in ("&&", "--", "~~"):
            self.fail("an operator between classes")
        posix = re.compile(r"\[:(\^?)([a-z]+):\]").match(self.regex, self.at)
        if posix is not None and posix[2] in _POSIX:
            self.at = posix.end()
            ranges = _Parser(f"[{_POSIX[posix[2]]}]")._char_class()
            return complement(ranges) if posix[1] else ranges
        if self._peek() == "[":
            return self._char_class()
        low = self._class_char()
        is_range = self._peek() == "-" and self.regex[self.at + 1 : self.at + 2] not in ("]", "-", "")
        if not is_range or low[0][0] != low[-1][1]:
            return low
        self.at += 1
        high = self._class_char()
        if high[0][0] != high[-1][1] or high[0][0] < low[0][0]:
            self.fail("a range of characters")
        return ((low[0][0], high[0][0]),)

    def _class_char(self) -> Ranges:
        if self._peek() == "":
            self.fail("an unclosed class")
        if self._peek() == "\\":
            return self._escape()
        self.at += 1
        point = ord(self.regex[self.at - 1])
        return ((point, point),)


def merged(ranges: list[tuple[int, int]] | Ranges) -> Ranges:
    """Sorted, without overlaps."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return tuple(result)


def complement(ranges: list[tuple[int, int]] | Ranges) -> Ranges:
    result, start = [], 0
    for low, high in merged(ranges):
        if start < low:
            result.append((start, low - 1))
        start = high + 1
    return tuple([*result, (start, LAST)] if start <= LAST else result)


# Symbols that count as letters (Other_Alphabetic) and the two joiners: all that categories do not say of \w.
_MORE_WORD = ((0x200C, 0x200D), (0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189))
_SPACES: Ranges = ((9, 13), (32, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029))
_SPACES += ((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000))


@cache
def unicode_class(letter: str) -> Ranges:
    r"""\d, \s or \w, of Unicode as this Python knows it."""
    if letter == "s":
        return _SPACES
    wanted = {"d": ("Nd",), "w": ("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "Pc")}[letter]
    points = [p for p in range(LAST + 1) if unicodedata.category(chr(p)) in wanted]
    return merged([(p, p) for p in points] + list(_MORE_WORD if letter == "w" else ()))
