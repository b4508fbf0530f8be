"""The engine's own processors: allowed_token_ids and min_tokens (dense), bad_words and logit_bias (sparse)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxserve.sampling.processor import LogitsProcessor, ProcessorConfig, Row
from jaxserve.sampling_params import SamplingParams
from models.base import Array

MAX_LOGIT_BIAS = 1024  # entries of a request
MAX_BAD_WORDS = 128  # token sequences of a request; a word has one or two
MAX_BAD_WORD_TOKENS = 16


def pack_ids(ids: Any, vocab: int) -> np.ndarray:
    """Token ids as bits: [W] uint32, id t is bit t % 32 of word t // 32."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def unpack_bits(words: jax.Array, vocab: int) -> jax.Array:
    """[..., W] uint32 -> [..., V] bool."""
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :vocab].astype(bool)


class AllowedTokenIds(LogitsProcessor):
    """Nothing but the given ids. The parameter is a bit for every id."""

    neutral_when_empty = True

    def __init__(self, config: ProcessorConfig) -> None:
        super().__init__(config)
        self._all = np.full(-(-config.vocab_size // 32), 0xFFFFFFFF, np.uint32)

    def row(self, params: SamplingParams) -> Any | None:
        ids = params.allowed_token_ids
        return None if ids is None else pack_ids(ids, self.config.vocab_size)

    def empty_row(self) -> Any:
        return self._all

    def apply(self, logits: jax.Array, row: Row) -> jax.Array:
        return jnp.where(unpack_bits(row.params, logits.shape[0]), logits, -jnp.inf)


class BadWords(LogitsProcessor):
    """Masks the last token of a word when the output ends with the ones before it."""

    neutral_when_empty = True

    def __init__(self, config: ProcessorConfig) -> None:
        super().__init__(config)
        self._empty = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)

    def validate(self, params: SamplingParams) -> None:
        if params.bad_words and self.config.tokenizer is None:
            raise ValueError(f"bad_words={params.bad_words!r} needs a tokenizer, and this engine has none")
        words = self.token_ids(params)
        if [] in words:
            raise ValueError(f"bad_words={params.bad_words!r} holds a word that is no token; each must be at least one")
        if len(words) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words has {len(words)} token sequences; it must have at most {MAX_BAD_WORDS}")
        for ids in words:
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise ValueError(
                    f"bad_words holds a word of {len(ids)} tokens; each must have at most {MAX_BAD_WORD_TOKENS}"
                )

    def token_ids(self, params: SamplingParams) -> list[list[int]]:
        """Token sequences of the words: as they start a text and, where that is another first token, after a space.
        Words of spaces and line ends are taken as they are."""
        words = []
        for word in params.bad_words:
            text = word.lstrip()
            plain = self._encode(text or word)
            words.append(plain)
            spaced = self._encode(" " + text) if text else []
            if len(spaced) == len(plain) > 0 and spaced[0] != plain[0]:
                words.append(spaced)
        return words

    def _encode(self, text: str) -> list[int]:
        assert self.config.tokenizer is not None
        return list(self.config.tokenizer.encode(text, add_special_tokens=False))

    def row(self, params: SamplingParams) -> Any | None:
        if not params.bad_words:
            return None
        words = self._empty.copy()
        for i, ids in enumerate(self.token_ids(params)):
            words[i, -len(ids) :] = ids
        return words

    def empty_row(self) -> Any:
        return self._empty

    def apply(self, logits: jax.Array, row: Row) -> jax.Array:
        before, last = row.params[:, :-1], row.params[:, -1]  # right-aligned
        match = jnp.all((before < 0) | (before == row.last_output(before.shape[1])), axis=1) & (last >= 0)
        return logits.at[jnp.where(match, last, logits.shape[0])].set(-jnp.inf, mode="drop")


@struct.dataclass
class _MinTokens:
    count: Array  # int32
    stop: Array  # [W] uint32, the ids that may not come before


class MinTokens(LogitsProcessor):
    """Masks whatever would end the request while its output is shorter than min_tokens."""

    neutral_when_empty = True

    def row(self, params: SamplingParams) -> Any | None:
        if not params.min_tokens:
            return None
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self.config.stop_token_ids)}
        return _MinTokens(np.int32(params.min_tokens), pack_ids(stops, self.config.vocab_size))

    def empty_row(self) -> Any:
        return _MinTokens(np.int32(0), np.zeros(-(-self.config.vocab_size // 32), np.uint32))

    def apply(self, logits: jax.Array, row: Row) -> jax.Array:
        words = jnp.where(row.output_len < row.params.count, row.params.stop, jnp.uint32(0))
        return jnp.where(unpack_bits(words, logits.shape[0]), -jnp.inf, logits)


@struct.dataclass
class _Bias:
    ids: Array  # [N] int32, V = none
    values: Array  # [N] float32


class LogitBias(LogitsProcessor):
    """Adds a number to a few logits."""

    neutral_when_empty = True

    def __init__(self, config: ProcessorConfig) -> None:
        super().__init__(config)
        self._empty = _Bias(np.full(MAX_LOGIT_BIAS, config.vocab_size, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32))

    def validate(self, params: SamplingParams) -> None:
        bias = params.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(bias)} entries; it must have at most {MAX_LOGIT_BIAS}")

    def row(self, params: SamplingParams) -> Any | None:
        if not params.logit_bias:
            return None
        ids, values = self._empty.ids.copy(), self._empty.values.copy()
        ids[: len(params.logit_bias)] = list(params.logit_bias)
        values[: len(params.logit_bias)] = list(params.logit_bias.values())
        return _Bias(ids, values)

    def empty_row(self) -> Any:
        return self._empty

    def apply(self, logits: jax.Array, row: Row) -> jax.Array:
        return logits.at[row.params.ids].add(row.params.values, mode="drop")


BUILTIN = (AllowedTokenIds, BadWords, MinTokens, LogitBias)  # in the order they are applied
