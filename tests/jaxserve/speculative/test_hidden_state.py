"""Heads on hidden states propose through pages, tiles and verified windows what they would propose from scratch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.speculative.hidden_state import HiddenStateProposer
from jaxserve.speculative.proposer import Proposer
from models.base import ForwardInputs
from models.eagle import Eagle, Eagle3
from models.llama import Llama
from models.mtp import MTP
from models.sharding import make_mesh

VOCAB, D, PAGE, MOST = 24, 64, 4, 48
HEADS = {"eagle": Eagle, "eagle3": Eagle3, "mtp": MTP}
PROMPTS = [list(range(7)) * 3, [3, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def target(make_llama):
    return make_llama(vocab_size=VOCAB, num_hidden_layers=1)


@pytest.fixture(scope="module")
def target_params(target):
    return target.load_params(None)


@pytest.fixture(params=HEADS)
def head(request, target):
    extra = {"draft_vocab_size": VOCAB} if request.param == "eagle3" else {}
    return HEADS[request.param](target, target, seed=3, **extra)


@pytest.fixture(scope="module")
def states():
    """Hidden states of a target as a function of the history: as good as any, and wrong when one token is."""
    mix = np.random.default_rng(0).standard_normal((VOCAB, 4 * D)).astype(np.float32)

    def hidden(history):
        rows = np.zeros((max(len(history), 1), 4 * D), np.float32)
        for i, token in enumerate(history):
            rows[i] = np.sin(3 * rows[i - 1] + mix[token]) if i else mix[token]
        return rows

    return hidden


def from_scratch(head, params, states, count, ids=None):
    """K greedy drafts of a history, its entries and those of the drafts in one group each time, without a cache."""

    @jax.jit
    def forward(tokens, hidden, length):
        positions = jnp.where(jnp.arange(1, MOST) < length, jnp.arange(1, MOST), -1)[None]
        tables = jnp.arange(1, MOST // PAGE + 1, dtype=jnp.int32)[None]
        inputs = ForwardInputs(tokens[None, 1:], positions, tables)
        states, _ = head.forward(params, head.init_kv(MOST // PAGE + 1, PAGE, None), inputs, hidden[None], None)
        return states[0, length - 2], head.logits(params, states[0, length - 2][None])[0]

    def drafts(history):
        features = list(np.asarray(head.features(params, jnp.asarray(states(history))))[: len(history) - 1])
        text = list(history)
        for _ in range(count):
            rows = np.zeros((MOST - 1, D), np.float32)
            rows[: len(features)] = features
            state, logits = forward(jnp.asarray(text + [0] * (MOST - len(text))), jnp.asarray(rows), len(text))
            best = int(np.argmax(logits))
            text.append(best if ids is None else int(ids[best]))
            features.append(np.asarray(state))
        return text[len(history) :]

    return drafts


@pytest.mark.parametrize("count", [1, 4])
def test_proposals(head, target_params, states, simulation, check_against, count):
    proposer = HiddenStateProposer(head, count, VOCAB, PAGE)
    params = proposer.load_params(target_params, None)
    sim = simulation(proposer, params, hidden=states)
    check_against(sim, from_scratch(head, params, states, count), PROMPTS, VOCAB, steps=5)


@pytest.mark.parametrize("rest", [[9, 9, 4], [9]], ids=["tile", "decode"])
def test_a_cached_prefix_needs_only_its_last_hidden_state(head, target_params, states, simulation, rest):
    """All 16 shared tokens are used. The entry at position 16 is made from the state kept with the page before: in the
    prefill of what follows, or in the first decode where nothing is left to prefill."""
    proposer = HiddenStateProposer(head, 2, VOCAB, PAGE)
    params = proposer.load_params(target_params, None)
    sim = simulation(proposer, params, hidden=states)
    sim.start(0, PROMPTS[0])
    sim.tables[1, :4] = sim.tables[0, :4]
    sim.start(1, [*PROMPTS[0][:16], *rest], cached=16)
    oracle = from_scratch(head, params, states, 2)
    for token in (7, 8):
        assert sim.step([[], [token], []]).drafts[1].tolist() == oracle(sim.histories[1])


def test_steps_without_drafts_keep_the_cache_complete(head, target_params, states, simulation):
    silent = HiddenStateProposer(head, 0, VOCAB, PAGE)
    params = silent.load_params(target_params, None)
    sim = simulation(silent, params, hidden=states, verified=0)
    sim.start(0, PROMPTS[0])
    for token in (4, 5, 6, 1):
        assert sim.step([[token], [], []]).drafts.shape == (3, 0)
    loud = simulation(silent.with_num_speculative_tokens(2), params, hidden=states, verified=0)
    loud.kv, loud.tables, loud.histories = sim.kv, sim.tables, sim.histories
    assert loud.step([[2], [], []]).drafts[0].tolist() == from_scratch(head, params, states, 2)(loud.histories[0])


def test_a_reduced_vocabulary(target, target_params, states, simulation, check_against):
    """EAGLE-3: drafts and their distribution are over the target's ids."""
    head = Eagle3(target, target, seed=3, draft_vocab_size=7)
    proposer = HiddenStateProposer(head, 3, VOCAB, PAGE)
    ids = jnp.asarray([1, 4, 5, 9, 17, 20, 23], jnp.int32)
    params = proposer.load_params(target_params, None) | {"target_ids": ids}
    sim = simulation(proposer, params, hidden=states)
    check_against(sim, from_scratch(head, params, states, 3, ids), PROMPTS, VOCAB, steps=4)
    drawn = simulation(HiddenStateProposer(head, 3, VOCAB, PAGE, probabilistic=True), params, hidden=states)
    drawn.start(0, PROMPTS[0])
    proposal = drawn.step([[4], [], []], temperature=np.full(3, 0.8, np.float32))
    outside = np.setdiff1d(np.arange(VOCAB), ids)
    q = np.asarray(jax.nn.softmax(proposal.draft_logits, axis=-1))
    assert q.shape == (3, 3, VOCAB)
    assert (q[0][:, outside] == 0).all()
    assert (q[0][np.arange(3), proposal.drafts[0]] > 0).all()


