"""The arena that holds the tables of the requests on the device: who lies where, and what has to be sent.

Layout of a table: its states' records, its token classes, its masks (see `device`). The arena is handed out in whole
chunks, so one program with one shape can upload everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxserve.structured.device import DEAD, EXHAUSTED, HEADER
from jaxserve.structured.table import START, TokenTable

CHUNK = 1 << 14  # words


@dataclass(eq=False)
class PooledTable:
    """A table in the arena. classes: address of its token classes. num_users: requests on the device that read it."""

    table: TokenTable
    base: int
    chunks: int
    classes: int
    num_users: int = 0

    def state(self, local: int) -> int:
        """The address of one of the table's states."""
        return self.base + local * record_size(self.table)

    @property
    def start(self) -> int:
        return self.state(START)


def record_size(table: TokenTable) -> int:
    return HEADER + table.transitions.shape[1]


def num_words(table: TokenTable) -> int:
    """What a table takes of an arena."""
    return table.num_states * record_size(table) + -(-table.vocab_size // 2) + table.masks.size


class GrammarPool:
    """Tables by reference count; those nobody reads stay until their room is needed, the least recently used first.

    Invariant: the first chunks are the empty arena's, every other chunk belongs to at most one table.
    """

    def __init__(self, num_chunks: int, words: int) -> None:
        """num_chunks: of the arena. words: W of a mask. Raises ValueError when not even one chunk is left."""
        self._words = words
        reserved = -(-len(self.empty()) // CHUNK)
        if num_chunks <= reserved:
            raise ValueError(f"the grammar pool has {num_chunks} chunks; it must have more than {reserved}")
        self.num_chunks = num_chunks
        self._owner: list[PooledTable | None] = [None] * num_chunks
        self._reserved = reserved
        self._tables: dict[int, PooledTable] = {}  # by identity, least recently used first

    def empty(self) -> np.ndarray:
        """The arena's first words: the record of state FREE, and the mask that allows everything."""
        record = [HEADER + 1, 0, 0xFFFFFFFF, 0]
        return np.array([*record, *[0xFFFFFFFF] * self._words], np.uint32)

    def acquire(self, table: TokenTable) -> tuple[PooledTable, bool] | None:
        """(the table's place, whether it has to be uploaded), or None when there is no room beside those in use."""
        pooled = self._tables.pop(id(table), None)
        is_new = pooled is None
        if pooled is None:
            pooled = self._place(table)
        if pooled is None:
            return None
        self._tables[id(table)] = pooled
        pooled.num_users += 1
        return pooled, is_new

    def release(self, pooled: PooledTable) -> None:
        pooled.num_users -= 1

    @property
    def num_in_use(self) -> int:
        """Tables that some request on the device reads."""
        return sum(pooled.num_users > 0 for pooled in self._tables.values())

    def _place(self, table: TokenTable) -> PooledTable | None:
        chunks = -(-num_words(table) // CHUNK)
        idle = [pooled for pooled in self._tables.values() if not pooled.num_users]
        while (first := self._gap(chunks)) is None:
            if not idle:
                return None
            self._evict(idle.pop(0))
        base = first * CHUNK
        pooled = PooledTable(table, base, chunks, base + table.num_states * record_size(table))
        self._owner[first : first + chunks] = [pooled] * chunks
        return pooled

    def _gap(self, chunks: int) -> int | None:
        """The first of so many free chunks in a row."""
        free = 0
        for index in range(self._reserved, self.num_chunks):
            free = free + 1 if self._owner[index] is None else 0
            if free == chunks:
                return index - chunks + 1
        return None

    def _evict(self, pooled: PooledTable) -> None:
        del self._tables[id(pooled.table)]
        self._owner = [None if owner is pooled else owner for owner in self._owner]


def uploads(pooled: PooledTable) -> Iterator[tuple[int, np.ndarray]]:
    """(address, CHUNK words) of everything that makes the table."""
    words = np.zeros(pooled.chunks * CHUNK, np.uint32)
    encoded = encode(pooled)
    words[: len(encoded)] = encoded
    for start in range(0, len(words), CHUNK):
        yield pooled.base + start, words[start : start + CHUNK]


def encode(pooled: PooledTable) -> np.ndarray:
    """The table's words, as they lie from its base on."""
    table = pooled.table
    masks_at = pooled.classes + -(-table.vocab_size // 2)
    size = record_size(table)
    records = np.empty((table.num_states, size), np.int64)
    records[:, 0] = masks_at + table.mask_of_state * table.masks.shape[1]
    records[:, 1] = table.exhausted * EXHAUSTED
    records[table.dead, 1] = DEAD
    records[:, 2] = table.forced
    records[:, HEADER:] = pooled.base + table.transitions.astype(np.int64) * size
    classes = np.zeros(-(-table.vocab_size // 2) * 2, np.uint16)
    classes[: table.vocab_size] = table.class_of_token
    return np.concatenate(
        [records.astype(np.uint32).reshape(-1), classes.view("<u4").astype(np.uint32), table.masks.reshape(-1)]
    )
