"""The pool of KV blocks: reference counts, least-recently-used eviction and the content-hash index."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1..num_blocks-1. Block 0 is the null block: padding is written there and it is never handed out.

    Invariants:
    - a block is in the free queue iff its reference count is 0;
    - a free block keeps its hash, and can be found by it, until it is allocated again;
    - each hash names at most one block.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True) -> None:
        """Raises ValueError when there is no block besides the null block."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # next to be reused first

    @property
    def num_free(self) -> int:
        """Blocks without an owner, including those that still hold cached content."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that can have an owner at all."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that have an owner."""
        return 1.0 - len(self._free) / self.num_usable

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, evicting the least recently used content. Raises ValueError if fewer are free."""
        if count > len(self._free):
            raise ValueError(f"cannot allocate {count} blocks: only {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
            if (block_hash := self._hashes[block]) is not None:
                del self._by_hash[block_hash]
                self._hashes[block] = None
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """Adds one owner to blocks found by `lookup`."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drops one owner of each block of a chain (head first). Raises ValueError on a block without an owner.

        The tail is queued before the head, so that a prefix outlives what extends it; blocks without cached
        content are reused before any that have it.
        """
        for block in reversed(blocks):
            if self._ref_counts[block] < 1:
                raise ValueError(f"block {block} is freed more often than it was taken")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def cache(self, block: int, block_hash: bytes) -> None:
        """Makes an owned block findable. Where another block has the same content already, that one stays."""
        if self.enable_caching and block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds this content, owned or free."""
        return self._by_hash.get(block_hash)
