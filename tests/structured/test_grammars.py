"""Grammars in EBNF, and structural tags, as llguidance follows them; what parameters refuse."""

import json
import sys
from pathlib import Path

import pytest

from jaxserve.structured import gbnf
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.gbnf import gbnf_to_lark, is_lark
from jaxserve.structured.lark import to_lark
from jaxserve.structured.matcher import MatcherGrammar
from jaxserve.structured.params import StructuredOutputsParams as Params
from tests.structured.conftest import EOS

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sampling_cases.json").read_text(encoding="utf-8"))
STOPS = frozenset({EOS})
TAG = {
    "triggers": ["<fun=", "<fun=x", "[t"],  # the second can never come: the first one comes before it
    "structures": [
        {"begin": "<fun=a>", "schema": {"type": "integer"}, "end": "</fun>"},
        {"begin": "<fun=b>", "schema": {"type": "object", "properties": {"k": {"type": "null"}}}, "end": "</fun>"},
        {"begin": "<fun=x>", "schema": {"type": "null"}, "end": "</fun>"},
        {"begin": "[t", "schema": {"type": "boolean"}, "end": ""},
    ],
}


def accepts(tokens, text: str, **kinds) -> bool:
    """Whether `text`, byte by byte, is whole under the grammar."""
    matcher = MatcherGrammar(tokens, to_lark(Params(**kinds).key()), STOPS).new_matcher()
    try:
        matcher.accept([*text.encode(), EOS])
    except GrammarError:
        return False
    return True


@pytest.mark.parametrize(
    ("grammar", "whole", "not_whole"),
    [
        ('root ::= "a" root "b" | ""', ["", "ab", "aabb"], ["a", "aab", "ba"]),
        ('root ::= [a-z]* "end"', ["end", "enxend", "append"], ["en", "endx"]),
        ("root ::= x{2,3} y?\nx ::= [^a-y\\n\\]]\ny ::= . # any", ["zz", "zz\n", "日é!", "zzza"], ["z", "z]", "az"]),
        ('root ::= (\n "x\\"y"\n | "\\u65e5" [\\x41-\\x43]+ )\n\n', ['x"y', "日ABC"], ["日", "日D", 'x"']),
        ("# comment\nroot ::= a-b | c\n  | d\na-b ::= \"1\"\nc ::= \"2\"\nd ::= \"3\"", ["1", "2", "3"], ["", "4"]),
        ("root ::= [-+*/] [a\\-z] [0-9-]", ["-a-", "+-1"], ["ab1", "-b1"]),
        ('root ::= e\ne ::= "not" " " e | [a-z]+ | "(" e ")"', ["no", "not", "nothing", "not (not no)"], ["", "a1"]),
        ('root ::= e\ne ::= "x" [0-9]* e | "y" [a-c]{0,3} | "z" [ab]{2} | "w" [ab]{2,}',
         ["x1xy", "yabc", "zab", "waba"], ["yabca", "za", "zaba", "wa", "x1"]),
        ('root ::= e\ne ::= "x" e | "w" [a-c]{0,} | "v" [a-c]{00,2}', ["w", "xwabc", "v", "vab"], ["wabcx", "vabc"]),
    ],
)  # fmt: skip
def test_gbnf(grammar, whole, not_whole, small_tokens):
    assert [text for text in whole if not accepts(small_tokens, text, grammar=grammar)] == []
    assert [text for text in not_whole if accepts(small_tokens, text, grammar=grammar)] == []


@pytest.mark.parametrize("none", ["{0}", "{0,0}"])
def test_a_repetition_of_nothing_is_refused(none, small_tokens):
    with pytest.raises(GrammarError, match="cannot be 0"):
        accepts(small_tokens, "y", grammar=f'root ::= e\ne ::= "x" e | "y" [a-c]{none}')


@pytest.mark.parametrize("row", GOLDEN["choice"], ids=range(len(GOLDEN["choice"])))
def test_golden_choices(row, small_tokens):
    choices, grammar = row
    if any("\0" in choice for choice in choices):
        with pytest.raises(ValueError, match="NUL"):
            Params(choice=choices)
        with pytest.raises(GrammarError, match=r"U\+0000"):
            gbnf_to_lark(grammar)
        return
    for text in choices:
        assert accepts(small_tokens, text, grammar=grammar)
        assert accepts(small_tokens, text, choice=choices)
        assert not accepts(small_tokens, text + "~", grammar=grammar)


def test_golden_lark():
    for text, expected in GOLDEN["lark"]:
        assert is_lark(text) == expected, text


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('root ::= "a', "line 1"), ('x ::= "a"', "root"), ('root ::= "a"\nroot ::= "b"', "twice"),
        ('root ::= "a"\n\n x = 1', "line 3"), ("root ::= other", "'other'"), ("root ::= (" * 100, "deeper|line"),
        ("root ::= " + "(" * 200, "deeper"),
        ('root ::= "a"**', "repetition"), ("root ::= []", "empty class|understood"),
        ('root ::= "\\ud800"', "D800"),
    ],
)  # fmt: skip
def test_errors_of_gbnf_name_the_place(grammar, why):
    with pytest.raises(GrammarError, match=why):
        gbnf_to_lark(grammar)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("", True), ("free text <fun [x", True), ("a<fun=a>12</fun> and [ttrue.", True),
        ('<fun=b>{"k":null}</fun>', True),
        ("<fun=c>", False), ("<fun=a>x", False), ("<fun=a>1", False), ("[tmaybe", False),
        ("<fun=a>1</fun><fun=z", False),
        ("<fun=x>null</fun>", True), ("<fun=x>1</fun>", False),
        ('<fun=b>{"k":1}</fun>', False), ("<fun=a>1</fun>[tfalse</fun>", True),
    ],
)  # fmt: skip
def test_structural_tags(text, whole, small_tokens):
    assert accepts(small_tokens, text, structural_tag=TAG) == whole


