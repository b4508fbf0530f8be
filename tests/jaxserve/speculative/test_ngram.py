"""Prompt lookup against recorded answers and a search written as its definition reads."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.speculative.ngram import NgramProposer, lookup
from jaxserve.speculative.proposer import ProposeContext, Proposer

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "sampling_cases.json").read_text(encoding="utf-8"))
WIDTH = 24

batched_lookup = jax.jit(lookup, static_argnums=(2, 3, 4))


def batch_of(histories, width=WIDTH, padding=0):
    tokens = np.full((len(histories), width), padding, np.int32)
    for row, history in zip(tokens, histories, strict=True):
        row[: len(history)] = history
    return jnp.asarray(tokens), jnp.asarray([len(h) for h in histories], jnp.int32)


def definition(history, min_n, max_n, count):
    """Longest suffix first, earliest occurrence first; the copy may read what it has just written."""
    for n in range(min(max_n, len(history) - 1), min_n - 1, -1):
        for start in range(len(history) - n):
            if history[start : start + n] == history[-n:]:
                text = list(history)
                for source in range(start + n, start + n + count):
                    text.append(text[source])
                return text[len(history) :]
    return []


def proposed(history, min_n, max_n, count, **kwargs):
    drafts = np.asarray(batched_lookup(*batch_of([history], **kwargs), min_n, max_n, count))[0].tolist()
    return [d for d in drafts if d >= 0]


@pytest.mark.parametrize("case", GOLDEN["ngram"], ids=str)
def test_recorded_answers(case):
    history, min_n, max_n, max_model_len, count, expected = case
    room = min(count, max_model_len - len(history))
    actual = proposed(history, min_n, max_n, room)
    assert actual[: len(expected)] == expected
    assert len(actual) == (room if expected else 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=WIDTH), min_size=4, max_size=4),
    st.sampled_from([(1, 1), (1, 3), (2, 5), (3, 3), (1, 30)]),
    st.integers(0, 2),
)
def test_definition(histories, lengths, padding):
    drafts = np.asarray(batched_lookup(*batch_of(histories, padding=padding), *lengths, 5))
    for row, history in zip(drafts, histories, strict=True):
        assert [d for d in row.tolist() if d >= 0] == definition(history, *lengths, 5)


def test_a_repeated_text_is_continued():
    """The same 48 tokens again and again: what comes next is known at every point of the period."""
    text = list(range(100, 148)) * 3
    for end in range(60, 100):
        assert proposed(text[:end], 1, 5, 4, width=160) == text[end : end + 4]


def context(histories, room, run=None, n_emitted=1):
    tokens, num = batch_of(histories)
    b = len(histories)
    return ProposeContext(
        tokens=tokens, num_tokens=num, n_emitted=jnp.full(b, n_emitted),
        run=jnp.asarray([True] * b if run is None else run),
        block_tables=jnp.zeros((b, 1), jnp.int32),
        hidden=None, previous_hidden=None, seed=jnp.zeros((b, 2), jnp.uint32),
        prompt_len=jnp.ones(b, jnp.int32), max_tokens_total=num + room, temperature=jnp.zeros(b),
    )  # fmt: skip


@pytest.mark.parametrize(("room", "drafts"), [(0, 0), (1, 0), (2, 1), (4, 3), (9, 3)])
def test_no_more_drafts_than_can_be_emitted(room, drafts):
    """The draw that verifies the last draft emits a token too."""
    proposal = NgramProposer(3, 1, 3).propose({}, None, context([[1, 2, 3, 1, 2]], jnp.int32(room)), None)
    assert proposal.drafts.tolist() == [[3, 1, 2][:drafts] + [-1] * (3 - drafts)]
    assert proposal.draft_logits is None


def test_slots_that_did_not_run_get_none():
    history = [1, 2, 3, 1, 2]
    proposer = NgramProposer(2, 1, 3)
    idle = proposer.propose({}, None, context([history, history], 9, run=[False, True]), None)
    assert idle.drafts.tolist() == [[-1, -1], [3, 1]]
    failed = proposer.propose({}, None, context([history], 9, n_emitted=0), None)
    assert failed.drafts.tolist() == [[-1, -1]]


def test_it_is_a_proposer():
    proposer = NgramProposer(3, 2, 4)
    assert isinstance(proposer, Proposer)
    assert hash(proposer) == hash(NgramProposer(3, 2, 4))
    none = proposer.with_num_speculative_tokens(0).propose({}, None, context([[1, 1]], 9), None)
    assert none.drafts.shape == (1, 0)
    with pytest.raises(ValueError, match="min_n is 3 and max_n is 2"):
        NgramProposer(3, 3, 2)
