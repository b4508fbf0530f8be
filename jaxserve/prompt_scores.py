"""Log-probabilities of prompt tokens, and how they survive a hit in the prefix cache.

The log-probability of a token is made at the position before it. A position whose KV is cached is not computed, so
what it would have said is remembered by the content of its block, as its KV is. Where it is not remembered, the
position is computed over the cached KV without writing any.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import jax

from jaxserve.sampling.logprobs import Logprobs


class PromptScores:
    """What is known of one prompt. The first token has no log-probability; its entry means nothing."""

    def __init__(self, length: int, number: int) -> None:
        """number: of most probable tokens wanted for each token."""
        self.number = number
        self.num_known = 1  # tokens [0, num_known) are known
        self._length = length
        self._entries: list[Logprobs | None] = [None] * length

    @property
    def is_complete(self) -> bool:
        return self.num_known >= self._length

    def start_position(self, num_cached: int) -> int:
        """The first position to be computed when the KV of `num_cached` is there."""
        return num_cached if self.is_complete else min(num_cached, self.num_known - 1)

    def put(self, first: int, found: Logprobs) -> None:
        """Take in tokens first, first + 1, ...; found: NumPy, one leading axis. What is past the prompt is left."""
        for i in range(min(len(found.token), self._length - first)):
            self._entries[first + i] = jax.tree.map(lambda x, i=i: x[i], found)
        self._count()

    def entries(self) -> Sequence[Logprobs | None]:
        """One for each token, None for the first."""
        return [None, *self._entries[1:]]

    def block(self, index: int, size: int) -> list[Logprobs | None] | None:
        """Entries of the tokens of a block, once all are known."""
        first = index * size
        return self._entries[first : first + size] if first + size <= self.num_known else None

    def put_block(self, index: int, entries: Sequence[Logprobs | None]) -> None:
        """Take in what `block` gave for the same content."""
        first = index * len(entries)
        self._entries[first : first + len(entries)] = entries
        self._count()

    def _count(self) -> None:
        while not self.is_complete and self._entries[self.num_known] is not None:
            self.num_known += 1


class ScoreCache:
    """Entries of whole blocks by the hash of their content; the least recently used one goes first.

    capacity: log-probabilities kept, of the tokens themselves and of the most probable ones beside them.
    """

    def __init__(self, capacity: int = 1 << 22) -> None:
        self._capacity, self._size = capacity, 0
        self._blocks: OrderedDict[bytes, tuple[int, list[Logprobs | None]]] = OrderedDict()

    def recall(self, scores: PromptScores, hashes: Sequence[bytes]) -> None:
        """Put into `scores` what is remembered of the prompt's leading blocks."""
        for index, content in enumerate(hashes):
            number, entries = self._blocks.get(content, (-1, []))
            if number < scores.number:
                return
            self._blocks.move_to_end(content)
            scores.put_block(index, entries)

    def remember(self, scores: PromptScores, hashes: Sequence[bytes], size: int) -> None:
        """Keep the blocks that `scores` knows, unless they are kept with as many log-probabilities."""
        for index, content in enumerate(hashes):
            entries = scores.block(index, size)
            if entries is None:
                return
            known = self._blocks.get(content, (-1, []))[0]
            if known < scores.number:
                self._blocks[content] = scores.number, entries
                self._size += size * (scores.number - known)
            self._blocks.move_to_end(content)
        while self._size > self._capacity:
            _, (number, entries) = self._blocks.popitem(last=False)
            self._size -= (1 + number) * len(entries)
