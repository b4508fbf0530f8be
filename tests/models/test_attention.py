"""Paged attention against a dense one in float64 that keeps every request's keys and values in a plain list."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import models
from models.attention import PagedKV, storage_dtype, store_and_attend
from models.base import ForwardInputs
from models.params import is_spec
from models.sharding import make_mesh

PAGES, PAGE = 24, 4  # pages in the pool, positions in a page
TABLE = 7  # pages in a block table: it covers 28 positions unless a case asks for more
HEADS, GROUP, WIDTH = 2, 3, 8
EVERYTHING = 1 << 30
NEW = {1: [7, -1, 12, 0], 4: [3, 9, -1, 20]}  # by Q: first new position of each of four groups, -1 = all padding
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Problem:
    """Random queries, keys and values, a pool that holds what came before them, and what is expected of both.

    first: position of each group's first query, -1 for a group of padding. count: queries that are not padding.
    """

    def __init__(self, q_len, first, count, *, table=TABLE, dtype=np.float32, group=GROUP, heads=HEADS, seed=0):
        rng = np.random.default_rng(seed)
        n = len(first)
        self.dtype, self.table = np.dtype(dtype), table

        def normal(*shape):
            return rng.standard_normal(shape).astype(np.float32).astype(dtype)

        self.q, self.k, self.v = (
            normal(n, q_len, heads, group, WIDTH), normal(n, q_len, heads, WIDTH), normal(n, q_len, heads, WIDTH)
        )  # fmt: skip
        offset = np.arange(q_len)
        first, count = np.array(first)[:, None], np.array(count)[:, None]
        self.positions = np.where((first >= 0) & (offset < count), first + offset, -1).astype(np.int32)
        num_pages = max(PAGES, 1 + n * table)
        order = 1 + rng.permutation(num_pages - 1)
        self.tables = order[: n * table].reshape(n, table).astype(np.int32)
        shape = (num_pages, PAGE, heads, WIDTH)
        self.pool = normal(*shape), normal(*shape)

    def slots(self):
        """(group, query, page, place in it) of every position that has a page of its own."""
        for n, q in np.argwhere((self.positions >= 0) & (self.positions < self.table * PAGE)):
            position = self.positions[n, q]
            yield n, q, self.tables[n, position // PAGE], position % PAGE

    def stored(self):
        """The pool afterwards. Page 0 may hold anything."""
        pools = [pool.copy() for pool in self.pool]
        for n, q, page, place in self.slots():
            for pool, new in zip(pools, (self.k, self.v), strict=True):
                pool[page, place] = new[n, q]
        return pools

    def outputs(self, window, first_key=0):
        """Attention in float64, by its definition."""
        keys, values = (pool.astype(np.float64) for pool in self.stored())
        result = np.zeros(self.q.shape)
        for n, q, _, _ in self.slots():
            position = self.positions[n, q]
            seen = np.arange(max(first_key, position - window + 1), position + 1)
            page, place = self.tables[n, seen // PAGE], seen % PAGE
            for h in range(self.q.shape[2]):
                scores = self.q[n, q, h].astype(np.float64) @ keys[page, place, h].T / np.sqrt(WIDTH)  # [G, seen]
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
                result[n, q, h] = weights / weights.sum(axis=-1, keepdims=True) @ values[page, place, h]
        return result

    def run(self, window, platform, mesh=None, first_key=0):
        """What store_and_attend gives: outputs in float64, and the pool in the problem's dtype."""
        stored = storage_dtype(jnp.dtype(self.dtype), platform)
        kv = PagedKV(*(jnp.asarray(pool.view(stored)) for pool in self.pool))
        call = jax.jit(
            lambda q, k, v, kv, positions, tables: store_and_attend(
                q,
                k,
                v,
                kv,
                positions,
                tables,
                window,
                jnp.dtype(self.dtype),
                platform,
                mesh,
                first_key=first_key,
            ),
            compiler_options={"xla_backend_optimization_level": 0},  # compiles in half the time
        )
        with jax.default_matmul_precision("highest"):
            out, kv = call(self.q, self.k, self.v, kv, self.positions, self.tables)
        assert out.dtype == self.dtype
        assert kv.k.dtype == kv.v.dtype == stored
        return np.asarray(out).astype(np.float64), [np.asarray(pool).view(self.dtype) for pool in (kv.k, kv.v)]

    def check(self, window, platform, tolerance, mesh=None):
        actual, pools = self.run(window, platform, mesh)
        valid = np.zeros(self.positions.shape, bool)
        for n, q, _, _ in self.slots():
            valid[n, q] = True
        np.testing.assert_allclose(actual[valid], self.outputs(window)[valid], rtol=0, atol=tolerance)
        assert np.isfinite(actual).all()  # padding gives numbers too
        for pool, expected in zip(pools, self.stored(), strict=True):
            others = np.ones(len(pool), bool)
            others[0] = False  # the page that takes what padding writes
            np.testing.assert_array_equal(bits(pool[others]), bits(expected[others]))


def bits(x):
    """To compare bit by bit: NaN is one more value then."""
    return np.ascontiguousarray(x).view(np.uint8)


def problem(q_len, **options):
    if q_len == 40:  # a prefill: two tiles of one prompt would do, here whole prompts with an older part
        return Problem(40, [0, 5, -1], [40, 33, 0], table=12, **options)
    return Problem(q_len, NEW[q_len], [q_len, q_len, q_len, max(1, q_len - 2)], **options)


