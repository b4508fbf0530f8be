"""What is done about what llguidance gets wrong of JSON Schema: keys, bounds, formats, keywords it drops."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxserve.structured.dfa import GrammarLimits, compile_regex
from jaxserve.structured.errors import GrammarError, NoTableError
from jaxserve.structured.json_guided import closed
from jaxserve.structured.json_schema import schema_to_regex
from jaxserve.structured.lark import to_lark
from jaxserve.structured.matcher import LLTokens, Matcher, MatcherGrammar
from jaxserve.structured.params import StructuredOutputsParams
from jaxserve.structured.vocabulary import Vocabulary, legal_ids
from jaxserve.structured.worker import compile_grammar
from tests.structured.conftest import EOS, STOPS, guided_matcher, table_matcher
from tests.structured.schemas import NAMES, Walker, random_schema, with_definitions


def accepts(matcher: Matcher, text: str) -> bool:
    tokens = [*text.encode(), EOS]
    return matcher.fill(tokens, np.empty((len(tokens) + 1, 10), np.uint32)) == len(tokens)


# ---- keys

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}, "t\t": {"type": "integer"}}}
PATTERNED = {**OPEN, "patternProperties": {"^b": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
CONTROL = {"type": "object", "properties": {"c\x01": {"type": "integer"}, 'q"\\': {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "text", "legal"),
    [
        (OPEN, r'{"\u0061":"x"}', False),
        (OPEN, r'{"\u0061":1}', False),
        (OPEN, r'{"t\u0009":"x"}', False),
        (OPEN, r'{"t\t":"x"}', False),
        (OPEN, r'{"t\t":1,"\n\\\"":"x"}', True),
        ({"type": "array", "items": OPEN}, r'[{"\u0061":"x"}]', False),
        ({"type": "object", "additionalProperties": OPEN}, r'{"k":{"\u0061":"x"}}', False),
        (PATTERNED, r'{"\u0062":"x"}', False),
        (PATTERNED, r'{"b\n":1,"c":"x"}', True),
        (CONTROL, r'{"c\u0001":"x"}', False),
        (CONTROL, r'{"c\u0001":1,"q\"\\":2}', True),
        (CONTROL, r'{"q\u0022\\":"x"}', False),
    ],
)
def test_a_key_has_one_spelling(small_tokens: LLTokens, schema: Any, text: str, legal: bool) -> None:
    assert accepts(guided_matcher(small_tokens, json=schema), text) == legal


def test_a_key_has_one_spelling_within_structural_tags(small_tokens: LLTokens) -> None:
    tag = {"triggers": ["<f>"], "structures": [{"begin": "<f>", "schema": OPEN, "end": "</f>"}]}
    key = StructuredOutputsParams(structural_tag=tag).key()
    for text, legal in {r'<f>{"a":1}</f>': True, r'<f>{"\u0061":"x"}</f>': False}.items():
        assert accepts(MatcherGrammar(small_tokens, to_lark(key), STOPS).new_matcher(), text) == legal


def test_no_token_writes_another_spelling(smollm: Vocabulary, smollm_tokens: LLTokens) -> None:
    """Of the whole vocabulary, wherever the key, or an escape in it, has come to."""
    key = StructuredOutputsParams(json=OPEN).key()
    grammar = MatcherGrammar(smollm_tokens, to_lark(key), frozenset({2}), is_json=True)
    out = np.empty((1, -(-len(smollm) // 32)), np.uint32)
    for begun in ['{"', '{"x', '{"x\\', '{"k": "v", "', '{"a":1,"x']:
        matcher = grammar.new_matcher()
        matcher.accept(smollm.tokenize(begun.encode()))
        matcher.fill((), out)
        legal = [smollm.token_bytes[t] or b"" for t in legal_ids(out[0], len(smollm))]
        assert len(legal) > 5
        assert not [text for text in legal if b"\\u" in (begun.encode() + text).replace(b"\\\\", b"")]


def test_strings_keep_their_escapes_where_no_key_is_at_stake(small_tokens: LLTokens) -> None:
    for schema in ({"type": "string"}, {"type": "object"}, {**OPEN, "additionalProperties": False}):
        text = r'"\u0001"' if schema["type"] == "string" else r'{"a":1}' if "properties" in schema else r'{"\u0001":2}'
        assert accepts(guided_matcher(small_tokens, json=schema), text)


def walk_spelling(matcher: Matcher, walker: Walker, rng: random.Random) -> tuple[bytes, bool]:
    """A text whose keys are names of the schemas written by escapes, wherever that is legal."""
    out, text, wanted = np.empty((1, 10), np.uint32), b"", b""
    for _ in range(300):
        if matcher.exhausted:
            return text, True
        matcher.fill((), out)
        if wanted and wanted[0] in legal_ids(out[0], 320):
            token, wanted = wanted[0], wanted[1:]
        else:
            token, wanted = walker.draw(out[0], STOPS), b""
        matcher.accept([token])
        if token in STOPS:
            return text, True
        text += walker.vocabulary.token_bytes[token] or b""
        if not wanted and text[-1:] == b'"' and text[:-1].rstrip(b" ")[-1:] in b"{," and rng.random() < 0.8:
            name = rng.choice(NAMES)
            wanted = "".join(f"\\u{ord(c):04x}" if rng.random() < 0.8 else c for c in name).encode() + b'":'
    return text, False


def test_keys_spelled_by_escapes_do_not_evade_random_schemas(small: Vocabulary, small_tokens: LLTokens) -> None:
    rng, walker, ended = random.Random(1), Walker(small, seed=1), 0
    for _ in range(400):
        names = rng.sample(NAMES, 3)
        schema = with_definitions(
            rng, {"type": "object", "properties": {name: random_schema(rng, 1) for name in names}}
        )
        if rng.random() < 0.3:
            schema["patternProperties"] = {"^[a-k]": {"type": "null"}}
        try:
            matcher = guided_matcher(small_tokens, json=schema)
        except GrammarError:
            continue
        text, whole = walk_spelling(matcher, walker, rng)
        if whole:
            ended += 1
            jsonschema.validate(json.loads(text), schema)
    assert ended > 100


# ---- bounds

TWENTY_NINES = "0." + "9" * 20


@pytest.mark.parametrize(
    ("bounds", "legal", "illegal"),
    [
        ({"minimum": 0, "exclusiveMaximum": 1}, ["0", "0.5", "0.999999999999990"], [TWENTY_NINES, "1", "1.0"]),
        ({"exclusiveMinimum": 1, "maximum": 3}, ["1.00000000000001", "3"], ["1." + "0" * 20 + "1", "1"]),
        ({"exclusiveMinimum": -1, "maximum": 0}, ["-0.5"], ["-" + TWENTY_NINES, "-1"]),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.25", "0.5"], ["0", "0.0"]),
        ({"exclusiveMaximum": -2, "minimum": -2.25}, ["-2.1", "-2.25"], ["-2", "-2.0"]),
        ({"minimum": 0, "maximum": 2**53 + 3}, ["9007199254740990"], ["9007199254740995.0", "9007199254740996"]),
        ({"minimum": 0, "exclusiveMaximum": 0.3}, ["0.25"], ["0.3", "0.29999999999999999999"]),
    ],
)
def test_no_number_is_read_past_its_bound(
    small: Vocabulary, small_tokens: LLTokens, bounds: Any, legal: list[str], illegal: list[str]
) -> None:
    schema = {"type": "number", **bounds}
    for make in (lambda: table_matcher(small, json=schema), lambda: guided_matcher(small_tokens, json=schema)):
        assert [text for text in legal if not accepts(make(), text)] == []
        assert [text for text in illegal if accepts(make(), text)] == []
    for text in legal:
        jsonschema.validate(json.loads(text), schema)


def test_inclusive_bounds_leave_all_digits(small: Vocabulary) -> None:
    schema = {"type": "number", "minimum": 0, "maximum": 0.8444218515250481}
    for text in ("0.8444218515250481", "0.12345678901234567"):
        assert accepts(table_matcher(small, json=schema), text)


def test_random_numbers_next_to_an_excluded_bound() -> None:
    rng = random.Random(0)
    for _ in range(40):
        bound = round(rng.uniform(-3, 3), rng.randint(0, 4)) or 1
        name, step = rng.choice([("exclusiveMaximum", -1), ("exclusiveMinimum", 1)])
        schema = {"type": "number", name: bound}
        dfa = compile_regex(schema_to_regex(schema))
        for digits in range(1, 24):
            text = format_near(bound, step, digits)
            if dfa.accepts(text.encode()):
                jsonschema.validate(json.loads(text), schema)
            elif digits < 10:
                pytest.fail(f"{text} is refused under {schema}")


def format_near(bound: float, step: int, digits: int) -> str:
    """`bound` and one unit of the digit after so many."""
    scaled = round(bound * 10**4) * 10**digits + step
    whole, part = divmod(abs(scaled), 10 ** (4 + digits))
    return f"{'-' if scaled < 0 else ''}{whole}.{part:0{4 + digits}d}"


@pytest.mark.parametrize("bounds", [{"minimum": 10**40}, {"exclusiveMaximum": -(10**45)}])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_of_too_many_digits_are_named(bounds: Any, kind: str) -> None:
    with pytest.raises(NoTableError, match=next(iter(bounds))):
        schema_to_regex({"type": kind, **bounds})


# ---- formats

VALID = {  # RFC 3339, 1123, 5321 and 4122, and what people write
    "date": ["1985-04-12", "2024-02-29", "2000-02-29", "1996-12-19", "9999-12-31"],
    "time": ["23:20:50.52Z", "15:59:59-08:00", "12:00:27.87+00:20", "00:00:00z", f"01:02:03.{'1' * 20}Z"],
    "date-time": ["1985-04-12T23:20:50.52Z", "1996-12-19T16:39:57-08:00", "1937-01-01t12:00:27.87+00:20"],
    "uuid": ["f81d4fae-7dec-11d0-a765-00a0c91e6bf6", "F81D4FAE-7DEC-11D0-A765-00A0C91E6BF6"],
    "ipv4": ["127.0.0.1", "255.255.255.255", "0.0.0.0", "192.0.2.1"],
    "hostname": [
        "localhost", "example.com", "www.foo.co.uk", "a.b.c.d.e.f.g.h", "3com.com", "xn--bcher-kva.example",
        "a" * 63, ".".join(["a" * 63] * 3), "ec2-54-12-45-67.eu-central-1.compute.amazonaws.com", "1.2.3.4.5",
    ],
    "email": [
        "a@b.co", "me@localhost", "a.b.c@x.org", "first.last+tag@mail.example.co.uk", "x" * 64 + "@example.com",
        "o'neil_{1}@example.com", "a.b.c.d@sub.mail.example.com", "user%example.com@example.org",
        "christopher-montgomery.featherstonehaugh-smith@example.com",
    ],
}  # fmt: skip
INVALID = {
    "date": ["2023-02-29", "1900-02-29", "2024-13-01", "2024-4-1"],
    "time": ["24:00:00Z", "12:00:00", "12:00:60Z", "12:00:00.Z"],
    "date-time": ["2023-02-29T00:00:00Z", "2023-02-28 00:00:00Z"],
    "uuid": ["f81d4fae7dec11d0a76500a0c91e6bf6"],
    "ipv4": ["256.0.0.1", "01.2.3.4", "1.2.3"],
    "hostname": ["-a", "a-", "a..b", "a_b", "a" * 64, ".".join(["a" * 63] * 4), "a."],
    "email": ["a", "@b", "a@", ".a@b", "a.@b", "a..b@c", "x" * 65 + "@b", "a@-b", "a b@c"],
}


@pytest.mark.parametrize("name", VALID)
def test_values_of_formats(small: Vocabulary, small_tokens: LLTokens, name: str) -> None:
    schema = {"type": "string", "format": name}
    for make in (lambda: table_matcher(small, json=schema), lambda: guided_matcher(small_tokens, json=schema)):
        assert [text for text in VALID[name] if not accepts(make(), f'"{text}"')] == []
        assert [text for text in INVALID[name] if accepts(make(), f'"{text}"')] == []


@pytest.mark.parametrize("name", ["hostname", "email", "date-time"])
def test_formats_have_tables_with_a_real_vocabulary(smollm: Vocabulary, name: str) -> None:
    one = {"type": "string", "format": name}
    schema = {"type": "object", "properties": {"a": one, "b": one}, "additionalProperties": False}
    key = StructuredOutputsParams(json=schema).key()
    assert compile_grammar(key, smollm, frozenset({2}), GrammarLimits()).num_bytes < 4 << 20


def test_a_format_beside_a_pattern(small_tokens: LLTokens) -> None:
    schema = {"type": "string", "format": "email", "pattern": "^b"}
    for text, legal in {"b@c": True, "a@c": False, "b": False}.items():
        assert accepts(guided_matcher(small_tokens, json=schema), f'"{text}"') == legal


# ---- keywords


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"prefixItems": [{"type": "string"}], "items": [{"type": "integer"}]}, "prefixItems"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}], "nullable": True}, "nullable"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "required": ["a"], "minProperties": 3}, "minProperties"),
    ],
)
def test_what_llguidance_drops_is_refused_by_name(small_tokens: LLTokens, schema: Any, keyword: str) -> None:
    with pytest.raises(GrammarError, match=keyword):
        guided_matcher(small_tokens, json=schema)
    with pytest.raises(NoTableError):
        schema_to_regex(schema)


PLACES = {"components": "#/components/schemas/A", "$defs": "#/$defs/group/A", "x": "#/x/0/~1a%20b"}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "pattern": '^[^"]$'}, '"b"', '"\\""'),
        ({"type": "number", "minimum": 0.5, "exclusiveMaximum": 1}, "0.75", "0.99999999999999999999999"),
        ({"type": "string", "nullable": True}, "null", "1"),
        ({"type": "object", "properties": {"a": {"type": "null"}}}, '{"a":null}', '{"b":null}'),
        ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "REF"}}]}, "[[null]]", "[0]"),
    ],
)
def test_what_is_referred_to_is_held_wherever_it_stands(
    small_tokens: LLTokens, place: str, schema: Any, right: str, wrong: str
) -> None:
    """As in OpenAPI, whose schemas are under no keyword of JSON Schema."""
    ref = PLACES[place]
    schema = json.loads(json.dumps(schema).replace("REF", ref))
    places = {
        "components": {"components": {"schemas": {"A": schema}}},
        "$defs": {"$defs": {"group": {"A": schema}}},
        "x": {"x": [{"/a b": schema}]},
    }
    whole = {"$ref": ref, **places[place]}
    matcher = guided_matcher(small_tokens, json=whole, disable_additional_properties=True)
    assert accepts(matcher, right)
    assert not accepts(guided_matcher(small_tokens, json=whole, disable_additional_properties=True), wrong)


def test_a_definition_that_drops_too_much_is_refused_wherever_it_stands(small_tokens: LLTokens) -> None:
    schema = {"$ref": "#/components/A", "components": {"A": {"type": "object", "minProperties": 3}}}
    with pytest.raises(GrammarError, match="minProperties"):
        guided_matcher(small_tokens, json=schema)


def test_closed_parts_would_exclude_each_other(small_tokens: LLTokens) -> None:
    one, other = ({"type": "object", "properties": {name: {}}} for name in "ab")
    assert accepts(guided_matcher(small_tokens, json={"allOf": [one]}, disable_additional_properties=True), '{"a":1}')
    for schema in ({"allOf": [one, other]}, other | {"allOf": [one]}):
        with pytest.raises(GrammarError, match=r"allOf.*disable_additional_properties"):
            guided_matcher(small_tokens, json=schema, disable_additional_properties=True)


def test_a_keyword_that_asks_for_nothing(small_tokens: LLTokens) -> None:
    array = {"type": "array", "uniqueItems": False}
    matcher = guided_matcher(small_tokens, json={"type": "object", "properties": {"a": array}})
    assert accepts(matcher, '{"a":[1,1]}')


def test_why_a_pattern_is_refused(small_tokens: LLTokens) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}
    with pytest.raises(GrammarError, match="look-around") as caught:
        guided_matcher(small_tokens, json=schema)
    assert "llguidance" not in str(caught.value)


@pytest.mark.parametrize("type_", ["string", ["string", "integer"], ["string", "null"]])
def test_nullable(small: Vocabulary, small_tokens: LLTokens, type_: Any) -> None:
    schema = {"type": type_, "nullable": True}
    for matcher in (table_matcher(small, json=schema), guided_matcher(small_tokens, json=schema)):
        assert accepts(matcher, "null")
        assert accepts(matcher, '"a"')
    for matcher in (
        table_matcher(small, json={"type": "string"}),
        guided_matcher(small_tokens, json={"type": "string", "nullable": False}),
    ):
        assert not accepts(matcher, "null")


@pytest.mark.parametrize("type_", ["object", ["object", "null"]])
def test_objects_of_any_type_list_are_closed(small_tokens: LLTokens, type_: Any) -> None:
    assert closed({"type": type_}) == {"type": type_, "additionalProperties": False}
    matcher = guided_matcher(small_tokens, json={"type": type_}, disable_additional_properties=True)
    assert accepts(matcher, "{}")
    assert not accepts(matcher, '{"a":1}')


def test_names_of_directives_are_text(small: Vocabulary, small_tokens: LLTokens) -> None:
    name = "%llguidance"
    assert accepts(guided_matcher(small_tokens, json={"const": name}), f'"{name}"')
    choice = StructuredOutputsParams(choice=[name, "%json"]).key()
    gbnf = StructuredOutputsParams(grammar=f'root ::= "{name}" root | "."').key()
    for key, text in ((choice, name), (gbnf, f"{name}.")):
        assert accepts(MatcherGrammar(small_tokens, to_lark(key), STOPS).new_matcher(), text)


# ---- whitespace


@pytest.mark.parametrize(
    ("options", "legal", "illegal"),
    [
        ({"whitespace_pattern": "^ ?$"}, ['{"a":1}', '{ "a":1}'], ['{^$"a":1}', '{  "a":1}', '{^"a":1}']),
        ({"whitespace_pattern": ""}, ['{"a":1}'], ['{ "a":1}', '{"a": 1}']),
        ({"whitespace_pattern": "^"}, ['{"a":1}'], ['{ "a":1}', '{^"a":1}']),
        ({"whitespace_pattern": r"[ \n]{0,2}"}, ['{ \n"a":1}'], ['{   "a":1}']),
    ],
)
def test_whitespace_pattern(
    small: Vocabulary, small_tokens: LLTokens, options: Any, legal: list[str], illegal: list[str]
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    for matcher in (table_matcher(small, json=schema, **options), guided_matcher(small_tokens, json=schema, **options)):
        assert [text for text in legal if not accepts(matcher, text)] == []
        assert [text for text in illegal if accepts(matcher, text)] == []


@pytest.mark.parametrize("regex", ["a^b", "a$b", "(^a)", "a|^b$|c"])
def test_inner_anchors_have_no_table(regex: str) -> None:
    with pytest.raises(NoTableError, match="anchor"):
        compile_regex(regex)
