"""The contract of matchers, and that tables and llguidance allow the same tokens."""

import re

import numpy as np
import pytest

from jaxserve.structured.config import MatcherLimits
from jaxserve.structured.dfa import GrammarLimits
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.lark import to_lark
from jaxserve.structured.matcher import LLTokens, MatcherGrammar, TableMatcher, Window, fill_windows
from jaxserve.structured.params import StructuredOutputsParams
from jaxserve.structured.vocabulary import Vocabulary, legal_ids, unpack_bits
from jaxserve.structured.worker import compile_grammar
from tests.structured.conftest import EOS, STOPS, make_matcher
from tests.structured.schemas import Walker

WORDS = 10
NUMBER = {"type": "number"}
AMBIGUOUS = 'start: expr\nexpr: "a" | expr expr\n'  # every "a" costs more than the one before it
SPARING = MatcherLimits(step_max_items=60)
SHARED = [
    {"regex": "[a-c]{2,5}(x|yz)*[0-9]?"},
    {"regex": "[^a]{1,6}é*日?"},
    {"choice": ["yes", "no", "not now", "né 日本"]},
    {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 5}},
    {"json": {"enum": ["a", 1, None, {"k": [1, "x"]}]}},
    {"json": {"type": "object", "properties": {"id": {"type": "string"}, "a": {"enum": ["x", "y"]}},
              "required": ["a"], "additionalProperties": False}},
    {"json": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    {"json": {"type": "integer", "minimum": 3, "maximum": 1200}},
    {"json": NUMBER},
    {"json": {"type": "string", "pattern": "^[a-c]{2,4}é?x$"}},
    {"json": {"type": "string", "format": "date"}},
    {"json": {"type": "string", "minLength": 2, "maxLength": 5}},
    {"json": {"type": "object", "properties": {"a": {"type": "object", "properties": {"k": {"type": "boolean"}},
              "required": ["k"], "additionalProperties": False}, "b": {"type": "null"}}, "required": ["b"],
              "additionalProperties": False}},
]  # fmt: skip


def key_of(**kinds):
    return StructuredOutputsParams(**kinds).key()


@pytest.fixture(params=["table", "llguidance"])
def matcher(request, small, small_tokens):
    return lambda stops=STOPS, **kinds: make_matcher(request.param, small, small_tokens, stops, **kinds)


def rows(matcher, drafts, vocab_size=320):
    out = np.zeros((len(drafts) + 1, WORDS), np.uint32)
    legal = matcher.fill(drafts, out)
    return legal, [set(legal_ids(row, vocab_size)) for row in out]


EVERYTHING = set(range(320))


def test_masks_behind_drafts(matcher, small):
    m = matcher(regex="ab")
    ab = small.tokenize(b"ab")[0]
    legal, masks = rows(m, [97, 98, EOS, EOS])
    assert legal == 4
    assert masks == [{97, ab}, {98}, {EOS}, {EOS}, {EOS}]
    assert rows(m, [])[1] == [{97, ab}]  # nothing was advanced


def test_rows_behind_an_illegal_draft_allow_everything(matcher):
    m = matcher(regex="ab")
    for wrong in (99, EOS, 319, 5000, -1):
        legal, masks = rows(m, [97, wrong, 98])
        assert legal == 1
        assert masks[1:] == [{98}, EVERYTHING, EVERYTHING]


def test_stop_ids_end_whole_texts_only(matcher):
    stops = frozenset({EOS, 310, ord("c")})
    m = matcher(stops, regex="a[bc]?")
    m.accept([97])
    assert rows(m, [])[1] == [{98} | stops]  # "c" is a stop id, never text
    assert not m.exhausted
    m.accept([98])
    assert m.exhausted
    assert not m.is_done
    m.accept([310])
    assert m.is_done
    assert m.exhausted
    with pytest.raises(GrammarError):
        m.accept([97])


def test_no_stop_ids(matcher):
    m = matcher(frozenset(), regex="ab?")
    legal, masks = rows(m, [97, 98, 97])
    assert legal == 2
    assert masks[1] == {98}
    assert masks[2:] == [EVERYTHING, EVERYTHING]
    m.accept([97, 98])
    assert m.exhausted


@pytest.mark.parametrize("tokens", [[98], [97, EOS], [97, 98, 98], [EOS], [97, 98, EOS, 97], [5000]])
def test_illegal_tokens_are_not_accepted(matcher, tokens):
    with pytest.raises(GrammarError):
        matcher(regex="ab").accept(tokens)


def test_forced_tokens_are_legal_drafts(matcher, small):
    schema = {"type": "object", "properties": {"name": {"const": "x"}}, "required": ["name"]}
    schema["additionalProperties"] = False
    m = matcher(json=schema, disable_any_whitespace=True)
    drafts = m.forced(32)
    assert small.decode(drafts) == b'{"name":"x"}'
    assert m.forced(2) == drafts[:2]
    assert m.forced(0) == []
    assert rows(m, drafts)[0] == len(drafts)
    m.accept(drafts)
    assert m.forced(4) == []