@pytest.mark.parametrize("window", [EVERYTHING, 5], ids=["everything", "window"])
@pytest.mark.parametrize("q_len", [1, 4, 40])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_float32(platform, q_len, window):
    problem(q_len).check(window, platform, 2e-6)


@pytest.mark.parametrize("q_len", [1, 4, 40])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_bfloat16(platform, q_len):
    """Outputs are as near as bfloat16 weights and results can be; what is stored is exact."""
    problem(q_len, dtype=BFLOAT16).check(EVERYTHING, platform, 0.02)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (1, 4), (4, 1), (3, 2)])
def test_head_counts(heads, group, platform):
    problem(4, heads=heads, group=group).check(6, platform, 2e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_tiles_of_one_request_see_each_other(platform):
    """Groups may share a block table: all of a call's keys are stored before anyone reads."""
    tiles = Problem(4, [2, 6, 10], [4, 4, 3])
    tiles.tables[:] = tiles.tables[0]
    tiles.check(EVERYTHING, platform, 2e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("q_len", [1, 4])
def test_positions_beyond_the_table_touch_page_0_only(q_len, platform):
    """Drafts may reach past the last page of a request: their keys go nowhere and nobody else's are lost."""
    end = TABLE * PAGE
    beyond = Problem(q_len, [end - 2, end - 1, end, end + 3 * PAGE], [q_len] * 4)
    beyond.check(EVERYTHING, platform, 2e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_batch_of_padding_stores_nothing(platform):
    padding = Problem(4, [-1, -1], [4, 4])
    assert not list(padding.slots())
    padding.check(EVERYTHING, platform, 2e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_unused_entries_of_a_table_are_not_read(platform):
    """Entries after a request's last page are 0, and what page 0 holds shows nowhere."""
    short = Problem(4, [3, 5], [4, 4])
    expected = short.outputs(EVERYTHING)
    short.tables[:, 3:] = 0
    for pool in short.pool:
        pool[0] = 1e6
    actual, _ = short.run(EVERYTHING, platform)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_request_that_breaks_harms_nobody_else(platform):
    """NaN in one request's keys and values stays NaN for that request, and nobody else sees it: neither who gets its
    page next nor those whose tables name page 0, where what its padding computed went."""
    shape = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    model = models.from_config(shape, "float32", platform)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), model.specs(), is_leaf=is_spec)
    params["embed"][5] = np.nan
    forward = jax.jit(model.forward, static_argnums=3, compiler_options={"xla_backend_optimization_level": 0})
    tables = jnp.asarray([[1, 2, 0, 0], [3, 4, 5, 1]])  # the second request has the first one's page when that is gone
    first = [[0, 1, 2, -1], [3, 4, 5, -1], [-1] * 4, [-1] * 4]
    second = np.arange(16).reshape(4, 4)

    def run(token):
        """Hidden states of both requests, with `token` at the beginning of the first one only."""
        kv, seen = model.init_kv(6, PAGE, None), []
        for positions in zip(first, second, strict=True):
            tokens = np.array([[token, 1, 2, 3], [4, 3, 2, 1]])
            hidden, kv = forward(params, kv, ForwardInputs(tokens, np.array(positions), tables), None)
            seen.append(hidden)
            token = 1
        return np.array(seen)  # [call, request, Q, D]

    sound, broken = run(1), run(5)
    assert np.isfinite(sound).all()
    assert np.isnan(broken[:2, 0, :3]).all()
    np.testing.assert_array_equal(broken[:, 1], sound[:, 1])


@pytest.mark.parametrize("newest", [0, 62, 63, 64, 127, 128, 255, 256, 279])
def test_a_cpu_reads_as_many_pages_as_the_longest_context_has(newest):
    """To a factor of two: values of other pages, which are not numbers here, would spoil the result."""
    case = Problem(2, [newest, 5], [1, 2], table=70)
    expected = case.outputs(EVERYTHING)
    read = next(x for x in (64, 128, 256, 280) if newest < x) // PAGE
    case.pool[1][case.tables[:, read:]] = np.nan
    actual, _ = case.run(EVERYTHING, "cpu")
    np.testing.assert_allclose(actual[case.positions >= 0], expected[case.positions >= 0], rtol=0, atol=2e-6)


def test_storage():
    """bfloat16 is kept as its bits on CPU, everything else as itself."""
    assert storage_dtype(jnp.dtype(jnp.bfloat16), "cpu") == np.uint16
    assert storage_dtype(jnp.dtype(jnp.bfloat16), "gpu") == BFLOAT16
    assert storage_dtype(jnp.dtype(jnp.float32), "cpu") == storage_dtype(jnp.dtype(jnp.float32), "gpu") == np.float32


@pytest.mark.parametrize("heads", [2, 3], ids=["split heads", "heads that two devices cannot split"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_mesh(platform, heads):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    problem(4, heads=heads).check(6, platform, 2e-6, make_mesh(jax.devices()[:2]))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("q_len", [4, 40])
def test_keys_before_the_first_do_not_exist(q_len, platform):
    """Whatever their place in the pool holds."""
    case = problem(q_len)
    case.k[case.positions == 0] = np.nan
    case.pool[0][case.tables[:, 0], 0] = np.nan
    actual, _ = case.run(EVERYTHING, platform, first_key=1)
    seen = case.positions > 0
    np.testing.assert_allclose(actual[seen], case.outputs(EVERYTHING, first_key=1)[seen], rtol=0, atol=2e-6)
