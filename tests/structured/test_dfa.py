"""Byte automata against Python's own regular expressions."""

import random
import re
import time

import numpy as np
import pytest

from jaxserve.structured.dfa import GrammarLimits, compile_regex
from jaxserve.structured.errors import GrammarError, LimitError, NoTableError
from jaxserve.structured.regex_syntax import check_regex

ATOMS = [
    "a", "b", "c", "[ab]", "[^a]", ".", "é", "日", r"\d", r"\w", "[a-c]", r"\.", r"\s", r"\n", r"[^\W\d]",
    r"\u00e9", r"[\x41-\x5a]", "😀", "[^é-日]", "[]a]", "[-a]",
]  # fmt: skip
ALPHABET = "abcaé日1_ .\n\tZ😀\u2028ß-]"


def random_regex(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(9)
    if depth == 0 or kind < 3:
        return rng.choice(ATOMS)
    if kind == 3:
        return f"(?:{'|'.join(random_regex(rng, depth - 1) for _ in range(rng.randint(2, 3)))})"
    if kind == 4:
        count = rng.choice(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?"])
        return f"({random_regex(rng, depth - 1)}){count}"
    return "".join(random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3)))


def test_random_expressions_match_what_python_matches():
    rng = random.Random(0)
    compared = 0
    for _ in range(150):
        regex = random_regex(rng, 3)
        try:
            dfa = compile_regex(regex)
        except LimitError:
            continue
        pattern = re.compile(regex)
        for _ in range(50):
            text = "".join(rng.choice(ALPHABET) for _ in range(rng.randint(0, 6)))
            assert dfa.accepts(text.encode()) == (pattern.fullmatch(text) is not None), (regex, text)
            compared += 1
    assert compared > 5000


@pytest.mark.parametrize(
    ("regex", "texts"),
    [
        (r"-?(0|[1-9]\d*)(\.\d+)?", ["1.5", "-0", "10"]),  # goes on behind a final state
        ("(foo|foobar)", ["foo", "foobar"]),  # not the first that matches
        ("a*?", ["", "aa"]),
        ("^ab$", ["ab"]),
        (r"[1-9][0-9]{0,31}|null", ["7", "1" * 32, "null"]),
        ("(?P<x>a)(?<y>b)", ["ab"]),
        (r"[[:digit:]x]+\x{65e5}\U0001f600", ["1x日😀"]),
        ("(a*)*b", ["b", "aab"]),
        ("(|a)", ["", "a"]),
        ("[a[bc]]", ["a", "b", "c"]),
    ],
)
def test_whole_texts_are_matched(regex, texts):
    dfa = compile_regex(regex)
    for text in texts:
        assert dfa.accepts(text.encode())
        assert not dfa.accepts(text.encode() + b"~")
    assert not dfa.accepts(b"\x00")


def test_automata_are_minimal():
    assert compile_regex("(a|b)*abb").num_states == 4
    assert compile_regex("abc|abd|aec").num_states == 5
    assert compile_regex("(?:aa|ab|ba|bb)*").num_states == 2


def test_every_state_leads_to_an_end_and_bytes_are_whole_characters():
    dfa = compile_regex("[^a]{1,2}")
    legal = (dfa.transitions >= 0).any(axis=1)
    assert (legal | dfa.final).all()
    assert dfa.run(b"\xc3") >= 0
    assert not dfa.accepts(b"\xc3")
    assert dfa.run("\ud800".encode("utf-8", "surrogatepass")) < 0
    assert dfa.run(b"\xff") < 0


@pytest.mark.parametrize("regex", [r"\p{L}", "(?i)a", "[a&&b]", "a{", r"\_\y", "(?:a", "[z-a]", "*"])
def test_what_is_not_understood_is_left_to_the_other_backend(regex):
    with pytest.raises(NoTableError):
        compile_regex(regex)


def test_an_expression_without_texts():
    with pytest.raises(GrammarError, match="no text"):
        compile_regex(r"[^\x{0}-\x{10ffff}]")


@pytest.mark.parametrize(
    "regex",
    [
        "(a{1000}){1000}", "(a|b)*a(a|b){20}", r"(\d{1,40}x?){1,200}",
        "(" * 3000 + ")" * 3000, "(a*)*" * 20_000, "(a?){9999}a{9999}", "(){1000000000}(|){1000000}",
        "(a?){1500}a{1500}", "((a?){90}){90}",
    ],
)  # fmt: skip
def test_hostile_expressions_end_soon_in_an_error(regex):
    start = time.process_time()
    with pytest.raises(LimitError):
        compile_regex(regex)
    assert time.process_time() - start < 10


def test_limits_are_named():
    with pytest.raises(LimitError, match="characters"):
        compile_regex("a" * 100, GrammarLimits(max_regex_chars=99))
    with pytest.raises(LimitError, match="more than 50 states"):
        compile_regex("a{60}", GrammarLimits(max_raw_states=50))
    with pytest.raises(LimitError, match="over the limit of 50"):
        compile_regex("a{60}", GrammarLimits(max_states=50))
    with pytest.raises(ValueError, match="max_masks"):
        GrammarLimits(max_masks=0)


@pytest.mark.parametrize(
    ("regex", "name"),
    [
        ("(?=a)", "look-ahead"), ("(?<!a)b", "look-behind"), (r"(a)\1", "back-reference"), (r"\bab", "word boundary"),
        ("a^b", "anchor"), ("a$b", "anchor"), ("(?P=x)", "back-reference"), (r"\x00", "NUL"), ("\0", "NUL"),
        ("(", "unclosed group"), ("[", "unclosed character class"), (")", "unopened group"), ("a\\", "backslash"),
        ("(?>a)", "atomic"), (r"\Aab", "anchor"),
    ],
)  # fmt: skip
def test_syntax_without_a_meaning_is_refused_by_name(regex, name):
    with pytest.raises(ValueError, match=name):
        check_regex("regex", regex)


@pytest.mark.parametrize(("regex", "body"), [("^a$", "a"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("[$^]", "[$^]")])
def test_anchors_at_the_ends_go(regex, body):
    assert check_regex("regex", regex) == body


def test_transitions_are_int32():
    assert compile_regex("ab").transitions.dtype == np.int32
