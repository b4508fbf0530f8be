"""A draft model's proposals are those of the same model run without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxserve.speculative.draft_model import DraftModelProposer, check_vocabularies
from jaxserve.speculative.proposer import Proposer
from models.base import ForwardInputs
from models.sharding import make_mesh

VOCAB = 11
PROMPTS = [list(range(7)) * 3, [3], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def markov(random_markov):
    """Of order 2: it reads the token before through the block table."""
    return random_markov(VOCAB)


def greedy_markov(model, count):
    def continuation(history):
        text = [VOCAB, *history]
        for _ in range(count):
            text.append(int(np.argmax(model.table[text[-2], text[-1]])))
        return text[len(history) + 1 :]

    return continuation


@pytest.mark.parametrize("count", [1, 2, 5])
def test_markov(markov, simulation, check_against, count):
    proposer = DraftModelProposer(markov, count, VOCAB)
    check_against(simulation(proposer, proposer.load_params({}, None)), greedy_markov(markov, count), PROMPTS, VOCAB)


def test_llama(make_llama, simulation, check_against):
    model = make_llama(vocab_size=VOCAB)
    proposer = DraftModelProposer(model, 3, VOCAB)
    params = proposer.load_params({}, None)
    tables = jnp.arange(1, 13, dtype=jnp.int32)[None]

    @jax.jit
    def logits(tokens, count):
        positions = jnp.where(jnp.arange(48) < count, jnp.arange(48), -1)
        inputs = ForwardInputs(tokens[None], positions[None], tables)
        hidden, _ = model.forward(params, model.init_kv(13, 4, None), inputs, None)
        return model.logits(params, hidden[0, count - 1][None])[0]

    def continuation(history):
        text = list(history)
        for _ in range(3):
            text.append(int(np.argmax(logits(jnp.asarray(text + [0] * (48 - len(text))), len(text)))))
        return text[len(history) :]

    check_against(simulation(proposer, params), continuation, PROMPTS, VOCAB, steps=5)


def test_steps_without_drafts_keep_the_cache_complete(markov, simulation):
    """A batch too large for drafts still commits tokens, and drafts go on from there."""
    silent = DraftModelProposer(markov, 0, VOCAB)
    params = silent.load_params({}, None)
    sim = simulation(silent, params, verified=0)
    sim.start(0, PROMPTS[0])
    for token in (4, 5, 6, 1):
        assert sim.step([[token], [], []]).drafts.shape == (3, 0)
    loud = simulation(silent.with_num_speculative_tokens(3), params, verified=0)
    loud.kv, loud.tables, loud.histories = sim.kv, sim.tables, sim.histories
    proposal = loud.step([[2], [], []])
    assert proposal.drafts[0].tolist() == greedy_markov(markov, 3)(loud.histories[0])


def test_what_others_drafted_is_stored(markov, simulation):
    """Four tokens that this model never drafted: all are in its KV (of a Markov model the tokens) behind the prompt."""
    proposer = DraftModelProposer(markov, 3, VOCAB)
    sim = simulation(proposer, proposer.load_params({}, None))
    sim.start(0, PROMPTS[2])
    sim.start(2, PROMPTS[1])
    proposal = sim.step([[8, 8, 2, 0], [], [5]], num_foreign=3)
    for slot in (0, 2):
        assert proposal.drafts[slot].tolist() == greedy_markov(markov, 3)(sim.histories[slot])
        page, offset = sim.kv.shape[1], np.arange(len(sim.histories[slot]))
        stored = np.asarray(sim.kv)[sim.tables[slot][offset // page], offset % page]
        assert stored.tolist() == sim.histories[slot]


def test_pages_of_a_prefix_are_shared(markov, simulation):
    proposer = DraftModelProposer(markov, 2, VOCAB)
    sim = simulation(proposer, proposer.load_params({}, None))
    sim.start(0, PROMPTS[0])
    sim.tables[1, :4] = sim.tables[0, :4]
    sim.start(1, [*PROMPTS[0][:16], 9, 9, 4], cached=16)
    assert sim.step([[], [7], []]).drafts[1].tolist() == greedy_markov(markov, 2)(sim.histories[1])


@pytest.mark.parametrize("temperature", [0.7, 0.0])
def test_drawn_drafts_follow_the_distribution_they_state(random_markov, simulation, temperature):
    """q is the model's distribution at the temperature, and drafts are draws of q: many slots, a seed each."""
    model, slots = random_markov(5, order=1), 3000
    proposer = DraftModelProposer(model, 2, 5, probabilistic=True)
    sim = simulation(proposer, proposer.load_params({}, None), slots=slots)
    seeds = np.random.default_rng(1).integers(0, 2**32, (slots, 2), dtype=np.uint32)
    sim.histories = [[1] for _ in range(slots)]
    proposal = sim.step([[2]] * slots, seed=seeds, temperature=np.full(slots, temperature, np.float32))
    drafts, q = np.asarray(proposal.drafts), np.asarray(jax.nn.softmax(proposal.draft_logits, axis=-1))
    rows = model.table[[2] * slots], model.table[drafts[:, 0]]
    for i, row in enumerate(rows):
        if temperature == 0:
            np.testing.assert_array_equal(q[:, i], np.eye(5)[np.argmax(row, axis=1)])
            np.testing.assert_array_equal(drafts[:, i], np.argmax(row, axis=1))
        else:
            np.testing.assert_allclose(q[:, i], jax.nn.softmax(row / temperature, axis=-1), atol=1e-5)
    if temperature:
        assert (
            stats.chisquare(
                np.bincount(drafts[:, 0], minlength=5), q[0, 0].astype(float) * slots / q[0, 0].sum(dtype=float)
            ).pvalue
            > 1e-4
        )
        joint = np.zeros((5, 5))
        np.add.at(joint, (drafts[:, 0], drafts[:, 1]), 1)
        second = np.asarray(jax.nn.softmax(model.table / temperature, axis=-1), float)
        expected = slots * q[0, 0, :, None] * second
        assert stats.chisquare(joint.ravel(), (expected / expected.sum() * slots).ravel()).pvalue > 1e-4
    again = sim._propose(
        sim.params,
        sim.kv,
        sim.context([1] * slots, 100, seed=seeds, temperature=np.full(slots, temperature, np.float32)),
    )
    np.testing.assert_array_equal(again.drafts, drafts)