def test_a_chain_of_rules_is_read_once():
    """Steps, not seconds: a grammar is translated in the engine's thread."""
    count = 20_000
    chain = "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(count)), f'r{count} ::= "a"'])
    steps = 0

    def traced(frame, event, argument):
        nonlocal steps
        steps += event == "line"
        if steps > 100 * count:
            raise AssertionError("too many steps")
        return traced

    rules = dict(gbnf._rules(gbnf._Reader(chain)))
    before = sys.gettrace()
    sys.settrace(traced)
    try:
        terminals = gbnf._terminals(rules)
    finally:
        sys.settrace(before)
    assert terminals == set(rules)


def test_rules_that_lead_to_themselves_are_no_terminals():
    rules = dict(
        gbnf._rules(gbnf._Reader('root ::= a b\na ::= b b [x]\nb ::= "1"\nc ::= d\nd ::= c | e\ne ::= root c'))
    )
    assert gbnf._terminals(rules) == {"root", "a", "b"}


def test_a_rule_that_takes_what_follows_it(small_tokens):
    """The example of docs/structured.md."""
    greedy = 'root ::= num "\\n" root | num "."\nnum ::= [0-9]+ [ \\n]*'
    assert accepts(small_tokens, "12.", grammar=greedy)
    assert not accepts(small_tokens, "1\n2.", grammar=greedy)
    assert accepts(small_tokens, "1 \n2.", grammar=greedy.replace(" [ \\n]*", " [ ]*"))
    assert accepts(small_tokens, "1\n2\n", grammar='root ::= (num "\\n")+\nnum ::= [0-9]+ [ \\n]*')


def test_bad_words_of_lark():
    with pytest.raises(GrammarError, match="%llguidance"):
        to_lark(Params(grammar='%llguidance {}\nstart: "a"').key())


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "exactly one"), ({"regex": "a", "choice": ["b"]}, "exactly one"), ({"choice": []}, "choice"),
        ({"choice": "ab"}, "choice"), ({"choice": [""]}, "choice"), ({"choice": ["a", 1]}, "choice"),
        ({"regex": "("}, "unclosed"), ({"regex": "["}, "unclosed"), ({"regex": "\0"}, "NUL"), ({"regex": " "}, "empty"),
        ({"json": ""}, "empty"), ({"json": "{"}, "not JSON"), ({"json": "[" * 100_000}, "deeper|JSON"),
        ({"json": 3}, "json"),
        ({"json": {"enum": [float("nan")]}}, "not JSON"), ({"json": "1" * (1 << 21)}, "characters"),
        ({"grammar": ""}, "empty"), ({"structural_tag": {}}, "structural_tag"), ({"structural_tag": "{"}, "not JSON"),
        ({"structural_tag": {**TAG, "triggers": ["?"]}}, "none of"), ({"regex": "a", "lenient": True}, "lenient"),
        ({"json_object": True, "backend": "table"}, "regular"), ({"json": {}, "backend": "x"}, "backend"),
        ({"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}, "whitespace_pattern"),
        ({"choice": ["a"] * 10_001}, "10000"), ({"json_object": 1}, "json_object"),
        ({"json": {}, "whitespace_pattern": 3}, "whitespace_pattern=3 must be a string"),
        ({"json": {}, "whitespace_pattern": "a^b"}, "whitespace_pattern"),
        ({"regex": "a", "whitespace_pattern": ""}, "whitespace_pattern"),
        ({"structural_tag": {**TAG, "triggers": "<fun="}}, "lists"),
        ({"structural_tag": {**TAG, "structures": {"begin": "<"}}}, "lists"),
        ({"structural_tag": {**TAG, "at_least_one": True}}, "at_least_one"),
        ({"structural_tag": {**TAG, "type": "tags"}}, "type='tags'"),
        ({"structural_tag": {**TAG, "structures": [{**TAG["structures"][0], "style": "x"}]}}, "style"),
    ],
)  # fmt: skip
def test_parameters_are_refused_by_name(fields, why):
    with pytest.raises(ValueError, match=why):
        Params(**fields)


def test_a_schema_nested_too_deep():
    schema: dict = {"type": "null"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="deeper than 64"):
        Params(json=schema)


def test_equal_parameters_have_equal_keys():
    assert Params(json={"a": 1, "b": 2}).key() == Params(json='{"a": 1,\n"b": 2}').key()
    assert Params(json={"a": 1, "b": 2}).key() != Params(json={"b": 2, "a": 1}).key()
    assert Params(json={}).key() != Params(json={}, lenient=True).key()
