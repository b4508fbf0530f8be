"""Medusa's proposals: head i, read at the row that the newest token was drawn from."""

import numpy as np
import pytest

from jaxserve.speculative.medusa import MedusaProposer
from jaxserve.speculative.proposer import Proposer
from models.medusa import Medusa

VOCAB, D = 24, 64


@pytest.fixture(scope="module")
def heads(make_llama):
    return Medusa(make_llama(vocab_size=VOCAB, num_hidden_layers=1), num_heads=3, seed=5)


@pytest.fixture(scope="module")
def states():
    mix = np.random.default_rng(0).standard_normal((VOCAB, D)).astype(np.float32)
    return lambda history: np.cumsum(mix[np.array(history, int)], axis=0)


def test_proposals(heads, states, simulation, check_against):
    proposer = MedusaProposer(heads, 3)
    params = proposer.load_params({}, None)

    def oracle(history):
        hidden = states(history)[[len(history) - 2]]
        return [int(np.argmax(heads.logits(params, hidden, i))) for i in range(3)]

    prompts = [list(range(7)), [3, 1], [1, 2, 3, 4]]
    check_against(simulation(proposer, params, hidden=states), oracle, prompts, VOCAB, steps=5)


def test_drawn_drafts(heads, states, simulation):
    proposer = MedusaProposer(heads, 2, probabilistic=True)
    sim = simulation(proposer, proposer.load_params({}, None), hidden=states)
    sim.start(0, [1, 2, 3])
    proposal = sim.step([[4], [], []], temperature=np.full(3, 2.0, np.float32))
    expected = heads.logits(sim.params, states([1, 2, 3, 4])[[2]], 1)[0] / 2
    np.testing.assert_allclose(proposal.draft_logits[0, 1], expected - expected.max(), atol=1e-4)


def test_no_more_drafts_than_heads(heads):
    proposer = MedusaProposer(heads, 3)
    assert isinstance(proposer, Proposer)
    assert hash(proposer) == hash(MedusaProposer(heads, 3))
    with pytest.raises(ValueError, match=r"num_speculative_tokens is 4; it must be in \[0, 3\]"):
        proposer.with_num_speculative_tokens(4)
