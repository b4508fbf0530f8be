"""How much of a row one step of a kernel looks at: a table by shape, which an argument overrides.

The figures are reasoned from occupancy, not measured; `bench/autotune.py` measures them where there is a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

STATISTICS = (16, 32, 64)  # what divides the 64 rows of a layout, up to half the registers of a thread
PARTS = (16, 32, 64)
CHUNKS = (64, 128, 256)


@dataclass(frozen=True)
class BlockShape:
    """tiles: tiles of 256 entries that a block of the pass over the logits holds in registers, twice as many of these a
    thread. part: entries of 64 tiles looked at together where a row is searched whole, half as many registers a thread.
    chunk: slots of 16 segments whose statistics are looked at together, an eighth as many registers a thread."""

    tiles: int = 64
    part: int = 64
    chunk: int = 256

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("tiles", self.tiles, STATISTICS),
            ("part", self.part, PARTS),
            ("chunk", self.chunk, CHUNKS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} of a block shape is {value}; it must be one of {allowed}")


@dataclass(frozen=True)
class AttentionShape:
    """splits: parts of a group's keys that blocks of their own attend to, combined afterwards. stages: tiles of 64 keys
    and values in flight in a block, 32 KB each at a head width of 128."""

    splits: int
    stages: int = 2

    def __post_init__(self) -> None:
        for name, value, high in (("splits", self.splits, 64), ("stages", self.stages, 4)):
            if not 1 <= value <= high:
                raise ValueError(f"{name} of an attention shape is {value}; it must be in [1, {high}]")


def attention_shape(blocks: int, tiles: int) -> AttentionShape:
    """For `blocks` pairs of a group and a KV head, and tables of `tiles` tiles of keys: enough splits to fill 132
    multiprocessors twice, of four tiles each or more."""
    return AttentionShape(splits=max(1, min(-(-264 // blocks), tiles // 4, 64)))


# Rows up to the first number take the shape beside it. A GPU of 132 multiprocessors holds 264 blocks of 64 tiles at a
# time; few rows fill it only in smaller pieces.
_TABLE = ((4, BlockShape(tiles=16)), (16, BlockShape(tiles=32)))


def block_shape(rows: int) -> BlockShape:
    """The table's shape for R rows. V does not matter: a block has a fixed size, and a longer row more of them."""
    return next((shape for limit, shape in _TABLE if rows <= limit), BlockShape())
