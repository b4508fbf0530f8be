"""The automatic K: its parts by arithmetic, and the whole on simulated machines whose best K is known."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import bucket
from jaxserve.speculative.auto import AutoK, StepTime, acceptance_rates, expected_tokens, fit_step_time

CHOICES = (0, 1, 2, 3, 5, 7)
SLOTS = (1, 4, 8, 16, 32, 64, 128, 256)
MACHINES = {
    "ridge at 295 rows": StepTime(memory=0.02, overhead=0.0, compute=0.02 / 295, draft=0.0),
    "ridge, dear drafts": StepTime(memory=0.02, overhead=0.0, compute=0.02 / 295, draft=0.002),
    "ridge at 8 rows": StepTime(memory=0.02, overhead=0.01, compute=0.01 / 8, draft=0.0),
    "linear": StepTime(memory=0.0, overhead=0.01, compute=0.002, draft=0.0005),
}


def test_expected_tokens():
    np.testing.assert_allclose(expected_tokens(np.array([0.5, 0.5, 1.0])), [1, 1.5, 1.75, 2.0])


def test_acceptance_rates():
    """Measured where there is enough, else like the position before."""
    rates = acceptance_rates(np.array([1e6, 1e6, 0, 0]), np.array([8e5, 4e5, 0, 0]))
    np.testing.assert_allclose(rates, [0.8, 0.4, 0.4, 0.4], rtol=1e-4)


@pytest.mark.parametrize("name", MACHINES)
def test_fit(name):
    """Sizes on both sides of the ridge, and their drafts, give the machine back."""
    machine = MACHINES[name]
    rows, drafts = (x.ravel() for x in np.meshgrid([1, 2, 4, 8, 64, 128, 256, 512, 1024, 2048], [0, 1, 3, 7]))
    fit = fit_step_time(rows, drafts, machine(rows, drafts))
    np.testing.assert_allclose(fit(rows, drafts), machine(rows, drafts), rtol=1e-6)
    if machine.memory:
        assert fit.ridge == pytest.approx(machine.ridge, rel=1e-5)


def test_fit_of_one_size_is_flat():
    fit = fit_step_time(np.array([8]), np.array([1]), np.array([0.5]))
    np.testing.assert_allclose(fit(np.array([8, 800]), np.array([1, 3])), 0.5)


@given(st.lists(st.tuples(st.sampled_from(SLOTS), st.sampled_from(CHOICES), st.floats(1e-6, 1e3)), min_size=1))
@settings(max_examples=300, deadline=None)
def test_a_fitted_time_is_positive(measured):
    """Whatever was measured: a step without drafts, or of few rows, is never taken to cost nothing."""
    slots, drafts, seconds = map(np.array, zip(*measured, strict=True))
    fit = fit_step_time(slots * (1 + drafts), drafts, seconds)
    for rows, some in itertools.product((1, 6, 2048), CHOICES):
        assert 0 < fit(np.array(rows * (1 + some)), np.array(some)) < np.inf


def test_steps_that_only_drafts_make_longer():
    """The time grows faster than the drafts, as on a busy machine, and was measured with drafts only."""
    auto = AutoK(CHOICES, SLOTS)
    for drafts, seconds in ((5, 1.0), (7, 2.0)):
        auto.observe([(drafts, 1)], 1, drafts, seconds)
    assert auto.choose(1) in CHOICES
    assert fit_step_time(np.array([6, 8]), np.array([5, 7]), np.array([1.0, 2.0]))(np.array(1), np.array(0)) > 0


def simulate(auto, machine, rates, batch, steps, rng, held_up=1.0):
    """Expected tokens a second of the last half of the steps' choices. held_up: by how much the first step with each K
    takes longer, as any may while the machine does something else."""
    seen = set()
    expected = expected_tokens(rates)
    tokens = seconds = 0.0
    for step in range(steps):
        drafts = auto.choose(batch)
        accepted = np.cumprod(rng.random((batch, drafts)) < rates[:drafts], axis=1).sum(axis=1)
        rows = bucket(SLOTS, batch) * (1 + drafts)
        time = float(machine(np.array(rows), np.array(drafts))) * rng.uniform(0.98, 1.02)
        if drafts not in seen:
            time *= held_up
            seen.add(drafts)
        auto.observe([(drafts, 1 + int(a)) for a in accepted], batch, drafts, time)
        if step >= steps // 2:
            tokens, seconds = tokens + batch * expected[drafts], seconds + time
    return tokens / seconds


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("name", MACHINES)
def test_within_three_percent_of_the_best_fixed_choice(name, rate):
    """From an empty start, then through batches of all sizes with the same object."""
    machine, rates = MACHINES[name], np.full(7, rate)
    rng = np.random.default_rng(0)
    auto = AutoK(CHOICES, SLOTS)
    for batch in (1, 6, 32, 200, 3, 64):
        rows = bucket(SLOTS, batch) * (1 + np.array(CHOICES))
        best = max(batch * expected_tokens(rates)[list(CHOICES)] / machine(rows, np.array(CHOICES)))
        assert simulate(auto, machine, rates, batch, 600, rng) > 0.97 * best


@pytest.mark.parametrize("name", MACHINES)
def test_a_step_that_was_held_up_decides_nothing(name):
    machine, rates = MACHINES[name], np.full(7, 0.7)
    best = max(8 * expected_tokens(rates)[list(CHOICES)] / machine(8 * (1 + np.array(CHOICES)), np.array(CHOICES)))
    auto = AutoK(CHOICES, SLOTS)
    assert simulate(auto, machine, rates, 8, 600, np.random.default_rng(0), held_up=50) > 0.97 * best


def test_it_notices_that_another_k_became_faster():
    """A time that was right once is measured again."""
    auto, rng = AutoK((0, 3), SLOTS), np.random.default_rng(0)
    slow = StepTime(memory=0.0, overhead=0.0, compute=0.01, draft=0.0)
    simulate(auto, slow, np.full(3, 0.7), 4, 400, rng)
    assert auto.choose(4) == 0
    fast = StepTime(memory=0.02, overhead=0.0, compute=0.0, draft=0.0)
    simulate(auto, fast, np.full(3, 0.7), 4, 1200, rng)
    assert auto.choose(4) == 3


def test_it_notices_that_drafts_became_good():
    """While there are no drafts, one step in many has some."""
    machine, rng = MACHINES["linear"], np.random.default_rng(0)
    auto = AutoK(CHOICES, SLOTS)
    simulate(auto, machine, np.zeros(7), 1, 500, rng)
    assert auto.choose(1) == 0
    simulate(auto, machine, np.ones(7), 1, 6000, rng)
    assert auto.choose(1) >= 3


def test_ranks_that_add_up_decide_alike():
    """In every step of a long run in which they measure different things, and some steps only on one of them."""
    machine, rng = MACHINES["ridge at 8 rows"], np.random.default_rng(0)
    ranks, rates, batches, made = [AutoK(CHOICES, SLOTS) for _ in range(2)], (0.9, 0.1), (4, 64), set()
    for step in range(2000):
        total = sum(rank.statistics for rank in ranks)
        drafts, other = (rank.choose(max(batches), total) for rank in ranks)
        assert drafts == other
        made.add(drafts)
        for rank, rate, batch in zip(ranks, rates, batches, strict=True):
            if rng.random() < rate:
                accepted = np.cumprod(rng.random((batch, drafts)) < rate * (step < 1000), axis=1).sum(axis=1)
                time = float(machine(np.array(bucket(SLOTS, batch) * (1 + drafts)), np.array(drafts)))
                rank.observe([(drafts, 1 + int(a)) for a in accepted], batch, drafts, time * rng.uniform(0.9, 1.1))
    assert len(made) >= 4
    assert ranks[0].num_observed > 3 * ranks[1].num_observed


def test_drafts_are_tried_again_though_no_step_was_measured():
    """Where there are none, and somebody always prefills."""
    auto = AutoK((0, 3), SLOTS)
    simulate(auto, StepTime(0.0, 0.0, 0.01, 0.0), np.zeros(3), 4, 100, np.random.default_rng(0))
    tried = [step for step in range(1000) if auto.choose(4)]
    assert len(tried) >= 4
    assert max(b - a for a, b in itertools.pairwise([0, *tried, 1000])) < 270


def test_nobody_running():
    assert AutoK(CHOICES, SLOTS).choose(0) == 0


@pytest.mark.parametrize("choices", [[0], [1, 2], [0, 2, 2]])
def test_choices(choices):
    with pytest.raises(ValueError, match=r"choices is .* it must ascend from 0"):
        AutoK(choices, SLOTS)