def test_special_tokens_and_padding_are_never_legal(matcher, small):
    m = matcher(regex="[^a]*")
    mask = rows(m, [])[1][0]
    assert mask - {EOS} <= set(small.spelled_ids.tolist())
    assert EOS in mask


@pytest.mark.parametrize("kinds", SHARED, ids=range(len(SHARED)))
def test_tables_equal_llguidance(kinds, small, small_tokens):
    """On every state of random walks. NUL is in no table. Left out is what is known to differ: tables offer -0, and a
    second space in an empty array, and count an escaped pair of surrogates as the one character that it is. Within an
    escape llguidance offers less: not \\/, and by \\u of ASCII only what has to be written like this."""
    table = compile_grammar(key_of(**kinds), small, STOPS, GrammarLimits())
    grammar = MatcherGrammar(small_tokens, to_lark(key_of(**kinds)), STOPS, is_json="json" in kinds)
    walker, steps = Walker(small, seed=1), 0
    mine, theirs = np.empty((1, WORDS), np.uint32), np.empty((1, WORDS), np.uint32)
    while steps < 100_000 / len(SHARED):
        one, other, text = TableMatcher(table), grammar.new_matcher(), b""
        while not one.is_done:
            steps += 1
            assert one.fill((), mine) == other.fill((), theirs) == 0
            if "json" in kinds and re.search(rb"\\(u[0-9a-fA-F]{0,3})?$", text):
                assert not (theirs & ~mine).any()
                assert theirs.any()
                mine &= theirs
            differ = set(legal_ids(mine[0] ^ theirs[0], len(small)))
            assert not differ - {0}, (steps, [small.token_bytes[t] for t in differ])
            if one.exhausted != other.exhausted:  # llguidance would take more digits than are offered
                assert kinds == {"json": NUMBER}
                assert legal_ids(theirs[0], len(small)) == [EOS]
            token = walker.draw(mine[0], STOPS)
            text += small.token_bytes[token] or b""
            one.accept([token])
            other.accept([token])


