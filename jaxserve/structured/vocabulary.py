"""What every token of a tokenizer spells, in bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

_SPACE = "\u2581"  # how sentencepiece writes a space


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """token_bytes: of every id up to the width of the logits; None for an id that spells nothing: special tokens and
    padding. encoder: a `tokenizers.Tokenizer`, or any object with encode(str) -> ids, for canonical tokenisation; None
    takes the longest match."""

    token_bytes: tuple[bytes | None, ...]
    encoder: Any = field(default=None, repr=False)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, vocab_size: int | None = None) -> Vocabulary:
        """Of a transformers fast tokenizer, a `tokenizers.Tokenizer` (byte-level BPE or sentencepiece with byte
        fallback), or of any object with decode(ids) and len(). vocab_size: width of the logits, which may be padded.

        Tokens past vocab_size are left out: no logits are for them. Raises ValueError for a tokenizer of another kind.
        """
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if hasattr(backend, "get_added_tokens_decoder"):
            spelled, encoder = _of_backend(backend), backend
        else:
            spelled, encoder = _of_decode(tokenizer), None
        size = max(spelled, default=-1) + 1 if vocab_size is None else vocab_size
        return cls(tuple(spelled.get(i) for i in range(size)), encoder)

    def __len__(self) -> int:
        return len(self.token_bytes)

    @cached_property
    def spelled_ids(self) -> np.ndarray:
        """[T] int32: the ids that spell something, by id."""
        return np.array([i for i, b in enumerate(self.token_bytes) if b], np.int32)

    @cached_property
    def lengths(self) -> np.ndarray:
        """[T] int64: bytes of each of spelled_ids."""
        return np.array([len(self.token_bytes[i] or b"") for i in self.spelled_ids], np.int64)

    @cached_property
    def flat(self) -> np.ndarray:
        """[sum(lengths)] uint8: their bytes, one after the other."""
        return np.frombuffer(b"".join(self.token_bytes[i] or b"" for i in self.spelled_ids), np.uint8)

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        return {b: i for i, b in reversed(list(enumerate(self.token_bytes))) if b}

    @cached_property
    def _longest(self) -> int:
        return int(self.lengths.max(initial=0))

    def decode(self, token_ids: Iterable[int]) -> bytes:
        """The bytes that these tokens spell together."""
        return b"".join(self.token_bytes[t] or b"" for t in token_ids)

    def tokenize(self, text: bytes) -> list[int]:
        """How the tokenizer itself would write `text`; longest matches where it cannot (bytes that are no text, a
        normalizer that changes it). Stops where no token fits."""
        if self.encoder is not None:
            try:
                encoded = self.encoder.encode(text.decode("utf-8"), add_special_tokens=False)
                ids = list(getattr(encoded, "ids", encoded))
                if max(ids, default=0) < len(self) and self.decode(ids) == text:
                    return ids
            except UnicodeDecodeError:
                pass
        return self._longest_matches(text)

    def _longest_matches(self, text: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            match = next((end for end in ends if text[at:end] in self._id_of), None)
            if match is None:
                break
            ids.append(self._id_of[text[at:match]])
            at = match
        return ids


def _of_backend(backend: Any) -> dict[int, bytes | None]:
    decoder = json.dumps(json.loads(backend.to_str()).get("decoder"), ensure_ascii=False)
    if '"ByteLevel"' in decoder:
        spell = _byte_level
    elif '"ByteFallback"' in decoder or '"Metaspace"' in decoder or _SPACE in decoder:
        spell = _sentencepiece
    else:
        raise ValueError(f"structured output does not know what the tokens of this tokenizer spell: decoder={decoder}")
    spelled = {i: spell(token) for token, i in backend.get_vocab(with_added_tokens=True).items()}
    for i, token in backend.get_added_tokens_decoder().items():
        spelled[i] = None if token.special else token.content.encode("utf-8")
    return spelled


def _of_decode(tokenizer: Any) -> dict[int, bytes | None]:
    """Token by token. A token whose text is no whole character spells nothing that is known."""
    special = set(getattr(tokenizer, "all_special_ids", ()))
    texts = {i: tokenizer.decode([i]) for i in range(len(tokenizer)) if i not in special}
    known: dict[int, bytes | None] = {i: t.encode("utf-8") for i, t in texts.items() if t and "\ufffd" not in t}
    return {i: known.get(i) for i in range(len(tokenizer))}


def _byte_level(token: str) -> bytes | None:
    try:
        return bytes(_BYTE_OF_CHAR[c] for c in token)
    except KeyError:
        return None


def _sentencepiece(token: str) -> bytes | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode("utf-8")


def _printable_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for characters from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in own]
    return {chr(b): b for b in own} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _printable_bytes()


def pack_bits(bits: np.ndarray) -> np.ndarray:
    """[..., V] bool to [..., ceil(V / 32)] uint32: bit t % 32 of word t // 32 is token t."""
    width = -(-bits.shape[-1] // 32) * 32
    padded = np.zeros((*bits.shape[:-1], width), bool)
    padded[..., : bits.shape[-1]] = bits
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def unpack_bits(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """The inverse of pack_bits: [..., W] uint32 to [..., vocab_size] bool."""
    octets = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(octets, axis=-1, bitorder="little", count=vocab_size).astype(bool)


def legal_ids(words: Sequence[int] | np.ndarray, vocab_size: int) -> list[int]:
    """The tokens of one mask [W]."""
    return np.flatnonzero(unpack_bits(np.asarray(words, np.uint32), vocab_size)).tolist()
