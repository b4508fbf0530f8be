"""The toy model: its logits are rows of its table, and a wrong page shows as a wrong row."""

import jax
import numpy as np
import pytest

from models.base import ForwardInputs, Model, page_of
from models.markov import MarkovLM
from models.sharding import make_mesh

V = 7
PAGE = 4


def table(order, seed=0):
    return np.random.default_rng(seed).standard_normal((V, V) if order == 1 else (V + 1, V, V)).astype(np.float32)


def expected(model, tokens):
    """Logits after each token, by the definition."""
    if model.table.ndim == 2:
        return np.array([model.table[token] for token in tokens])
    return np.array([model.table[before, token] for before, token in zip([V, *tokens], tokens, strict=False)])


def run(model, tokens, calls, tables, mesh=None):
    """Logits [requests, length, V] of `tokens` [requests, length].

    A call is a list of groups (request, first position, count, width).
    """
    params, kv = model.load_params(mesh), model.init_kv(int(np.max(tables)) + 1, PAGE, mesh)
    result = np.full((*np.shape(tokens), V), np.nan, np.float32)
    forward = jax.jit(model.forward, static_argnums=3)
    for groups in calls:
        offset = np.arange(max(width for *_, width in groups))
        positions = np.array([np.where(offset < count, start + offset, -1) for _, start, count, _ in groups], np.int32)
        rows = [r for r, *_ in groups]
        batch = np.array(tokens)[np.array(rows)[:, None], np.maximum(positions, 0)].astype(np.int32)
        hidden, kv = forward(params, kv, ForwardInputs(batch, positions, np.array(tables)[rows].astype(np.int32)), mesh)
        logits = np.asarray(model.logits(params, hidden.reshape(-1, hidden.shape[-1])))
        logits = logits.reshape(*positions.shape, V)
        for (r, start, count, _), values in zip(groups, logits, strict=True):
            result[r, start : start + count] = values[:count]
    return result


TOKENS = np.random.default_rng(1).integers(0, V, (2, 11))
TABLES = [[5, 2, 6, 0], [1, 7, 3, 0]]
SCHEDULES = {
    "whole": [[(0, 0, 11, 12), (1, 0, 11, 12)]],
    "tiles": [
        [(0, 0, 4, 4), (0, 4, 4, 4), (1, 0, 3, 4)],
        [(1, 3, 4, 4), (1, 7, 4, 4), (0, 8, 3, 4)],
    ],
    "decode": [[(0, t, 1, 1), (1, t, 1, 1)] for t in range(11)],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("order", [1, 2])
def test_logits_are_rows_of_the_table(order, schedule):
    model = MarkovLM(table(order))
    actual = run(model, TOKENS, SCHEDULES[schedule], TABLES)
    assert actual.dtype == np.float32
    for logits, tokens in zip(actual, TOKENS, strict=True):
        np.testing.assert_array_equal(logits, expected(model, tokens.tolist()))


def test_a_wrong_page_shows():
    """Order 2 reads the token before through the block table, so a lost page changes the distribution."""
    model = MarkovLM(table(2))
    first, second = [(0, 0, 4, 4)], [(0, 4, 1, 1)]
    right = run(model, TOKENS, [first, second], TABLES)[0, 4]

    params, kv = model.load_params(None), model.init_kv(8, PAGE, None)
    for start, count, pages in ((0, 4, [5, 2]), (4, 1, [1, 2])):
        inputs = ForwardInputs(
            TOKENS[:1, start : start + count].astype(np.int32),
            np.arange(start, start + count, dtype=np.int32)[None],
            np.array([pages], np.int32),
        )
        hidden, kv = model.forward(params, kv, inputs, None)
    wrong = np.asarray(model.logits(params, hidden[0, -1:]))[0]
    np.testing.assert_array_equal(right, expected(model, TOKENS[0].tolist())[4])
    np.testing.assert_array_equal(wrong, model.table[0, TOKENS[0, 4]])  # page 1 was never written: it holds zeros
    assert not np.array_equal(right, wrong)


def test_padding_and_positions_beyond_the_table_touch_page_0_only():
    model = MarkovLM(table(1))
    kv = model.init_kv(4, PAGE, None)
    positions = np.array([[-1, 8, 100, 0]], np.int32)
    inputs = ForwardInputs(np.array([[3, 4, 5, 6]], np.int32), positions, np.array([[2, 1]], np.int32))
    _, kv = model.forward(model.load_params(None), kv, inputs, None)
    want = np.zeros((4, PAGE), np.int32)
    want[2, 0] = 6
    np.testing.assert_array_equal(np.asarray(kv)[1:], want[1:])
    np.testing.assert_array_equal(page_of(inputs.block_tables, positions, PAGE), [[0, 0, 0, 2]])


@pytest.mark.parametrize("order", [1, 2])
def test_a_mesh_changes_nothing(order):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    model = MarkovLM(table(order))
    mesh = make_mesh(jax.devices()[:2])
    actual = run(model, TOKENS, SCHEDULES["tiles"], TABLES, mesh)
    np.testing.assert_array_equal(actual[1], expected(model, TOKENS[1].tolist()))


def test_members():
    model = MarkovLM(table(2), max_model_len=99, eos_token_ids=(3, 4))
    assert isinstance(model, Model)
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (V, 99, (3, 4))
    kv = model.init_kv(5, PAGE, None)
    assert kv.nbytes == 5 * 4 * PAGE
    assert hash(model) != hash(MarkovLM(table(2), max_model_len=99))  # by identity: two tables are two models


@pytest.mark.parametrize(
    "shape", [(), (V,), (V, V + 1), (V, V, V), (V + 2, V, V), (V + 1, V + 1, V), (1, V + 1, V, V), (0,)]
)
def test_misshapen_tables_are_refused(shape):
    with pytest.raises(ValueError, match=r"table has shape .*; expected \[V, V\] or \[V \+ 1, V, V\]") as error:
        MarkovLM(np.zeros(shape, np.float32))
    assert str(shape) in str(error.value)