def test_tables_equal_llguidance_with_a_real_tokenizer(smollm, smollm_tokens):
    stops = frozenset({0, 2})
    out = np.empty((2, 1, -(-len(smollm) // 32)), np.uint32)
    for kinds in SHARED[1:6]:
        one, other = (
            make_matcher(backend, smollm, smollm_tokens, stops, **kinds) for backend in ("table", "llguidance")
        )
        walker = Walker(smollm, seed=2)
        for _ in range(40):
            one.fill((), out[0])
            other.fill((), out[1])
            differ = np.flatnonzero(unpack_bits(out[0, 0] ^ out[1, 0], len(smollm)))
            assert all(b"\0" in (smollm.token_bytes[t] or b"") for t in differ), (
                kinds,
                [smollm.token_bytes[t] for t in differ][:20],
            )
            token = walker.draw(out[0, 0], stops)
            one.accept([token])
            other.accept([token])
            if one.is_done:
                break


def stubborn(matcher, small, first: bytes, wanted: bytes) -> bytes:
    """What a model writes behind `first` that takes one of the bytes `wanted` wherever it may, else the end."""
    text = first
    matcher.accept(list(first))
    while not matcher.is_done:
        assert len(text) < 200
        legal = rows(matcher, [])[1][0]
        token = next((b for b in wanted if b in legal), EOS)
        assert token in legal, text
        matcher.accept([token])
        text += small.token_bytes[token] or b""
    return text


@pytest.mark.parametrize(
    ("schema", "first", "wanted", "written"),
    [
        (NUMBER, b"", b"7", b"7" * 32),
        (NUMBER, b"-", b"7.", b"-" + b"7" * 32 + b"." + b"7" * 32),
        (NUMBER, b"1.", b"7e", b"1." + b"7" * 32 + b"e777"),
        (NUMBER, b"1e+", b"0", b"1e+000"),
        ({"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}, b"", b"[7,]",
         b"[" + b"7" * 32 + b"," + b"7" * 32 + b"]"),
    ],
)  # fmt: skip
def test_no_model_can_spin_on_digits(matcher, small, schema, first, wanted, written):
    assert stubborn(matcher(json=schema), small, first, wanted) == written


def test_digits_of_strings_and_what_the_schema_asks_for_stay(small, small_tokens):
    """Also in keys, behind escapes; and where nothing but digits can follow."""
    for schema, text in [
        ({"type": "object"}, b'{"a\\"' + b"1" * 50 + b'":"' + b"2" * 50 + b'"}'),
        ({"const": 10**40}, str(10**40).encode()),
    ]:
        assert rows(make_matcher("llguidance", small, small_tokens, json=schema), list(text))[0] == len(text)
        long = make_matcher("llguidance", small, small_tokens, json=schema)
        for byte in text:
            assert byte in rows(long, [])[1][0]
            long.accept([byte])


def test_a_token_of_several_digits_at_the_bound(matcher, small):
    """Drafts, and then the token, end where it would write one digit too many."""
    several = small.token_bytes.index(b"12")
    number = matcher(json={"type": "integer"})
    assert rows(number, [several] * 16)[0] == 16
    number.accept([ord("1")])
    legal, masks = rows(number, [several] * 16)
    assert legal == 15
    assert several not in masks[15]
    assert ord("2") in masks[15]


def test_a_vocabulary_without_special_tokens():
    plain = Vocabulary(tuple(bytes([b]) for b in range(256)))
    grammar = MatcherGrammar(LLTokens(plain), to_lark(key_of(regex="ab")), frozenset())
    out = np.empty((2, 8), np.uint32)
    assert grammar.new_matcher().fill([97], out) == 1
    assert [legal_ids(row, 256) for row in out] == [[97], [98]]


def test_every_request_has_a_matcher_of_its_own(small_tokens):
    grammar = MatcherGrammar(small_tokens, to_lark(key_of(regex="ab")), STOPS)
    first, second = grammar.new_matcher(), grammar.new_matcher()
    first.accept([97])
    assert rows(first, [])[1] == [{98}]
    assert 97 in rows(second, [])[1][0]


def test_running_out_of_fuel_is_an_error_not_an_end(small_tokens):
    def use_up() -> None:
        matcher = MatcherGrammar(small_tokens, AMBIGUOUS, STOPS, SPARING).new_matcher()
        for _ in range(60):
            rows(matcher, [97, 97])
            matcher.accept([97])

    with pytest.raises(GrammarError):
        use_up()


def test_windows_filled_together_equal_windows_filled_alone(small, small_tokens):
    """Whatever follows the texts, tables or llguidance, and with drafts of any number, illegal ones and stop ids among
    them. One window uses up its fuel, which is nothing to the others."""
    rng = np.random.default_rng(0)
    made = [(backend, kinds) for kinds in SHARED for backend in ("table", "llguidance", "llguidance")]
    together, alone = (
        [make_matcher(backend, small, small_tokens, **kinds) for backend, kinds in made] for _ in range(2)
    )
    spent = MatcherGrammar(small_tokens, AMBIGUOUS, STOPS, SPARING).new_matcher()
    spent.accept([97] * 9)
    walker = Walker(small, seed=3)
    num_illegal = 0
    for _ in range(40):
        drafts: list[list[int]] = []
        expected, counts = [], []
        for matcher in alone:
            known = [int(rng.integers(320)) if rng.random() < 0.2 else -1 for _ in range(rng.integers(5))]
            out = np.zeros((1 + len(known), WORDS), np.uint32)
            for place, token in enumerate(known):  # a legal one behind those before it
                if token < 0:
                    matcher.fill(known[:place], out)
                    known[place] = walker.draw(out[place], STOPS)
            legal = matcher.fill(known, out)
            num_illegal += legal < len(known)
            counts.append(legal)
            drafts.append(known)
            expected.append(out)
        filled = [np.zeros_like(out) for out in expected]
        windows = [Window(*window) for window in zip(together, drafts, filled, strict=True)]
        results = fill_windows([*windows, Window(spent, [97] * 4, np.zeros((5, WORDS), np.uint32))])
        assert results[:-1] == counts
        assert isinstance(results[-1], GrammarError)
        for mine, theirs in zip(filled, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        for number, (one, other) in enumerate(zip(together, alone, strict=True)):
            if other.is_done:
                together[number], alone[number] = (make_matcher(made[number][0], small, small_tokens, **made[number][1])
                                                   for _ in range(2))  # fmt: skip
                continue
            token = walker.draw(expected[number][0], STOPS)
            one.accept([token])
            other.accept([token])
    assert num_illegal > 100


def test_stop_ids_outside_the_vocabulary(small, small_tokens):
    for backend in ("table", "llguidance"):
        with pytest.raises(ValueError, match="320"):
            make_matcher(backend, small, small_tokens, frozenset({320}), regex="a")


def test_a_grammar_that_no_token_begins():
    digits = Vocabulary((b"0", b"1", None))
    with pytest.raises(GrammarError):
        MatcherGrammar(LLTokens(digits), to_lark(key_of(regex="a")), frozenset({2}))
    with pytest.raises(GrammarError, match="cannot spell"):
        compile_grammar(key_of(regex="a"), digits, frozenset({2}), GrammarLimits())
