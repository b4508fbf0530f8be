"""Token ids to text, one token at a time: whole characters only, and never past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"  # what decoders put in place of bytes that are no character (yet)
PRIME_TOKENS = 8  # of the prompt: a character has at most four bytes, and a word boundary needs a neighbour
_INVALID_PREFIX = "Invalid prefix"


class StopMatch(NamedTuple):
    """A stop string was found. num_tokens: how many of the pushed tokens belong to the output."""

    stop: str
    num_tokens: int


def find_stop_string(text: str, num_new: int, stop: Sequence[str], include: bool) -> tuple[str, int] | None:
    """The stop string that ends first in the last `num_new` characters, and how many characters of `text` to keep.

    Only the new characters and as many before them as a match can overlap are searched. Of two that end at the same
    character the one listed first wins. Returns None when there is none.
    """
    best: tuple[str, int] | None = None
    best_end = len(text) + 1
    for s in stop:
        at = text.find(s, max(0, len(text) - num_new - len(s) + 1))
        if at >= 0 and at + len(s) < best_end:
            best_end = at + len(s)
            best = (s, best_end if include else at)
    return best


def held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that may turn out to be the beginning of a stop string."""
    longest = 0
    for s in stop:
        for length in range(min(len(s) - 1, len(text)), longest, -1):
            if text.endswith(s[:length]):
                longest = length
                break
    return longest


class Detokenizer:
    """Text of one sequence as its tokens arrive.

    Invariant: `text` never ends inside a character, holds nothing of the prompt, and once a stop string matched it
    is final. Feeding tokens one by one or several at once gives the same text and the same match.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """tokenizer: a transformers fast tokenizer or a `tokenizers.Tokenizer`; any other object with
        decode(ids, skip_special_tokens=...) works too, several times slower. min_tokens: stop strings that end
        within so many first tokens are ignored.
        """
        self.text = ""
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stream = _Stream(tokenizer, prompt_token_ids, skip_special_tokens)
        # Decoders put a space before a special token; asked not to, take its content as it is after another one.
        separate = skip_special_tokens or spaces_between_special_tokens
        self._joined: dict[int, str] = {} if separate else _added_tokens(tokenizer)
        self._after_special = False

    def push(self, token_ids: Sequence[int], *, hidden_last: bool = False) -> StopMatch | None:
        """Appends tokens; returns the match when a stop string ends the sequence at one of them.

        hidden_last: the last of them only ended the sequence and has no text.
        """
        for i, token in enumerate(token_ids):
            self._num_tokens += 1
            if hidden_last and i == len(token_ids) - 1:
                break
            piece = self._stream.step(token)
            if self._joined:
                piece = self._join_special(token, piece)
            if not piece:
                continue
            self.text += piece
            if self._stop and self._num_tokens > self._min_tokens:
                match = find_stop_string(self.text, len(piece), self._stop, self._include)
                if match is not None:
                    self.text = self.text[: match[1]]
                    return StopMatch(match[0], i + 1)
        return None

    def num_visible(self, finished: bool) -> int:
        """How many characters of `text` may be shown: all when finished, else not what may become a stop string."""
        if finished or not self._stop or self._include:
            return len(self.text)
        return len(self.text) - held_back(self.text, self._stop)

    def _join_special(self, token: int, piece: str) -> str:
        content = self._joined.get(token)
        joined = content if content is not None and self._after_special else piece
        self._after_special = content is not None
        return joined


class _Decode(Protocol):
    def step(self, tokenizer: Any, token: int) -> str | None: ...


class _Stream:
    """A stream decoder primed with the end of the prompt, so that the first token is decoded in its context.

    A prompt may end inside a character: what it shows of it is withheld from the first piece of output.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = _backend(tokenizer)
        self._skip_special = skip_special_tokens
        self._pending: list[int] = []  # tokens since the last piece of text
        self._withheld = ""
        context = list(prompt_token_ids[-PRIME_TOKENS:])
        text = self._decode(context)
        if not text.endswith(REPLACEMENT):
            self._stream = self._start(context)
            return
        done, cut = text, len(context)
        while done.endswith(REPLACEMENT):
            cut -= 1
            done = self._decode(context[:cut])
        self._stream = self._start(context[:cut])
        for token in context[cut:]:
            self.step(token)
        self._withheld = text[len(done) :]

    def step(self, token: int) -> str:
        """The text that `token` completes; "" while it is inside a character."""
        self._pending.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token)
        except Exception as error:  # the class is Exception itself, only the message tells
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            piece = self._restart()
        if piece is None:
            return ""
        self._pending.clear()
        if self._withheld:
            same = (a == b for a, b in zip(piece, self._withheld, strict=False))
            piece = piece[sum(takewhile(bool, same)) :]
            self._withheld = ""
        return piece

    def _restart(self) -> str | None:
        """Some decoders change text they gave already when invalid bytes follow it: go on behind that text."""
        self._stream = self._start([])
        pieces = [self._stream.step(self._tokenizer, token) for token in self._pending]
        return "".join(piece for piece in pieces if piece) or None

    def _start(self, ids: list[int]) -> _Decode:
        kind = DecodeStream if isinstance(self._tokenizer, Tokenizer) else _PlainDecodeStream
        return kind(ids=ids, skip_special_tokens=self._skip_special)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)


class _PlainDecodeStream:
    """DecodeStream for tokenizers that have only decode(): decodes the last piece again with every token."""

    def __init__(self, ids: list[int], skip_special_tokens: bool) -> None:
        self._ids = list(ids)
        self._context = len(ids)  # ids whose text is `prefix`
        self._skip_special = skip_special_tokens
        self._prefix: str | None = None

    def step(self, tokenizer: Any, token: int) -> str | None:
        if self._prefix is None:
            self._prefix = self._decode(tokenizer)
        self._ids.append(token)
        text = self._decode(tokenizer)
        if len(text) <= len(self._prefix) or text.endswith(REPLACEMENT):
            return None
        if not text.startswith(self._prefix):
            raise ValueError(f"{_INVALID_PREFIX}: {text!r} does not continue {self._prefix!r}")
        piece = text[len(self._prefix) :]
        self._ids = self._ids[self._context :]
        self._context = len(self._ids)
        self._prefix = self._decode(tokenizer)
        return piece

    def _decode(self, tokenizer: Any) -> str:
        return tokenizer.decode(self._ids, skip_special_tokens=self._skip_special)


def _backend(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` inside a fast tokenizer; the object itself when it is none."""
    return getattr(tokenizer, "backend_tokenizer", tokenizer)


def _added_tokens(tokenizer: Any) -> dict[int, str]:
    backend = _backend(tokenizer)
    if isinstance(backend, Tokenizer):
        return {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    return {i: str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
