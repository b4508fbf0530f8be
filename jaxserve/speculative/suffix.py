"""Drafts by frequency: what most often followed this suffix, in the request and in outputs of finished ones.

SuffixDecoding (Oliaro et al. 2024) keeps suffix trees. Here a tree node is the set of places where its text occurs,
found when it is asked for: places that agree on the last token are narrowed to those that agree on two, three and more,
and the walk down from a node narrows them by the token that most of them continue with. Counts are those of the tree,
and memory is that of the text.

The index is built and read on the host, which is one step behind the device: when it proposes, the tokens of the step
in flight are not known. So it continues the text it knows further than K, and the device takes the part that begins
where the step ended, if the step said what was expected (`jaxserve.speculative.continuation`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

_END = -1  # behind every stored output: no token
_MAX_PLACES = 4096  # of a token, the newest, from which a search starts


class Expected(NamedTuple):
    """What may follow a request's tokens, and how many of it may be drafts once the first 0, 1, ... have been said."""

    tokens: list[int]
    most: list[int]


@dataclass(frozen=True)
class _Drafts:
    tokens: list[int]
    score: float  # expected number accepted
    length: int = 0  # of the match


class SuffixProposer:
    """Drafts for any number of requests, and a store of what finished ones said.

    num_speculative_tokens: K, most drafts a request gets. max_tree_depth: longest suffix looked for plus what follows
    it. max_cached_requests: outputs kept, oldest out first. max_spec_factor: drafts per token of the suffix that
    matches when they are made. min_token_prob: a draft is dropped, with all after it, when its share among the matches
    falls below this.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._depth, self._factor, self._min_prob = max_tree_depth, max_spec_factor, min_token_prob
        self._store = _Store(max_cached_requests)

    def add_finished(self, output: Sequence[int]) -> None:
        """Keep a finished request's output tokens."""
        self._store.add(output)

    def propose(self, tokens: Sequence[int]) -> list[int]:
        """Up to K drafts that may follow a request's tokens (prompt and output)."""
        return self.expect(tokens, 0).tokens

    def expect(self, tokens: Sequence[int], ahead: int) -> Expected:
        """What may follow, long enough for K drafts behind the first `ahead` of it: with a step in flight 1 + K, which
        is what it may say.

        The better of the request's own text and the store, by the expected number of accepted drafts.
        """
        if not len(tokens):
            return Expected([], [0] * (ahead + 1))
        text = np.asarray(tokens, np.int32)
        pattern = text[-self._depth :]
        own = self._search(text, np.flatnonzero(text[:-1] == text[-1]), pattern, ahead)
        stored = self._search(*self._store.places_of(int(text[-1])), pattern, ahead)
        best = max(own, stored, key=lambda drafts: drafts.score)
        return Expected(best.tokens, [self._most(best.length + said) for said in range(ahead + 1)])

    def _most(self, length: int) -> int:
        """Drafts behind a match."""
        return int(min(self.num_speculative_tokens, length * self._factor))

    def _search(self, text: np.ndarray, places: np.ndarray, pattern: np.ndarray, ahead: int) -> _Drafts:
        """The best continuation over all lengths of the match. places: where the pattern's last token is in `text`.

        Longer matches come first: they may have more drafts, and a shorter one is not walked when all its drafts
        together could not score more.
        """
        best = _Drafts([], 0.0)
        for length, matches in reversed(_narrowed(text, places[-_MAX_PLACES:], pattern)):
            count = min(ahead + self._most(length + ahead), self._depth - 1)
            if count <= best.score:
                break
            drafts = self._walk(text, matches, count)
            best = replace(drafts, length=length) if drafts.score > best.score else best
        return best

    def _walk(self, text: np.ndarray, places: np.ndarray, count: int) -> _Drafts:
        """The most frequent token behind the places, then the most frequent behind those where it stands, and so on."""
        drafts: list[int] = []
        score, probability = 0.0, 1.0
        for step in range(1, count + 1):
            if len(places) == 1:  # nothing to choose any more
                rest = _until_end(text[places[0] + step : places[0] + 1 + count])
                return _Drafts(drafts + rest, float(score + probability * len(rest)))
            following = places + step
            following = following[following < len(text)]
            tokens = text[following]
            here = len(places)
            values, counts = np.unique(tokens[tokens != _END], return_counts=True)
            if not len(values):
                break
            probability *= counts.max() / here
            if probability < self._min_prob:
                break
            token = values[np.argmax(counts)]
            drafts.append(int(token))
            score += probability
            places = following[tokens == token] - step
        return _Drafts(drafts, float(score))


def _narrowed(text: np.ndarray, places: np.ndarray, pattern: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(length, places) for the longest suffix of the pattern at every set of places, longer and longer ones.

    Sets only shrink, and where a set stays the same a longer suffix has the same continuation and may have more of it.
    """
    sets = []
    for length in range(1, len(pattern) + 1):
        if not len(places):
            break
        longer = places[places >= length]
        if length < len(pattern):
            longer = longer[text[longer - length] == pattern[-1 - length]]
        if len(longer) < len(places) or length == len(pattern):
            sets.append((length, places))
        places = longer
    return sets


def _until_end(tokens: np.ndarray) -> list[int]:
    ends = np.flatnonzero(tokens == _END)
    return tokens[: ends[0] if len(ends) else None].tolist()


class _Store:
    """Outputs one behind another, and for every token the places where it is. The oldest go first."""

    def __init__(self, max_outputs: int) -> None:
        self._max = max_outputs
        self._text = array("i")
        self._origin = 0  # places count from the beginning of all that was ever stored; this is that of _text[0]
        self._begins: deque[int] = deque()
        self._places: dict[int, array[int]] = {}

    def add(self, output: Sequence[int]) -> None:
        if not self._max or not len(output):
            return
        begin = self._origin + len(self._text)
        self._begins.append(begin)
        for place, token in enumerate(output, begin):
            self._places.setdefault(int(token), array("q")).append(place)
        self._text.extend(int(token) for token in output)
        self._text.append(_END)
        if len(self._begins) > self._max:
            self._begins.popleft()
        self._forget()

    def _forget(self) -> None:
        """Once half of the text belongs to outputs that are gone, drop it: amortised, a token is moved once."""
        gone = self._begins[0] - self._origin
        if 2 * gone <= len(self._text):
            return
        del self._text[:gone]
        self._origin += gone
        kept = {token: places[bisect_left(places, self._origin) :] for token, places in self._places.items()}
        self._places = {token: places for token, places in kept.items() if places}

    def places_of(self, token: int) -> tuple[np.ndarray, np.ndarray]:
        """The text, and the newest places of a token in it that belong to outputs still kept."""
        text = np.frombuffer(self._text, np.int32) if self._text else np.zeros(0, np.int32)
        places = np.array(self._places.get(token, array("q"))[-_MAX_PLACES:], np.int64)
        first = self._begins[0] if self._begins else 0
        return text, places[places >= first] - self._origin
