"""The attention kernel, interpreted, against attention by its definition in float64 (tests/models/test_attention.py has
the plain jnp one)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import AttentionShape, BlockShape, paged_attention
from pallas_kernels.block_shape import attention_shape
from pallas_kernels.compat import interpret_params, races_found
from pallas_kernels.mosaic import attention

EVERYTHING = 1 << 30


class Problem:
    """Pools of random keys and values, requests with pages in any order, and what attention gives by its definition."""

    def __init__(
        self, positions: list[list[int]], *, heads: int = 2, group: int = 3, width: int = 64, page: int = 16,
        table: int = 10, dtype: Any = ml_dtypes.bfloat16,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(0)
        self.positions, self.page = np.array(positions, np.int32), page
        n, length = self.positions.shape

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32).astype(dtype)

        self.q = normal(n, length, heads, group, width)
        blocks = 1 + n * table
        self.pools = normal(blocks, page, heads, width), normal(blocks, page, heads, width)
        self.tables = (1 + rng.permutation(blocks - 1)).reshape(n, table).astype(np.int32)

    def expected(self, window: int = EVERYTHING, first_key: int = 0) -> np.ndarray:
        keys, values = (pool.astype(np.float64) for pool in self.pools)
        out = np.zeros(self.q.shape)
        for n, q in np.argwhere(self.positions >= 0):
            at = self.positions[n, q]
            seen = np.arange(max(first_key, at - window + 1), at + 1)
            page, place = self.tables[n, seen // self.page], seen % self.page
            for h in range(self.q.shape[2]):
                scores = self.q[n, q, h].astype(np.float64) @ keys[page, place, h].T / np.sqrt(self.q.shape[-1])
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                out[n, q, h] = weights / weights.sum(axis=1, keepdims=True) @ values[page, place, h]
        return out

    def run(self, window: int = EVERYTHING, **keywords: Any) -> np.ndarray:
        pools = [jnp.asarray(pool) for pool in self.pools]
        args = (jnp.asarray(self.q), *pools, jnp.asarray(self.tables), jnp.asarray(self.positions), window)
        out = paged_attention(*args, implementation="mosaic", **keywords)
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        return np.asarray(out).astype(np.float64)

    def check(self, window: int = EVERYTHING, first_key: int = 0, **keywords: Any) -> None:
        actual = self.run(window, first_key=first_key, **keywords)
        assert np.isfinite(actual).all()  # padding gives numbers too
        valid = self.positions >= 0
        np.testing.assert_allclose(actual[valid], self.expected(window, first_key)[valid], rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "splits", [None, 1, 2, 5], ids=["the table's splits", "1 split", "2 splits", "more splits than tiles"]
)
def test_decode(splits: int | None) -> None:
    """One position a request, at the first key, at a tile's end and beginning, at the table's end; and padding."""
    shape = None if splits is None else AttentionShape(splits)
    Problem([[0], [63], [64], [159], [-1]]).check(block_shape=shape)


def test_verification() -> None:
    """Windows of 1 + K positions, some of them padding, across a tile's end."""
    Problem([[61, 62, 63, 64], [100, 101, -1, -1], [-1, -1, -1, -1], [0, 1, 2, 3]]).check()