@pytest.mark.parametrize("replicated", [False, True])
def test_on_a_mesh(target, target_params, states, simulation, replicated):
    head = Eagle(target, target, seed=3)
    alone = HiddenStateProposer(head, 3, VOCAB, PAGE)
    spread = HiddenStateProposer(head, 3, VOCAB, PAGE, replicated=replicated)
    mesh = make_mesh(jax.devices()[:2])
    params = spread.load_params(target.load_params(mesh), mesh)
    sim = simulation(alone, alone.load_params(target_params, None), hidden=states)
    for slot, prompt in enumerate(PROMPTS):
        sim.start(slot, prompt)
    for history in sim.histories:
        history.append(5)
    context = sim.context([len(h) - 1 for h in sim.histories], 100)
    expected = sim._propose(sim.params, sim.kv, context)
    pool = spread.init_kv(len(sim.tables) * 12 + 1, PAGE, mesh)
    pool = jax.tree.map(lambda new, old: jax.device_put(old, new.sharding), pool, sim.kv)
    proposal = jax.jit(lambda p, kv, c: spread.propose(p, kv, c, mesh))(params, pool, context)
    np.testing.assert_array_equal(proposal.drafts, expected.drafts)
    assert all(x.sharding.is_fully_replicated == replicated for x in jax.tree.leaves(proposal.kv))


def test_it_is_a_proposer(head):
    proposer = HiddenStateProposer(head, 3, VOCAB, PAGE)
    assert isinstance(proposer, Proposer)
    assert hash(proposer) == hash(HiddenStateProposer(head, 3, VOCAB, PAGE))
    assert proposer.stores_kv


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("name", HEADS)
def test_bfloat16(name, platform, target, target_params, states, simulation):
    """States keep their dtype from step to step, and stay near those of float32: most first drafts are the same."""
    drafts = []
    for dtype, place in (("float32", "cpu"), ("bfloat16", platform)):
        model = Llama(target.config, dtype=dtype, platform=place)
        extra = {"draft_vocab_size": VOCAB} if name == "eagle3" else {}
        proposer = HiddenStateProposer(HEADS[name](model, model, seed=3, **extra), 3, VOCAB, PAGE)
        shared = jax.tree.map(
            lambda x, dtype=dtype: x.astype(dtype), {k: target_params[k] for k in ("embed", "lm_head")}
        )
        sim = simulation(proposer, proposer.load_params(shared, None), slots=8, hidden=states)
        rng = np.random.default_rng(1)
        for slot in range(8):
            sim.start(slot, rng.integers(0, VOCAB, 10).tolist())
        drafts.append(np.asarray(sim.step([[5]] * 8).drafts))
    assert ((drafts[1] >= 0) & (drafts[1] < VOCAB)).all()
    assert (drafts[0][:, 0] == drafts[1][:, 0]).mean() > 0.7
