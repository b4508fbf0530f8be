"""Suffix proposals against a tree of counts built as the paper describes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.speculative.suffix import SuffixProposer

texts = st.lists(st.integers(0, 2), min_size=1, max_size=20)


def scores_by_tree(sequences, history, depth, count, factor, min_prob):
    """{(drafts): score} over all match lengths of one tree, which counts every substring up to its depth."""
    occurrences = Counter(
        tuple(s[i : i + n]) for s in sequences for n in range(1, 2 * depth) for i in range(len(s) - n + 1)
    )
    found = {}
    for length in range(1, min(depth, len(history)) + 1):
        suffix = tuple(history[-length:])
        # The request's own tree counts the suffix itself, with nothing behind it.
        here = occurrences[suffix] - (sequences == [history])
        drafts, score, probability = [], 0.0, 1.0
        while here and len(drafts) < min(count, int(length * factor), depth - 1):
            children = {t: occurrences[(*suffix, *drafts, t)] for t in range(3)}
            token = max(children, key=lambda t: (children[t], -t))
            probability *= children[token] / here
            if probability < min_prob or not children[token]:
                break
            drafts.append(token)
            score, here = score + probability, children[token]
        found[tuple(drafts)] = max(score, found.get(tuple(drafts), 0))
    return found


@settings(max_examples=150, deadline=None)
@given(texts, st.lists(texts, max_size=4), st.sampled_from([(8, 4, 1.0, 0.1), (5, 6, 3.0, 0.3), (4, 2, 0.5, 0.0)]))
def test_the_tree(history, finished, options):
    depth, count, factor, min_prob = options
    proposer = SuffixProposer(count, depth, 100, factor, min_prob)
    for output in finished:
        proposer.add_finished(output)
    drafts = tuple(proposer.propose(history))
    own, stored = (scores_by_tree(s, history, depth, count, factor, min_prob) for s in ([history], finished))
    best = max([0.0, *own.values(), *stored.values()])
    assert max(own.get(drafts, 0.0), stored.get(drafts, 0.0)) == pytest.approx(best)


def test_more_frequent_wins():
    proposer = SuffixProposer(3)
    for output in ([1, 2, 3, 4, 9], [1, 2, 3, 5, 9], [1, 2, 3, 5, 9]):
        proposer.add_finished(output)
    assert proposer.propose([0, 1, 2, 3]) == [5, 9]
    assert proposer.propose([7]) == []
    assert proposer.propose([]) == []


def test_longer_matches_get_more_drafts():
    proposer = SuffixProposer(8)
    proposer.add_finished(range(20))
    assert proposer.propose([1]) == [2]
    assert proposer.propose([1, 2, 3]) == [4, 5, 6]
    assert proposer.propose(list(range(12))) == list(range(12, 20))
    assert proposer.expect([1, 2], ahead=3) == ([3, 4, 5, 6, 7, 8, 9, 10], [2, 3, 4, 5])
    assert proposer.expect([99], ahead=1) == ([], [0, 1])


def test_outputs_do_not_run_into_each_other():
    proposer = SuffixProposer(4, max_spec_factor=4.0)
    proposer.add_finished([1, 2, 3])
    proposer.add_finished([4, 5, 6])
    assert proposer.propose([2]) == [3]


@settings(max_examples=30, deadline=None)
@given(st.lists(texts, min_size=1, max_size=30), st.integers(0, 5))
def test_the_store_is_bounded(finished, size):
    """Only the last outputs count, and memory follows them."""
    proposer, fresh = SuffixProposer(4, max_cached_requests=size), SuffixProposer(4)
    for output in finished:
        proposer.add_finished(output)
    last = finished[max(0, len(finished) - size) :]
    for output in last:
        fresh.add_finished(output)
    kept = sum(len(output) + 1 for output in last)
    assert len(proposer._store._text) <= 2 * kept + 1
    assert sum(map(len, proposer._store._places.values())) <= 2 * kept + 1
    for token in range(3):
        assert proposer.propose([token]) == fresh.propose([token])


def test_proposals_of_a_long_request_are_quick():
    """4096 tokens of text that repeats itself: a search looks at places, not at substrings."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, 40, 4096).tolist()
    proposer = SuffixProposer(8)
    assert text[100:108] == proposer.propose(text + text[70:100])
