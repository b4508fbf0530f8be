"""The block pool and the KV manager: ownership, eviction order, content hashes and prefix hits."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.block_pool import NULL_BLOCK, BlockPool
from jaxserve.kv_manager import KVCacheManager, block_hash, root_hash
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams


def make_request(request_id: str, tokens: list[int], salt: str | None = None) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=None),
        max_model_len=4096,
        cache_salt=salt,
    )


def admit(kv: KVCacheManager, request: Request) -> int:
    """Admits the request and has all its KV written; returns the number of cached tokens."""
    blocks, num_cached = kv.get_computed_blocks(request)
    assert kv.allocate_slots(request, request.num_tokens, computed_blocks=blocks) is not None
    kv.cache_written(request, request.num_tokens)
    return num_cached


# ---- pool


def test_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert NULL_BLOCK == 0
    assert pool.num_free == 0
    assert pool.usage == 1.0


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 2"):
        BlockPool(1)
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="cannot allocate 3 blocks: only 2"):
        pool.allocate(3)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="freed more often"):
        pool.free(blocks)


def test_tail_of_a_chain_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    chain = pool.allocate(3)
    for i, block in enumerate(chain):
        pool.cache(block, bytes([i]))
    pool.free(chain)
    assert pool.allocate(2) == [chain[2], chain[1]]
    assert pool.lookup(b"\0") == chain[0]
    assert pool.lookup(b"\1") is None
    assert pool.lookup(b"\2") is None


def test_blocks_without_content_are_reused_first() -> None:
    pool = BlockPool(4)
    cached, plain = pool.allocate(1), pool.allocate(2)
    pool.cache(cached[0], b"x")
    pool.free(cached)
    pool.free(plain)
    assert pool.allocate(2) == plain
    assert pool.lookup(b"x") == cached[0]


def test_least_recently_used_content_goes_first() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(1), pool.allocate(1)
    pool.cache(a[0], b"a")
    pool.cache(b[0], b"b")
    pool.free(a)
    pool.free(b)
    pool.touch(a)
    pool.free(a)
    assert pool.allocate(1) == b


def test_touched_block_survives_its_first_owner() -> None:
    pool = BlockPool(3)
    block = pool.allocate(1)
    pool.cache(block[0], b"x")
    pool.touch(block)
    pool.free(block)
    assert pool.ref_count(block[0]) == 1
    assert pool.num_free == 1
    pool.free(block)
    assert pool.num_free == 2


def test_second_block_of_the_same_content_does_not_replace_the_first() -> None:
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.cache(a, b"x")
    pool.cache(b, b"x")
    assert pool.lookup(b"x") == a
    pool.free([b])
    assert pool.lookup(b"x") == a
    assert pool.allocate(2)[0] == b  # b held nothing findable


@given(st.lists(st.tuples(st.sampled_from(["allocate", "touch", "free", "cache"]), st.integers(0, 7)), max_size=60))
def test_pool_agrees_with_a_plain_model(steps: list[tuple[str, int]]) -> None:
    pool = BlockPool(6)
    owners: list[int] = []  # one entry per reference
    for action, number in steps:
        if action == "allocate" and number <= pool.num_free:
            new = pool.allocate(number)
            assert not set(new) & set(owners)
            assert NULL_BLOCK not in new
            owners += new
        elif action == "touch" and (block := pool.lookup(bytes([number]))) is not None:
            pool.touch([block])
            owners.append(block)
        elif action == "free" and owners:
            pool.free([owners.pop(number % len(owners))])
        elif action == "cache" and owners:
            block = owners[number % len(owners)]
            if pool._hashes[block] is None:
                pool.cache(block, bytes([number]))
        assert [pool.ref_count(b) for b in range(6)] == [owners.count(b) for b in range(6)]
        assert set(pool._free) == set(range(1, 6)) - set(owners)
        assert {h: b for b, h in enumerate(pool._hashes) if h is not None} == pool._by_hash


# ---- hashes


def test_hashes_are_stable_across_processes_and_versions() -> None:
    assert root_hash(None) == root_hash("") == blake2b(b"", digest_size=16).digest()
    first = block_hash(root_hash(None), [1, 70000])
    assert first == blake2b(root_hash(None) + bytes([1, 0, 0, 0, 0x70, 0x11, 1, 0]), digest_size=16).digest()
    assert first.hex() == "4cddf3d09db88cd40d71082ee407d8e4"


def test_hash_depends_on_everything_before_the_block() -> None:
    roots = [root_hash(None), root_hash("a"), block_hash(root_hash(None), [9])]
    assert len({block_hash(root, tokens) for root in roots for tokens in ([1, 2], [2, 1], [1, 258])}) == 9


# ---- manager


@pytest.mark.parametrize(
    ("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (48, 32), (49, 48), (55, 48)]
)
def test_same_prompt_twice_computes_at_least_one_token(length: int, cached: int) -> None:
    kv = KVCacheManager(BlockPool(20), block_size=16)
    assert admit(kv, make_request("a", list(range(length)))) == 0
    assert admit(kv, make_request("b", list(range(length)))) == cached


def test_prefix_outlives_its_request_and_is_shared() -> None:
    kv = KVCacheManager(BlockPool(20), block_size=4)
    first, second, third = (make_request(name, [*range(8), i]) for i, name in enumerate("abc"))
    admit(kv, first)
    prefix = kv.block_ids(first)[:2]
    kv.free(first)
    assert kv.block_ids(first) == []
    assert admit(kv, second) == admit(kv, third) == 8
    assert kv.block_ids(second)[:2] == kv.block_ids(third)[:2] == prefix
    assert kv.block_ids(second)[2] != kv.block_ids(third)[2]
    assert [kv.pool.ref_count(block) for block in prefix] == [2, 2]


def test_salt_and_disabled_cache_share_nothing() -> None:
    kv = KVCacheManager(BlockPool(40), block_size=4)
    tokens = list(range(20))
    for name, salt, expected in (("a", None, 0), ("b", "x", 0), ("c", "y", 0), ("d", "x", 16)):
        assert admit(kv, make_request(name, tokens, salt)) == expected
    off = KVCacheManager(BlockPool(40, enable_caching=False), block_size=4)
    assert admit(off, make_request("a", tokens)) == admit(off, make_request("b", tokens)) == 0


def test_only_written_full_blocks_are_shared() -> None:
    kv = KVCacheManager(BlockPool(20), block_size=4)
    first, second = make_request("a", list(range(12))), make_request("b", list(range(12)))
    assert kv.allocate_slots(first, 12) == kv.block_ids(first)
    for written, cached in ((3, 0), (4, 4), (7, 4), (8, 8)):
        kv.cache_written(first, written)
        assert kv.get_computed_blocks(second)[1] == cached


def test_growth_and_lookahead() -> None:
    kv = KVCacheManager(BlockPool(5), block_size=4, watermark=0.0)
    request = make_request("a", list(range(4)))
    assert len(kv.allocate_slots(request, 4) or []) == 1
    assert kv.allocate_slots(request, 4) == []
    assert len(kv.allocate_slots(request, 9) or []) == 2
    assert kv.allocate_slots(request, 17) is None
    assert len(kv.block_ids(request)) == 3
    assert kv.pool.num_free == 1
    assert kv.fits(16)
    assert not kv.fits(17)


def test_watermark_binds_admission_but_not_growth_nor_the_only_request() -> None:
    kv = KVCacheManager(BlockPool(11), block_size=4, watermark=0.2)
    first, second = make_request("a", list(range(28))), make_request("b", [7])
    assert kv.allocate_slots(first, 32) is not None  # 8 of 10, and alone it might have had them all
    assert kv.allocate_slots(second, 1) is None
    assert kv.allocate_slots(first, 36) is not None
    kv.free(first)
    assert kv.allocate_slots(second, 40) is not None


def test_reviving_free_cached_blocks_counts_against_the_free_ones() -> None:
    kv = KVCacheManager(BlockPool(4), block_size=4, watermark=0.0)
    first = make_request("a", list(range(9)))
    admit(kv, first)
    kv.free(first)
    second = make_request("b", list(range(13)))
    blocks, num_cached = kv.get_computed_blocks(second)
    assert num_cached == 8
    assert kv.pool.num_free == 3
    assert kv.allocate_slots(second, 13, computed_blocks=blocks) is None  # 2 revived + 2 new
    assert kv.pool.num_free == 3
    assert kv.block_ids(second) == []
    assert kv.allocate_slots(second, 12, computed_blocks=blocks) is not None


@pytest.mark.parametrize(("kwargs", "message"), [({"block_size": 0}, "block_size"), ({"watermark": 1.0}, "watermark")])
def test_manager_refuses_bad_settings(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCacheManager(BlockPool(4), **({"block_size": 4} | kwargs))
