"""What tokens spell, against what their tokenizers decode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxserve.structured.vocabulary import Vocabulary, legal_ids, pack_bits, unpack_bits

TEXTS = ["Hello, world!", " naïve café\n\t12 345", "日本語 🙂🙂", "a\x00b", "", "{'key': [1.5e-3, null]}"]


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"he": 256, "hel": 257, "Ġw": 258}
    tokenizer = Tokenizer(models.BPE(vocab, [("h", "e"), ("he", "l"), ("Ġ", "w")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.add_tokens([AddedToken("<plain>", normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    vocab = [
        ("<unk>", 0.0),
        *((f"<0x{b:02X}>", -20.0) for b in range(256)),
        ("\u2581", -1.0),
        ("\u2581a", -2.0),
        ("b", -3.0),
    ]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_tokens_spell_the_text_that_they_encode(make: Any, text: str) -> None:
    tokenizer = make()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert vocabulary.decode(ids) == text.encode()
    assert vocabulary.tokenize(text.encode()) == ids


def test_the_demo_models_tokens(smollm: Vocabulary) -> None:
    tokenizer = smollm.encoder
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert smollm.decode(ids) == text.encode()
    whole = [i for i in smollm.spelled_ids if b"\xef\xbf\xbd" not in tokenizer.decode([i]).encode()]
    assert len(whole) > 48_000
    for i in whole[::97]:
        assert tokenizer.decode([i]).encode() == smollm.token_bytes[i]


def test_special_tokens_and_padding_spell_nothing() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, 300)
    assert len(vocabulary) == 300
    assert vocabulary.token_bytes[tokenizer.token_to_id("<eos>")] is None
    assert vocabulary.token_bytes[tokenizer.token_to_id("<plain>")] == b"<plain>"
    assert set(vocabulary.token_bytes[261:]) == {None}
    assert tokenizer.token_to_id("<eos>") not in vocabulary.spelled_ids
    assert b"".join(vocabulary.token_bytes[i] for i in vocabulary.spelled_ids) == vocabulary.flat.tobytes()
    assert vocabulary.lengths.sum() == len(vocabulary.flat)


def test_tokens_past_the_logits_are_left_out() -> None:
    """A padding token that was added to a tokenizer, for one: no text is written with it."""
    tokenizer = byte_level()
    everything, some = (Vocabulary.from_tokenizer(tokenizer, size) for size in (None, 258))
    assert some.token_bytes == everything.token_bytes[:258]
    last = everything.token_bytes[260]
    assert last
    for text in (b"abc", b"a" + last):
        assert max(some.tokenize(text)) < 258
        assert some.decode(some.tokenize(text)) == text


def test_tokenizers_of_another_kind_are_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="decoder="):
        Vocabulary.from_tokenizer(tokenizer)


def test_what_cannot_be_encoded_is_matched_by_the_longest_token() -> None:
    vocabulary = Vocabulary((b"a", b"ab", b"abc", None, b"\xff", b""))
    assert vocabulary.tokenize(b"ababc\xffa") == [1, 2, 4, 0]
    assert vocabulary.tokenize(b"abz") == [1]
    assert Vocabulary.from_tokenizer(byte_level()).tokenize(b"\xffhe") == [byte_level().token_to_id("ÿ"), 256]


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_masks_are_packed_without_loss(bits: list[bool]) -> None:
    words = pack_bits(np.array(bits))
    assert words.dtype == np.uint32
    assert len(words) == -(-len(bits) // 32)
    assert unpack_bits(words, len(bits)).tolist() == bits
    assert legal_ids(words, len(bits)) == [i for i, bit in enumerate(bits) if bit]
    assert all(words[i // 32] >> np.uint32(i % 32) & np.uint32(1) == bit for i, bit in enumerate(bits))
