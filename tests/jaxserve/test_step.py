"""The decode program with drafts: a batch built by hand, a model whose next token depends on the two before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import batch, last_step, step
from jaxserve.batch import BatchState, SlotRow
from jaxserve.last_step import StepOutput
from jaxserve.sampling.sampler import Sampler
from jaxserve.sampling_params import MAX_STOP_IDS
from jaxserve.step import Cache, Parts, PrefillPlan, Weights
from models import MarkovLM
from pallas_kernels import Filters

V, K, BLOCK, LENGTH, SLOTS = 16, 3, 4, 48, 3
PAGES = LENGTH // BLOCK
EMPTY = batch.empty_row((), 1)
DRAFTING = pytest.mark.parametrize("drafting", ["right", "wrong", "late", "short", "none"])


@cache
def decoder(order: int, vocab_limit: int) -> Any:
    """The program is that of any model of this order: the table is an argument."""
    model = MarkovLM(np.zeros((V, V) if order == 1 else (V + 1, V, V), np.float32))
    parts = Parts(model, Sampler(vocab_limit), mesh=None)

    def decode(params: Any, cache: Cache, state: BatchState, run: Any) -> tuple[Cache, BatchState, StepOutput]:
        drafts = state.drafts.shape[1]
        weights = Weights(params, {})
        cache, logits, _ = step.forward(parts, drafts, PAGES, weights, cache, step.view_of(state), run)
        return cache, *last_step.sample(parts, False, drafts, state, logits, run)

    return jax.jit(decode)


@pytest.fixture(scope="module")
def model(random_markov: Callable[..., MarkovLM]) -> MarkovLM:
    return random_markov(V)


def slot_row(prompt: list[int], limit: int, **values: Any) -> SlotRow:
    stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
    stops = values.pop("stop_ids", [])
    stop_ids[: len(stops)] = stops
    row: dict[str, Any] = {"temperature": 0.9, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "num_logprobs": 0} | values
    kinds = {"top_k": np.int32, "num_logprobs": np.int32}
    scalars = {name: kinds.get(name, np.float32)(value) for name, value in row.items()}
    return replace(
        EMPTY,
        num_tokens=np.int32(len(prompt)),
        prompt_len=np.int32(len(prompt)),
        max_tokens_total=np.int32(limit),
        stop_ids=stop_ids,
        seed=np.array([7, 7 + len(prompt)], np.uint32),
        filters=Filters(**{name: scalars.pop(name) for name in ("temperature", "min_p", "top_k", "top_p")}),
        **scalars,
    )


class Batch:
    """Up to SLOTS requests on the device, each with pages of its own."""

    def __init__(self, model: MarkovLM, drafts: int, requests: list[tuple[list[int], SlotRow]]) -> None:
        self.model, self.params, self.vocab_limit = model, model.load_params(None), V
        self.cache = Cache(
            kv=model.init_kv(1 + SLOTS * PAGES, BLOCK, None), boundary=None, draft_kv=None, block_size=BLOCK
        )
        self.state = batch.empty_batch(SLOTS, LENGTH, PAGES, drafts, EMPTY, V)
        pages = 1 + np.arange(SLOTS * PAGES, dtype=np.int32).reshape(SLOTS, PAGES)
        self.state = batch.set_block_tables(self.state, jnp.arange(SLOTS), jnp.asarray(pages))
        self.outputs: list[list[int]] = [[] for _ in requests]
        self.run = np.arange(SLOTS) < len(requests)
        for slot, (prompt, row) in enumerate(requests):
            self.state = batch.fill_slot(None, None, self.state, jnp.int32(slot), jnp.asarray(prompt, jnp.int32), row)
            plan = PrefillPlan(*(jnp.asarray([x], jnp.int32) for x in (slot, 0, len(prompt) - 1, 0, 0)))
            parts, weights = Parts(model, Sampler(V), mesh=None), Weights(self.params, {})
            self.cache = step.prefill(parts, 8, PAGES, weights, self.cache, step.view_of(self.state), plan)

    def decode(self, drafts: list[list[int]] | None = None) -> tuple[list[list[int]], StepOutput]:
        """One step; the tokens each request got in it."""
        if drafts is not None:
            table = np.full(self.state.drafts.shape, -1, np.int32)
            for slot, ids in enumerate(drafts):
                table[slot, : len(ids)] = ids
            self.state = self.state.replace(drafts=jnp.asarray(table))
        program = decoder(self.model.table.ndim - 1, self.vocab_limit)
        self.cache, self.state, out = program(self.params, self.cache, self.state, self.run)
        new = [[t for t in row if t >= 0] for row in np.asarray(out.tokens).tolist()][: len(self.outputs)]
        for output, tokens in zip(self.outputs, new, strict=True):
            output += tokens
        return new, out

    def finish(self) -> list[list[int]]:
        """Without drafts to the end of every request."""
        while np.asarray(self.state.active)[self.run].any():
            self.decode([[] for _ in self.outputs] if self.state.drafts.shape[1] else None)
        return self.outputs


def make_requests() -> list[tuple[list[int], SlotRow]]:
    return [
        ([1, 2, 3], slot_row([1, 2, 3], 30)),
        ([4], slot_row([4], 21, top_p=0.8)),
        ([5, 6, 7, 8, 9], slot_row([5, 6, 7, 8, 9], 40, temperature=0.0)),
    ]


def guesses(truth: list[int], drafting: str, at: int) -> list[int]:
    """Drafts after `at` output tokens; `truth` is the whole output."""
    ahead = [*truth[at : at + K], 0, 0, 0][:K]
    match drafting:
        case "right":
            return ahead
        case "wrong":
            return [(t + 1) % V for t in ahead]
        case "late":  # right, wrong, and right again where it no longer counts
            return [ahead[0], (ahead[1] + 1) % V, ahead[2]]
        case "short":
            return ahead[: at % (K + 1)]
    return []


@DRAFTING
def test_drafts_never_change_the_tokens(model: MarkovLM, drafting: str) -> None:
    """Seeded, filtered and greedy requests: the same outputs, in fewer steps where the drafts are right.

    The model reads the token before the last one from its pages, so KV left by a rejected draft would show.
    """
    truth = Batch(model, 0, make_requests()).finish()
    assert [len(t) for t in truth] == [27, 20, 35]
    drafted = Batch(model, K, make_requests())
    steps = 0
    while np.asarray(drafted.state.active).any():
        before, active = [len(o) for o in drafted.outputs], np.asarray(drafted.state.active)
        drafts = [guesses(t, drafting, n) for t, n in zip(truth, before, strict=True)]
        new, _ = drafted.decode(drafts)
        steps += 1
        for t, n, d, got in zip(truth, before, drafts, new, strict=True):
            left = len(t) - n
            expected = {"right": K + 1, "wrong": 1, "late": 2, "short": len(d) + 1, "none": 1}[drafting]
            assert len(got) == min(expected, left)
        assert (np.asarray(drafted.state.drafts)[active] == -1).all(), "used once"
        assert steps <= 35
    assert drafted.outputs == truth
    assert np.asarray(drafted.state.rows.num_tokens).tolist() == [30, 21, 40]
    for slot, (prompt, _) in enumerate(make_requests()):
        history = np.asarray(drafted.state.tokens)[slot, : len(prompt) + len(truth[slot])]
        assert history.tolist() == prompt + truth[slot]


def test_a_draft_after_a_hole_is_not_looked_at(model: MarkovLM) -> None:
    truth = Batch(model, 0, make_requests()[:1]).finish()[0]
    drafted = Batch(model, K, make_requests()[:1])
    new, _ = drafted.decode([[truth[0], -1, truth[2]]])
    assert new == [truth[:2]]


def test_a_draft_equal_to_the_filler_is_not_accepted(model: MarkovLM) -> None:
    """Rows that are not used hold some token too; it must not extend what was accepted."""
    truth = Batch(model, 0, make_requests()[:1]).finish()[0]
    for length in range(K + 1):
        new, out = Batch(model, K, make_requests()[:1]).decode([truth[:length]])
        assert new == [truth[: length + 1]]
        assert np.asarray(out.tokens)[0, length + 1 :].tolist() == [-1] * (K - length)


@pytest.mark.parametrize("inside", range(K + 1))
def test_stop_id_inside_the_window(model: MarkovLM, inside: int) -> None:
    prompt, row = make_requests()[0]
    truth = Batch(model, 0, [(prompt, row)]).finish()[0]
    first = next(i for i in range(inside, len(truth)) if truth[i] not in truth[:i])  # a token's first appearance
    stopping = slot_row(prompt, 30, stop_ids=[truth[first]])
    drafted = Batch(model, K, [(prompt, stopping)])
    for _ in range(first - inside):
        drafted.decode([[]])
    start = len(drafted.outputs[0])
    new, out = drafted.decode([truth[start : start + K]])
    assert new == [truth[start : first + 1]]
    assert not np.asarray(drafted.state.active)[0]
    assert np.asarray(out.finite).all()
    assert drafted.decode([truth[:K]])[0] == [[]], "a stopped request is over"
    assert drafted.outputs == Batch(model, 0, [(prompt, stopping)]).finish()


@pytest.mark.parametrize("room", range(1, K + 2))
def test_length_limit_inside_the_window(model: MarkovLM, room: int) -> None:
    prompt, row = make_requests()[0]
    truth = Batch(model, 0, [(prompt, row)]).finish()[0]
    drafted = Batch(model, K, [(prompt, slot_row(prompt, len(prompt) + room))])
    new, out = drafted.decode([truth[:K]])
    assert new == [truth[:room]]
    assert not np.asarray(drafted.state.active)[0]
    assert np.asarray(out.finite).all()
    assert int(drafted.state.rows.num_tokens[0]) == len(prompt) + room


def test_the_history_ends_where_the_length_limit_is_the_end_of_the_buffer(model: MarkovLM) -> None:
    prompt = [1 + i % 9 for i in range(LENGTH - 2)]
    truth = Batch(model, 0, [(prompt, slot_row(prompt, LENGTH))]).finish()[0]
    drafted = Batch(model, K, [(prompt, slot_row(prompt, LENGTH))])
    assert drafted.decode([[*truth, 3]])[0] == [truth]
    assert np.asarray(drafted.state.tokens)[0].tolist() == prompt + truth


def test_slots_that_do_not_run_keep_their_state(model: MarkovLM) -> None:
    both = Batch(model, K, make_requests()[:2])
    before = jax.tree.map(lambda x: np.asarray(x)[1], both.state)
    both.run = np.array([True, False, False])
    new, out = both.decode([[], [1, 2, 3]])
    assert [len(n) for n in new] == [1, 0]
    assert np.asarray(out.finite).all()
    after: BatchState = jax.tree.map(lambda x: np.asarray(x)[1], both.state)
    jax.tree.map(np.testing.assert_array_equal, before.replace(drafts=np.array([1, 2, 3])), after)
    both.run = np.array([True, True, False])
    assert both.finish() == Batch(model, 0, make_requests()[:2]).finish()


def broken_after(truth: list[int], prompt: list[int], count: int, model: MarkovLM) -> MarkovLM:
    """The model, but for NaN logits after the first `count` tokens of the output."""
    history = [*prompt, *truth[:count]]
    table = model.table.copy()
    table[history[-2], history[-1]] = np.nan
    return MarkovLM(table)


@pytest.fixture(scope="module")
def straight() -> tuple[MarkovLM, list[int], list[int]]:
    """A model, a prompt and its greedy output: no pair of tokens comes twice, so one place can be broken."""
    table = np.broadcast_to(8 * np.roll(np.eye(V), 1, axis=1), (V + 1, V, V)).astype(np.float32)
    return MarkovLM(table), [0, 1], [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("count", range(K + 1))
def test_tokens_before_a_row_without_a_distribution_are_kept(
    straight: tuple[MarkovLM, list[int], list[int]], count: int
) -> None:
    """As without drafts: the good tokens come first, the error with the next one."""
    model, prompt, truth = straight
    broken = broken_after(truth, prompt, count, model)
    drafted = Batch(broken, K, [(prompt, slot_row(prompt, 20, temperature=0.0))])
    if count:
        new, out = drafted.decode([truth[:K]])
        assert new == [truth[:count]]
        assert np.asarray(out.finite)[0], "nothing is wrong with the tokens of this step"
        assert np.asarray(drafted.state.active)[0]
    new, out = drafted.decode([[]])
    assert new == [[]]
    assert not np.asarray(out.finite)[0]
    assert not np.asarray(drafted.state.active)[0]


@pytest.mark.parametrize("end", ["stop", "length"])
def test_nothing_after_the_end_can_fail_a_request(straight: tuple[MarkovLM, list[int], list[int]], end: str) -> None:
    model, prompt, truth = straight
    broken = broken_after(truth, prompt, 2, model)
    limit, stops = (20, [truth[1]]) if end == "stop" else (len(prompt) + 2, [])
    drafted = Batch(broken, K, [(prompt, slot_row(prompt, limit, temperature=0.0, stop_ids=stops))])
    new, out = drafted.decode([truth[:K]])
    assert new == [truth[:2]]
    assert np.asarray(out.finite)[0]
    assert not np.asarray(drafted.state.active)[0]


def test_a_rejected_draft_cannot_fail_a_request(straight: tuple[MarkovLM, list[int], list[int]]) -> None:
    model, prompt, truth = straight
    table = model.table.copy()
    table[:, 9] = np.nan  # what follows the wrong draft
    drafted = Batch(MarkovLM(table), K, [(prompt, slot_row(prompt, 20, temperature=0.0))])
    new, out = drafted.decode([[9, 9, 9]])
    assert new == [truth[:1]]
    assert np.asarray(out.finite).all()


def test_padded_ids_are_never_emitted(model: MarkovLM) -> None:
    """ids from vocab_limit on are padding of the logits, whatever their value."""
    table = np.zeros((V, V), np.float32)
    table[:, 10:] = 50
    padded = Batch(MarkovLM(table), 0, make_requests())
    padded.vocab_limit = 10
    assert max(max(output) for output in padded.finish()) < 10


def test_slots_move_whole(model: MarkovLM) -> None:
    """A request goes on as before when it is moved into another slot in the middle."""
    truth = Batch(model, 0, make_requests()).finish()
    moved = Batch(model, 0, make_requests())
    for _ in range(5):
        moved.decode()
    moved.state = batch.move_slot(None, moved.state, jnp.int32(2), jnp.int32(0))
    moved.run = np.array([True, True, False])
    moved.outputs[0] = moved.outputs[2]
    assert moved.finish()[:2] == [truth[2], truth[1]]


def test_logprobs_of_a_window(model: MarkovLM, exact_distribution: Callable[..., np.ndarray]) -> None:
    prompt, row = make_requests()[0]
    truth = Batch(model, 0, [(prompt, row)]).finish()[0]
    _, out = Batch(model, K, [(prompt, row)]).decode([truth[:K]])
    history = prompt + truth
    expected = [
        np.log(exact_distribution(model.table[history[i - 2], history[i - 1]])[history[i]])
        for i in range(len(prompt), len(prompt) + K + 1)
    ]
    np.testing.assert_allclose(np.asarray(out.logprobs.token)[0], expected, atol=1e-5)


@pytest.mark.parametrize("drafted", [[[], [], []], [[], [3, 4], []], [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[], [], [5]]])
def test_a_step_in_which_nobody_has_a_draft_takes_one_row_of_each(model: MarkovLM, drafted: list[list[int]]) -> None:
    """The rows that count give and store the same; of a slot that does not run none counts."""
    made = Batch(model, K, make_requests())
    table = np.array([[*ids, *[-1] * (K - len(ids))] for ids in drafted], np.int32)
    view = step.view_of(made.state.replace(drafts=jnp.asarray(table)))
    run = np.array([True, True, False])
    used, positions = (np.asarray(x) for x in step.window_positions(view, run, K))
    pages = np.asarray(view.block_tables)[np.arange(SLOTS)[:, None], np.minimum(positions // BLOCK, PAGES - 1)]
    found = []
    for skips in (False, True):
        parts = Parts(model, Sampler(V), mesh=None, skips_empty_drafts=skips)
        cache, logits, _ = step.forward(parts, K, PAGES, Weights(made.params, {}), made.cache, view, run)
        stored = [np.asarray(x)[pages[used], positions[used] % BLOCK] for x in jax.tree.leaves(cache.kv)]
        found.append((np.asarray(logits).reshape(SLOTS, 1 + K, V)[used], *stored))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert used.sum() == 2 + sum(map(len, drafted[:2]))


def test_pages_are_not_copied(make_engine: Callable[..., Any], make_llama: Callable[..., Any]) -> None:
    """Also where a step may take one row of each: temporaries are far from the size of the pool."""
    speculation = {"method": "ngram", "num_speculative_tokens": K}
    engine = make_engine(make_llama(), num_blocks=4000, max_num_seqs=1, speculative_config=speculation)
    pool = sum(x.nbytes for x in jax.tree.leaves(engine.runner.cache))
    memory = engine.runner.programs["forward", 1, 1, K].memory_analysis()
    assert engine.runner.parts.skips_empty_drafts == (jax.default_backend() == "cpu")
    assert memory.alias_size_in_bytes == pool
    assert memory.temp_size_in_bytes < pool / 8
