"""EBNF as llama.cpp writes it (GBNF), translated to Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from jaxserve.structured.errors import GrammarError

ROOT = "root"
MAX_GROUPS = 64  # nested, so that reading them cannot exhaust the stack
_COMMENT = re.compile(r"(#|//).*")
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|\#[^\n]*)
    |(?P<newline>\n)
    |(?P<defined>::=)
    |(?P<name>[A-Za-z0-9_-]+)
    |(?P<literal>"(?:[^"\\\n]|\\.)*")
    |(?P<set>\[\^?(?:[^\]\\]|\\.)*\])
    |(?P<repeat>[*+?]|\{[ ]*[0-9]+[ ]*(?:,[ ]*[0-9]*[ ]*)?\})
    |(?P<sign>[|().])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def is_lark(text: str) -> bool:
    """Whether a grammar is Lark rather than GBNF: nothing in it but comments has ::=."""
    return bool(text) and not any("::=" in _COMMENT.sub("", line) for line in text.split("\n"))


def gbnf_to_lark(text: str) -> str:
    """The same language in Lark, from the rule `root`. Raises GrammarError that names the line.

    A rule that is regular becomes a terminal, which llguidance reads as one regular expression. Its lexer does not
    turn back, so between terminals the longest one wins, and "en" may not be followed by "x" where both "end" and
    [a-z] can stand.
    """
    rules = dict(_rules(_Reader(text)))
    if ROOT not in rules:
        raise GrammarError(f"grammar: there is no rule {ROOT!r}")
    terminals = _terminals(rules)
    names = {name: f"{'T' if name in terminals else 'r'}_{i}" for i, name in enumerate(rules)}
    lines = [f"{names[name]}: {_render(body, names)}" for name, body in rules.items()]
    return "\n".join([f"start: {names[ROOT]}", *lines])


def _terminals(rules: dict[str, _Parts]) -> set[str]:
    """Rules that lead to no rule that leads to itself. Every use is looked at once: this runs when a request comes."""
    uses = {name: {part[0] for part in body if isinstance(part, tuple)} for name, body in rules.items()}
    users: dict[str, list[str]] = {}
    for name, used in uses.items():
        for other in used:
            users.setdefault(other, []).append(name)
    missing = {name: len(used) for name, used in uses.items()}
    found = [name for name in rules if not missing[name]]
    for name in found:  # which grows
        for user in users.get(name, ()):
            missing[user] -= 1
            if not missing[user]:
                found.append(user)
    return set(found)


class _Reader:
    """The tokens of a text, one ahead."""

    def __init__(self, text: str) -> None:
        self._tokens = [*_tokens(text), _Token("end", "", text.count("\n") + 1)]
        self._at = 0

    @property
    def next(self) -> _Token:
        return self._tokens[self._at]

    @property
    def starts_rule(self) -> bool:
        """A name and ::= stand next, possibly behind newlines."""
        kinds = [token.kind for token in self._tokens[self._at : self._at + 2]]
        return kinds == ["name", "defined"]

    def take(self, kind: str, text: str | None = None) -> _Token:
        token = self.next
        if token.kind != kind or (text is not None and token.text != text):
            self.fail(f"expected {text or kind}")
        self._at += 1
        return token

    def skip_newlines(self) -> None:
        while self.next.kind == "newline":
            self._at += 1

    def fail(self, why: str) -> NoReturn:
        found = repr(self.next.text) if self.next.text else "the end"
        raise GrammarError(f"grammar: line {self.next.line}: {why}, found {found}")


def _tokens(text: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise GrammarError(f"grammar: line {line}: {text[at : at + 10]!r} is not understood")
        if match.lastgroup != "space":
            yield _Token(str(match.lastgroup), match[0], line)
        line += match[0].count("\n")
        at = match.end()


# What was read, ready for Lark but for the names of rules, which stand as (name, line).
_Parts = list[str | tuple[str, int]]


def _rules(reader: _Reader) -> Iterator[tuple[str, _Parts]]:
    seen = set()
    reader.skip_newlines()
    while reader.next.kind != "end":
        name = reader.take("name")
        reader.take("defined")
        if name.text in seen:
            raise GrammarError(f"grammar: line {name.line}: rule {name.text!r} is defined twice")
        seen.add(name.text)
        yield name.text, _alternatives(reader, depth=0)
        reader.skip_newlines()


def _alternatives(reader: _Reader, depth: int) -> _Parts:
    """Up to the end of a rule or the closing bracket of a group. A rule ends with its line, unless | follows."""
    if depth > MAX_GROUPS:
        reader.fail(f"groups are nested deeper than {MAX_GROUPS}")
    reader.skip_newlines()
    parts = _sequence(reader, depth)
    while _bar_follows(reader):
        reader.skip_newlines()
        reader.take("sign", "|")
        reader.skip_newlines()
        parts += [" | ", *_sequence(reader, depth)]
    return parts


def _bar_follows(reader: _Reader) -> bool:
    start = reader._at
    reader.skip_newlines()
    found = reader.next == ("sign", "|", reader.next.line)
    reader._at = start
    return found


def _sequence(reader: _Reader, depth: int) -> _Parts:
    parts: _Parts = []
    while True:
        if depth:
            reader.skip_newlines()
        if reader.starts_rule:
            break
        item = _item(reader, depth)
        if item is None:
            break
        parts += [" ", *_repeated(item, _repetition(reader))]
    return parts or [' ""']


def _item(reader: _Reader, depth: int) -> _Parts | None:
    token = reader.next
    if token.kind == "name":
        reader.take("name")
        return [(token.text, token.line)]
    if token.kind == "literal":
        reader.take("literal")
        return [json.dumps(_unescaped(token.text[1:-1], reader), ensure_ascii=False)]
    if token.kind == "set":
        reader.take("set")
        return [_character_class(token.text, reader)]
    if token.text == ".":
        reader.take("sign")
        return [r"/(.|\n)/"]
    if token.text == "(":
        reader.take("sign")
        inner = _alternatives(reader, depth + 1)
        reader.skip_newlines()
        reader.take("sign", ")")
        return ["(", *inner, ")"]
    return None


def _repeated(item: _Parts, repetition: str) -> _Parts:
    """Repeated characters are one lexeme, which takes the longest match: one of its own for each would lose them to a
    literal that begins with them."""
    lexeme = item[0]
    is_lexeme = isinstance(lexeme, str) and lexeme.startswith("/")
    if not is_lexeme or repetition in ("", "?") or re.fullmatch(r"\{0+(,0+)?\}", repetition):
        return [*item, repetition]
    least = re.match(r"\{0*(\d+)", repetition)
    if repetition == "+" or (least and int(least[1]) > 0):
        return [f"{lexeme[:-1]}{repetition}/"]
    some = "+" if repetition == "*" else re.sub(r"^\{0*", "{1", repetition, count=1)
    return [f"({lexeme[:-1]}{some}/)?"]  # no lexeme is empty


def _repetition(reader: _Reader) -> str:
    if reader.next.kind != "repeat":
        return ""
    text = reader.take("repeat").text.replace(" ", "")
    if reader.next.kind == "repeat":
        reader.fail("a repetition of a repetition needs a group")
    return text


def _unescaped(text: str, reader: _Reader) -> str:
    def character(match: re.Match[str]) -> str:
        digits = match[1] or match[2] or match[3]
        if digits:
            return _checked(int(digits, 16), reader)
        return _NAMED.get(match[4], match[4])

    return _ESCAPE.sub(character, text)


def _checked(point: int, reader: _Reader) -> str:
    if point == 0 or 0xD800 <= point < 0xE000 or point > 0x10FFFF:
        reader.fail(f"U+{point:04X} is no character of an output")
    return chr(point)


def _character_class(text: str, reader: _Reader) -> str:
    """[...] with every character escaped by its number, so that it means the same in a regular expression."""
    inverted = text.startswith("[^")
    body = text[1 + inverted : -1]
    if not body:
        reader.fail("an empty class")
    parts, at = "", 0
    while at < len(body):
        if body[at] == "-" and parts and at + 1 < len(body):
            parts, at = parts + "-", at + 1
            continue
        match = _ESCAPE.match(body, at)
        raw = match[0] if match else body[at]
        parts += rf"\x{{{ord(_unescaped(raw, reader)):x}}}"
        at += len(raw)
    return f"/[{'^' if inverted else ''}{parts}]/"


def _render(parts: _Parts, names: dict[str, str]) -> str:
    rendered = []
    for part in parts:
        if isinstance(part, tuple):
            name, line = part
            if name not in names:
                raise GrammarError(f"grammar: line {line}: there is no rule {name!r}")
            part = names[name]
        rendered.append(part)
    return "".join(rendered).strip()
