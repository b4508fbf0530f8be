"""Which KV blocks each request owns, and which prefixes of earlier requests it can share."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from jaxserve.block_pool import BlockPool
from jaxserve.request import Request

_HASH_BYTES = 16


def root_hash(cache_salt: str | None) -> bytes:
    """Parent of a request's first block. Requests with different salts share nothing."""
    return blake2b((cache_salt or "").encode(errors="surrogatepass"), digest_size=_HASH_BYTES).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Names the content of a block: its tokens and, through `parent`, everything before it."""
    return blake2b(parent + struct.pack(f"<{len(token_ids)}i", *token_ids), digest_size=_HASH_BYTES).digest()


@dataclass(slots=True)
class _Table:
    """Blocks of one admitted request, in position order, the first `num_cached` of them offered to the pool's index."""

    blocks: list[int]
    num_cached: int


class KVCacheManager:
    """Block tables of the admitted requests over one pool.

    A block becomes shareable only by `cache_written`, which the scheduler calls once the program that writes it
    has been dispatched. Programs run in dispatch order, so whoever finds a block reads it after it was written.
    """

    def __init__(self, pool: BlockPool, block_size: int, watermark: float = 0.01) -> None:
        """`watermark`: fraction of the pool that admissions leave free for the growth of running requests."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {watermark}")
        self.pool = pool
        self.block_size = block_size
        self.watermark_blocks = int(watermark * pool.num_usable)
        self._tables: dict[str, _Table] = {}

    def fits(self, num_positions: int) -> bool:
        """Whether a request with this many KV positions fits in the pool when it is alone."""
        return -(-num_positions // self.block_size) <= self.pool.num_usable

    def block_ids(self, request: Request) -> list[int]:
        """The request's blocks in position order; empty if it owns none. Not to be modified."""
        table = self._tables.get(request.request_id)
        return [] if table is None else table.blocks

    def get_computed_blocks(self, request: Request) -> tuple[list[int], int]:
        """The longest cached prefix as (blocks, number of tokens): whole blocks, and never the last token."""
        blocks: list[int] = []
        for content in self.shareable_hashes(request, 0):
            block = self.pool.lookup(content)
            if block is None:
                break
            blocks.append(block)
        return blocks, len(blocks) * self.block_size

    def allocate_slots(
        self, request: Request, num_tokens: int, computed_blocks: Sequence[int] = ()
    ) -> list[int] | None:
        """Makes room for KV positions [0, num_tokens); returns the new blocks, or None (nothing changed).

        The first call for a request admits it: `computed_blocks` (from `get_computed_blocks`) become its prefix,
        and the watermark is left free unless no other request owns blocks.
        """
        table = self._tables.get(request.request_id)
        total = -(-num_tokens // self.block_size)
        if table is not None:
            if (missing := total - len(table.blocks)) <= 0:
                return []
            if missing > self.pool.num_free:
                return None
            blocks = self.pool.allocate(missing)
            table.blocks += blocks
            return blocks

        missing = max(total - len(computed_blocks), 0)
        reserve = self.watermark_blocks if self._tables else 0
        revived = sum(self.pool.ref_count(block) == 0 for block in computed_blocks)
        if missing + revived + reserve > self.pool.num_free:
            return None
        self.pool.touch(computed_blocks)
        blocks = self.pool.allocate(missing)
        self._tables[request.request_id] = _Table([*computed_blocks, *blocks], len(computed_blocks))
        return blocks

    def cache_written(self, request: Request, num_written: int) -> None:
        """Shares the full blocks among positions [0, num_written), all of them of known tokens and dispatched."""
        table = self._tables[request.request_id]
        full = num_written // self.block_size
        if full <= table.num_cached:
            return
        if self.pool.enable_caching:
            hashes = self._hashes(request, full)
            for i in range(table.num_cached, full):
                self.pool.cache(table.blocks[i], hashes[i])
        table.num_cached = full

    def free(self, request: Request) -> None:
        """Gives the request's blocks back; what they cache stays findable until they are reused."""
        self.pool.free(self._tables.pop(request.request_id).blocks)

    def shareable_hashes(self, request: Request, start: int) -> list[bytes]:
        """Hashes of the blocks from position `start` on that can be shared: full ones, of known tokens but the last."""
        if not self.pool.enable_caching:
            return []
        last = (request.num_tokens - 1) // self.block_size
        return self._hashes(request, last)[start // self.block_size : last]

    def prompt_hashes(self, request: Request) -> list[bytes]:
        """Hashes of the full blocks of the prompt."""
        count = len(request.prompt_token_ids) // self.block_size
        return self._hashes(request, count)[:count]

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Hashes of the request's blocks, at least the first `count`; each is computed once."""
        hashes, size = request.block_hashes, self.block_size
        for i in range(len(hashes), count):
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            hashes.append(block_hash(parent, request.token_ids[i * size : (i + 1) * size]))
        return hashes
