"""An engine reduced to what a proposer sees of it: tiles, block tables, committed tokens, hidden states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.speculative.proposer import PrefillContext, ProposeContext

PAGE = 4
TILE = 8
PAGES = 12  # of a request
WIDTH = PAGE * PAGES
PROGRAMS = {"xla_backend_optimization_level": 0}  # compiles in half the time


class Simulation:
    """Requests in slots 0.. of a batch. Tokens are the test's; hidden(history) [T, D] are the target's states, if any.

    Whatever the contract leaves open is NaN or garbage here: hidden states of rejected rows, boundary states of tiles
    that do not begin a page, tokens past the end.
    """

    def __init__(self, proposer, params, slots=3, hidden=None, verified=None, seed=0):
        self.proposer, self.params, self.hidden = proposer, params, hidden
        self.verified = proposer.num_speculative_tokens if verified is None else verified  # J
        self.histories = [[] for _ in range(slots)]
        self.num_emitted = [0] * slots
        self.rng = np.random.default_rng(seed)
        pages = 1 + self.rng.permutation(slots * PAGES)
        self.tables = pages.reshape(slots, PAGES).astype(np.int32)
        self.kv = proposer.init_kv(slots * PAGES + 1, PAGE, None)
        self._prefill = jax.jit(lambda p, kv, c: proposer.prefill(p, kv, c, None), compiler_options=PROGRAMS)
        self._propose = jax.jit(lambda p, kv, c: proposer.propose(p, kv, c, None), compiler_options=PROGRAMS)

    def start(self, slot, prompt, cached=0):
        """Prefill all but the last token, from position `cached` on (whole pages, shared by the test)."""
        self.histories[slot] = list(prompt)
        starts = list(range(cached, len(prompt) - 1, TILE))
        while starts:  # one or two tiles a call
            count = int(self.rng.integers(1, 3))
            now, starts = starts[:count], starts[count:]
            self.kv = self._prefill(self.params, self.kv, self._tiles(slot, now + [None] * (2 - len(now))))

    def _tiles(self, slot, starts):
        history = self.histories[slot]
        states = self._states(history)
        n = len(starts)
        tokens, following = (self.rng.integers(0, 5, (n, TILE)).astype(np.int32) for _ in range(2))
        positions = np.full((n, TILE), -1, np.int32)
        hidden = previous = None
        if states is not None:
            width = states.shape[1]
            hidden, previous = (np.full((*s, width), np.nan, np.float32) for s in ((n, TILE), (n,)))
        for i, start in enumerate(starts):
            if start is None:
                continue
            count = min(TILE, len(history) - 1 - start)
            tokens[i, :count] = history[start : start + count]
            following[i, :count] = history[start + 1 : start + count + 1]
            positions[i, :count] = range(start, start + count)
            if states is not None:
                hidden[i, :count] = states[start : start + count]
                previous[i] = states[start - 1] if start and start % PAGE == 0 else np.nan
        tables = np.repeat(self.tables[[slot]], n, axis=0)
        return PrefillContext(*map(_array, (tokens, following, positions, tables, hidden, previous)))

    def step(self, emitted, room=100, **fields):
        """Commit tokens (a list for each slot, [] for one that does not run) and propose."""
        before = [len(h) for h in self.histories]
        for history, new in zip(self.histories, emitted, strict=True):
            history.extend(new)
        proposal = self._propose(self.params, self.kv, self.context(before, room, **fields))
        self.kv = proposal.kv
        return proposal

    def context(self, before, room, **fields):
        slots = len(self.histories)
        tokens = self.rng.integers(0, 5, (slots, WIDTH)).astype(np.int32)
        hidden = previous = None
        for i, history in enumerate(self.histories):
            tokens[i, : len(history)] = history
            states = self._states(history)
            if states is not None and hidden is None:
                hidden = np.full((slots, 1 + self.verified, states.shape[1]), np.nan, np.float32)
                previous = np.full((slots, states.shape[1]), np.nan, np.float32)
            if hidden is not None and len(history) > before[i]:
                hidden[i, : len(history) - before[i]] = states[before[i] - 1 : -1]
                if before[i] > 1 and (before[i] - 1) % PAGE == 0:
                    previous[i] = states[before[i] - 2]
        lengths = np.array([len(h) for h in self.histories], np.int32)
        values = {
            "tokens": tokens,
            "num_tokens": lengths,
            "n_emitted": lengths - np.array(before, np.int32),
            "run": lengths > np.array(before),
            "block_tables": self.tables,
            "hidden": hidden,
            "previous_hidden": previous,
            "seed": np.zeros((slots, 2), np.uint32),
            "prompt_len": np.ones(slots, np.int32),
            "max_tokens_total": lengths + room,
            "temperature": np.zeros(slots, np.float32),
        }
        arrays = {name: _array(value) for name, value in (values | fields).items() if name != "num_foreign"}
        return ProposeContext(**arrays, num_foreign=fields.get("num_foreign", 0))

    def _states(self, history):
        if self.hidden is None:
            return None
        return self.hidden(history)


def _array(x):
    return None if x is None else jnp.asarray(x)


@pytest.fixture(scope="session")
def simulation():
    return Simulation


@pytest.fixture(scope="session")
def check_against():
    """Run requests through prefill and many steps that accept some drafts, all, or none; compare every proposal.

    oracle(history) -> the K drafts that a proposer without a cache would make.
    """

    def check(sim, oracle, prompts, vocab, steps=6, seed=0):
        rng = np.random.default_rng(seed)
        for slot, prompt in enumerate(prompts):
            sim.start(slot, prompt)
        last = [[] for _ in prompts]
        for step in range(steps):
            emitted = []
            for drafts in last:
                accepted = drafts[: rng.integers(0, len(drafts) + 1)] if step % 3 else drafts
                emitted.append([*accepted, int(rng.integers(0, vocab))])
            if step == 3:
                emitted[0] = []  # did not run
            proposal = sim.step(emitted)
            drafts = np.asarray(proposal.drafts)
            for slot, history in enumerate(sim.histories):
                if emitted[slot]:
                    last[slot] = drafts[slot].tolist()
                    assert last[slot] == oracle(history), (step, slot)
                else:
                    assert (drafts[slot] == -1).all()

    return check