@pytest.mark.parametrize("window", [1, 5, 70])
def test_sliding_window(window: int) -> None:
    """Tiles before the window of the oldest query are not read."""
    problem = Problem([[130, 131], [3, 4]])
    keys = problem.pools[0]
    for tile in range((130 - window + 1) // 64):
        keys[problem.tables[0, 4 * tile : 4 * tile + 4]] = np.nan
    problem.check(window)


def test_first_key() -> None:
    problem = Problem([[1, 2], [70, 71]])
    for pool in problem.pools[:1]:
        pool[problem.tables[:, 0], 0] = np.nan
    problem.check(first_key=1)


@pytest.mark.parametrize("page", [8, 16, 32, 64, 128])
def test_page_sizes(page: int) -> None:
    Problem([[200, 201], [5, 6]], page=page, table=-(-208 // page)).check()


@pytest.mark.parametrize(
    ("heads", "group", "width", "dtype"),
    [(1, 8, 128, ml_dtypes.bfloat16), (3, 1, 64, ml_dtypes.bfloat16), (1, 4, 64, np.float16)],
)
def test_heads(heads: int, group: int, width: int, dtype: Any) -> None:
    Problem([[70, 71], [3, 4]], heads=heads, group=group, width=width, dtype=dtype).check()


def test_more_rows_than_the_tensor_cores_take() -> None:
    """Nine positions of eight heads: two blocks of rows, the second nearly empty."""
    Problem([list(range(60, 69)), [-1] * 9], heads=1, group=8).check()


def test_shared_pages() -> None:
    problem = Problem([[70], [71]])
    problem.tables[1, :4] = problem.tables[0, :4]
    problem.check()


def test_unused_entries_of_a_table_are_not_seen() -> None:
    problem = Problem([[20, 21], [100, 101]])
    problem.tables[0, 2:] = 0
    for pool, value in zip(problem.pools, (np.nan, 1e4), strict=True):
        pool[0] = value
    problem.check()


def test_a_broken_request_breaks_alone() -> None:
    problem = Problem([[70], [71]])
    problem.pools[0][problem.tables[0, 0], 3] = np.nan
    actual = problem.run()
    assert np.isnan(actual[0]).all()
    np.testing.assert_allclose(actual[1], problem.expected()[1], rtol=0, atol=0.02)


def test_bits_in_the_pool() -> None:
    """A pool may keep bfloat16 as its bits; the definition agrees."""
    problem = Problem([[70, 71], [3, 4]])
    bits = [jnp.asarray(pool.view(np.uint16)) for pool in problem.pools]
    args = (jnp.asarray(problem.q), *bits, jnp.asarray(problem.tables), jnp.asarray(problem.positions))
    for implementation in ("mosaic", "xla"):
        out = np.asarray(paged_attention(*args, implementation=implementation)).astype(np.float64)
        np.testing.assert_allclose(out, problem.expected(), rtol=0, atol=0.02)


def test_it_does_not_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than stages, so that slots are used again, and more blocks than one."""
    problem, ran = Problem([[159, -1], [150, 151]], heads=1), []
    kernel = attention._attend

    def watched(*args: Any) -> Any:
        result = jax.block_until_ready(kernel(*args[:-1], interpret_params(True)))
        assert not races_found()
        ran.append(result)
        return result

    monkeypatch.setattr(attention, "_attend", watched)
    problem.check(block_shape=AttentionShape(splits=1))
    assert len(ran) == 1


def test_what_it_does_not_take() -> None:
    for keywords, reason in (
        ({"width": 32}, "heads of width 64 and 128, not 32"),
        ({"dtype": np.float32}, "bfloat16 and float16, not float32"),
        ({"page": 24}, r"pages of 8, 16, 32 or k \* 64 positions, not 24"),
    ):
        with pytest.raises(ValueError, match=reason):
            Problem([[3]], **keywords).run()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"block_shape is BlockShape.*; it must be None or of type AttentionShape"):
        Problem([[3]]).run(block_shape=BlockShape())
    for keywords in ({"splits": 0}, {"splits": 1, "stages": 5}):
        with pytest.raises(ValueError, match="of an attention shape is"):
            AttentionShape(**keywords)


def test_shapes_that_do_not_fit() -> None:
    q, pool = jnp.zeros((2, 1, 2, 3, 64)), jnp.zeros((4, 16, 2, 64))
    tables, positions = jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 1), jnp.int32)
    for name, args in (
        ("k_pool", (q, pool[..., :1, :], pool, tables, positions)),
        ("v_pool", (q, pool, pool.astype(jnp.bfloat16), tables, positions)),
        ("block_tables", (q, pool, pool, tables[:1], positions)),
        ("positions", (q, pool, pool, tables, positions[:, :0])),
    ):
        with pytest.raises(ValueError, match=name):
            paged_attention(*args)


def test_the_table_fills_the_gpu() -> None:
    assert attention_shape(blocks=64, tiles=37).splits == 5
    assert attention_shape(blocks=1, tiles=1).splits == 1  # short: nothing to split
    assert attention_shape(blocks=1, tiles=2000).splits == 64
    assert attention_shape(blocks=512, tiles=37).splits == 1
