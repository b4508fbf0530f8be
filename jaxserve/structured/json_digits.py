"""A bound on the digits of JSON numbers for matchers, whose grammars have none, so that no model can spin on them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxserve.structured.json_numbers import MAX_EXPONENT_DIGITS, MAX_INTEGER_DIGITS
from jaxserve.structured.vocabulary import Vocabulary, pack_bits


class JsonPlace(NamedTuple):
    """Where a JSON text has come to.

    in_string, escaped: inside quotes; behind a backslash there. room: how many digits may still follow at once.
    exponent: behind its letter or sign.
    """

    in_string: bool = False
    escaped: bool = False
    room: int = MAX_INTEGER_DIGITS
    exponent: bool = False

    def after(self, text: bytes) -> JsonPlace:
        in_string, escaped, room, exponent = self
        for c in text:
            if in_string:
                in_string, escaped = escaped or c != 0x22, not escaped and c == 0x5C
            elif 0x30 <= c <= 0x39:
                room = max(room - 1, 0)
            else:
                in_string = c == 0x22
                exponent = c in b"eE" or (exponent and c in b"+-")
                room = MAX_EXPONENT_DIGITS if exponent else MAX_INTEGER_DIGITS
        return JsonPlace(in_string, escaped, room, exponent)


class DigitMasks:
    """Of one vocabulary: the tokens that do not begin with more than so many digits, by that number, as bits [W]."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        leading = np.array([_leading_digits(text or b"") for text in vocabulary.token_bytes])  # [V]
        self._longest = int(leading.max(initial=0))
        self._masks = [pack_bits(leading <= room) for room in range(self._longest)]

    def keep_bounded(self, place: JsonPlace, row: np.ndarray) -> None:
        """Clear tokens of `row` [W] uint32 that would write too many digits, where anything else can follow."""
        if not place.in_string and place.room < self._longest:
            bounded = row & self._masks[place.room]
            if bounded.any():
                row[:] = bounded


def _leading_digits(text: bytes) -> int:
    return len(text) - len(text.lstrip(b"0123456789"))
