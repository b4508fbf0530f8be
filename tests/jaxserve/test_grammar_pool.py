"""The arena of tables: who lies where, and that the device reads from it what the tables say."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.structured.device import (
    DEAD,
    EXHAUSTED,
    FREE,
    NO_TABLE,
    ON_HOST,
    GrammarRow,
    Grammars,
    allowed_words,
    flags,
    forced_tokens,
    legal_prefix,
    states_of_window,
)
from jaxserve.structured.dfa import compile_regex
from jaxserve.structured.pool import CHUNK, GrammarPool, PooledTable, num_words, uploads
from jaxserve.structured.table import START, TokenTable, compile_table
from jaxserve.structured.table import forced_tokens as forced_by_table
from jaxserve.structured.vocabulary import Vocabulary, unpack_bits

LETTERS = [chr(97 + i) for i in range(26)]
TOKENS = [*LETTERS, "ab", "abc", "foo", "bar", '"', "{", "}", ":", " ", "0", "1", "12"]
STOP, PADDING = len(TOKENS), 3  # one stop id behind the tokens, and ids that spell nothing
V = len(TOKENS) + 1 + PADDING
W = -(-V // 32)
REGEXES = ["(foo|foobar)", "[a-c]{2,5}", r"\{\"(ab|abc)\": [01]\}", "a*", "abc12"]
END = (3, 4)


@functools.cache
def table_of(regex: str) -> TokenTable:
    spelled = [t.encode() for t in TOKENS]
    return compile_table(compile_regex(regex), Vocabulary((*spelled, *[None] * (1 + PADDING))), [STOP])


def fits_in(chunks: int) -> GrammarPool:
    return GrammarPool(chunks, W)


@functools.cache
def arena() -> tuple[jax.Array, list[PooledTable]]:
    """All tables, side by side."""
    pool = fits_in(len(REGEXES) + 1)
    words = np.zeros(pool.num_chunks * CHUNK, np.uint32)
    words[: len(pool.empty())] = pool.empty()
    pooled = []
    for regex in REGEXES:
        acquired = pool.acquire(table_of(regex))
        assert acquired is not None
        assert acquired[1]
        pooled.append(acquired[0])
        for address, chunk in uploads(acquired[0]):
            words[address : address + len(chunk)] = chunk
    return jnp.array(words), pooled


@functools.partial(jax.jit, static_argnames=("end", "drafts"))
def window(arena, end, row, state, history, num, drafts):
    of_slots = jax.vmap(lambda *slot: states_of_window(arena, end, *slot, drafts))
    states = of_slots(row, state, history, num)
    grammars = Grammars(arena, jnp.full((len(num), 1 + drafts, W), 7, jnp.uint32))
    words = allowed_words(grammars, row.classes, states)
    at = num[:, None] + jnp.arange(drafts)
    legal = legal_prefix(words, jnp.take_along_axis(history, at, axis=1))
    forced = forced_tokens(arena, row.classes, states[:, -1], 4)
    return states, words, legal, flags(arena, states), forced


def look(slots: Sequence[tuple[PooledTable | None, int]], drafts: np.ndarray, end: tuple[int, ...] | None = None):
    """What the device says of slots (table, state) with drafts [B, K] behind a history of two tokens."""
    words, _ = arena()
    classes = [NO_TABLE if pooled is None else pooled.classes for pooled, _ in slots]
    start = [FREE if pooled is None else pooled.start for pooled, _ in slots]
    row = GrammarRow(jnp.array(classes), jnp.array(start))
    history = np.concatenate([np.zeros((len(slots), 2), np.int32), drafts], axis=1)
    state, num = jnp.array([s for _, s in slots]), jnp.full(len(slots), 2)
    found = window(words, end, row, state, jnp.array(history), num, drafts.shape[1])
    return [np.asarray(x) for x in found]


def test_device_walks_as_the_tables_do() -> None:
    _, pooled = arena()
    rng = np.random.default_rng(0)
    slots: list[tuple[PooledTable | None, int]] = [(p, p.start) for p in pooled for _ in range(60)] + [(None, FREE)]
    drafts = rng.integers(0, V, (len(slots), 6)).astype(np.int32)
    for row, (place, _) in enumerate(slots[:-1]):  # mostly legal ones, or nothing would be seen behind the first
        assert place is not None
        state = START
        for k in range(6):
            legal = np.flatnonzero(unpack_bits(place.table.mask(state), V))
            if rng.random() < 0.9 and len(legal):
                drafts[row, k] = rng.choice(legal)
            state = place.table.advance(state, [int(drafts[row, k])])
    states, words, legal, found, forced = look(slots, drafts)
    for row, (place, _) in enumerate(slots[:-1]):
        assert place is not None
        table, local, good = place.table, [START], True
        for token in drafts[row].tolist():
            local.append(table.advance(local[-1], [token]))
        for k, state in enumerate(local):
            assert states[row, k] == place.state(state)
            assert legal[row, k] == good
            np.testing.assert_array_equal(words[row, k], table.mask(state))
            assert (found[row, k] == DEAD) == (state == table.dead)
            assert (found[row, k] == EXHAUSTED) == bool(table.exhausted[state])
            good = good and k < 6 and bool(unpack_bits(table.mask(state), V)[drafts[row, k]])
        said = [t for t in forced[row].tolist() if t >= 0]
        assert said == forced_by_table(table, local[-1], 4)
    assert (states[-1] == FREE).all()
    assert (words[-1] == 0xFFFFFFFF).all()
    assert legal[-1].all()
    assert not found[-1].any()
    assert (forced[-1] == -1).all()


def test_grammar_begins_behind_the_marker_also_inside_a_window() -> None:
    _, pooled = arena()
    place = pooled[0]
    drafts = np.array([[9, 3, 4, 28, 29], [3, 3, 4, 28, 30], [3, 9, 4, 3, 9]], np.int32)
    states, _, legal, _, _ = look([(place, FREE)] * 3, drafts, END)
    foo = place.state(place.table.advance(START, [28]))
    assert states[0].tolist()[:5] == [FREE, FREE, FREE, place.start, foo]
    assert legal.tolist() == [[True] * 6, [True] * 5 + [False], [True] * 6]
    assert states[1, 4] == foo
    assert (states[2] == FREE).all()


def test_masks_of_the_host_take_the_place_of_tables() -> None:
    words, _ = arena()
    row = GrammarRow(jnp.array([ON_HOST]), jnp.array([FREE]))
    states, masks, legal, _, forced = window(
        words, None, row, jnp.array([FREE]), jnp.array([[0, 0, 2, 3]]), jnp.array([2]), 2
    )
    assert (np.asarray(states) == FREE).all()
    assert (np.asarray(masks) == 7).all()
    assert np.asarray(legal).tolist() == [[True, True, False]]
    assert (np.asarray(forced) == -1).all()


def test_needs_room_for_more_than_nothing() -> None:
    with pytest.raises(ValueError, match="the grammar pool has 1 chunks; it must have more than 1"):
        fits_in(1)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.lists(st.tuples(st.integers(0, len(REGEXES) - 1), st.booleans()), max_size=30))
def test_pool_never_gives_a_chunk_twice(chunks: int, actions: list[tuple[int, bool]]) -> None:
    pool = fits_in(chunks)
    held: list[PooledTable] = []
    for index, release in actions:
        if release and held:
            pool.release(held.pop(index % len(held)))
        else:
            users = len({id(p.table) for p in held})
            acquired = pool.acquire(table_of(REGEXES[index]))
            if acquired is None:
                assert users == chunks - 1  # every chunk is of a table that somebody reads
                assert all(p.table is not table_of(REGEXES[index]) for p in held)
                continue
            pooled, is_new = acquired
            assert is_new or pooled.base >= CHUNK
            assert not (is_new and pooled in held)
            held.append(pooled)
        in_use = {id(p): p for p in held}.values()
        spans = sorted((p.base, p.base + p.chunks * CHUNK) for p in in_use)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert all(CHUNK <= low < high <= chunks * CHUNK for low, high in spans)
        assert all(num_words(p.table) <= p.chunks * CHUNK for p in in_use)
        assert pool.num_in_use == len(in_use)