def test_logits_of_another_width(random_markov, simulation):
    """Padded differently: the draft's 5 columns among the target's 7."""
    model = random_markov(5)
    proposer = DraftModelProposer(model, 2, 7, probabilistic=True)
    sim = simulation(proposer, proposer.load_params({}, None))
    sim.start(0, [1, 2, 3])
    q = np.asarray(sim.step([[4], [], []]).draft_logits)
    assert q.shape == (3, 2, 7)
    assert (q[0, :, 5:] == -np.inf).all()


def test_drafts_end_with_the_request(markov, simulation):
    proposer = DraftModelProposer(markov, 4, VOCAB)
    sim = simulation(proposer, proposer.load_params({}, None))
    sim.start(0, [1, 2, 3])
    drafts = sim.step([[4], [], []], room=3).drafts[0].tolist()
    assert drafts == [*greedy_markov(markov, 2)([1, 2, 3, 4]), -1, -1]


@pytest.mark.parametrize("replicated", [False, True])
def test_on_a_mesh(make_llama, simulation, replicated):
    model = make_llama(vocab_size=16)
    alone = DraftModelProposer(model, 3, 16)
    spread = DraftModelProposer(model, 3, 16, replicated=replicated)
    mesh = make_mesh(jax.devices()[:2])
    params = spread.load_params({}, mesh)
    split = {s.sharding.is_fully_replicated for s in jax.tree.leaves(params)}
    assert split == ({True} if replicated else {True, False})
    sim = simulation(alone, alone.load_params({}, None))
    for slot, prompt in enumerate(PROMPTS):
        sim.start(slot, prompt)
    kv, pool = sim.kv, spread.init_kv(37, 4, mesh)
    context = sim.context([1] * 3, 100)
    expected = sim._propose(sim.params, kv, context)
    pool = jax.tree.map(lambda new, old: jax.device_put(old, new.sharding), pool, kv)
    proposal = jax.jit(lambda p, kv, c: spread.propose(p, kv, c, mesh))(params, pool, context)
    np.testing.assert_array_equal(proposal.drafts, expected.drafts)
    assert all(x.sharding.is_fully_replicated == replicated for x in jax.tree.leaves(proposal.kv))


class Vocabulary:
    def __init__(self, **ids):
        self.ids = ids

    def get_vocab(self):
        return self.ids


def test_vocabularies(random_markov):
    five, seven = random_markov(5), random_markov(7)
    check_vocabularies(five, seven, Vocabulary(a=0, b=1), Vocabulary(b=1, a=0))
    check_vocabularies(five, five, None, Vocabulary(a=0))
    with pytest.raises(ValueError, match="vocab_size 7; it must be the target's, 5"):
        check_vocabularies(five, seven, None, None)
    with pytest.raises(ValueError, match="2 tokens differ, 'b' is 2 there and 1 here"):
        check_vocabularies(five, five, Vocabulary(a=0, b=1, c=2), Vocabulary(a=0, b=2, c=1))


def test_it_is_a_proposer(markov):
    proposer = DraftModelProposer(markov, 3, VOCAB)
    assert isinstance(proposer, Proposer)
    assert hash(proposer) == hash(DraftModelProposer(markov, 3, VOCAB))
    assert proposer.stores_kv
