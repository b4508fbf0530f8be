"""K chosen from what is measured: how often drafts are accepted, and what a step of so many rows takes.

A step of B requests with K drafts runs n = B (1 + K) rows and makes B E(K) tokens, where E(K) = 1 + a1 + a1 a2 + ... of
the acceptance rates a of each position given those before it. Its time is that of reading the weights until n reaches
the ridge where arithmetic takes longer: t(n, K) = max(memory, overhead + compute n) + draft K. The K with the most
tokens a second wins. Its neighbours are tried a few times, since a time that was never measured is only extrapolated,
and now and then again. Of times a power mean is kept that is near the smallest: a step that something else held up does
not count. Everything measured is kept as sums, and nothing else that a rank saw decides: ranks that add theirs up, and
ask for every step together, decide alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.config import bucket

_PRIOR_RATE = 0.6  # of the first position, before anything was drafted
_PRIOR_WEIGHT = 4.0  # windows that the guess is worth
_KEEP = 0.995  # of a count, from step with drafts to step with drafts: the last few hundred decide
_KEEP_AT_PROBE = 0.8  # of a count, when drafts are tried again: what was counted is old by then
_KEEP_TIME = 0.9  # of a step time, from one step of its shape to the next
_FIT_EVERY = 16  # steps
_TRY_EVERY = 4  # steps, between those that try a neighbour of the best K
_POWER = -8  # of the mean of times
_KEEP_UNUSED = 0.999  # of the weight of the other times of that batch size: 180 steps later they are tried again
_ENOUGH = 2.5  # weight of a time that counts as measured: three steps
_PROBE_EVERY = 256  # steps without drafts, after which some have drafts: acceptance may have changed
_PROBES = 2  # the first may come while somebody prefills, and say nothing
_WORTHWHILE = 1.01  # gain that a change of K must promise


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of n rows with K drafts: max(memory, overhead + compute n) + draft K."""

    memory: float
    overhead: float
    compute: float
    draft: float

    def __call__(self, rows: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        return np.maximum(self.memory, self.overhead + self.compute * rows) + self.draft * drafts

    @property
    def ridge(self) -> float:
        """Rows from which a step takes longer: 0 where every row adds to it, infinite where none is known to."""
        return max(0.0, self.memory - self.overhead) / self.compute if self.compute > 0 else float("inf")


def fit_step_time(rows: np.ndarray, drafts: np.ndarray, seconds: np.ndarray) -> StepTime:
    """The step time with the smallest relative errors on measured shapes: rows, drafts, seconds [n], n >= 1.

    Every place for the ridge between measured sizes is tried; coefficients below 0 are taken as 0. Times are positive,
    without drafts too.
    """
    sizes = np.unique(rows)
    fits = [_fit_with_ridge(rows, drafts, seconds, ridge) for ridge in (*sizes[::-1], 0)]
    errors = [np.sum((fit(rows, drafts) / seconds - 1) ** 2) for fit in fits]
    return fits[int(np.argmin(np.round(errors, 9)))]


def _fit_with_ridge(rows: np.ndarray, drafts: np.ndarray, seconds: np.ndarray, ridge: float) -> StepTime:
    flat = rows <= ridge
    columns = np.stack([flat, ~flat, ~flat * rows, drafts], axis=1).astype(float)
    if len(np.unique(rows[~flat])) < 2:
        columns[:, 1] = 0  # a single size beyond the ridge says nothing of an overhead
    if len(np.unique(drafts)) < 2:
        columns[:, 3] = 0
    scaled = columns / seconds[:, None]
    result = _non_negative_fit(scaled)
    if not result[:3].any():  # all of the time for drafts: a step without any would take none
        result[:3] = _non_negative_fit(scaled[:, :3])
        result[3] = 0
    return StepTime(*map(float, result))


def _non_negative_fit(columns: np.ndarray) -> np.ndarray:
    """Coefficients [n] with which columns [m, n], none negative, add up to about 1; what would be negative is left out.

    Not all are: the products of the columns with 1, which are positive, are sums of products with what is fitted.
    """
    used, result = np.any(columns != 0, axis=0), np.zeros(columns.shape[1])
    while True:
        result[:] = 0
        result[used] = np.linalg.lstsq(columns[:, used], np.ones(len(columns)), rcond=None)[0]
        if (result >= 0).all():
            return result
        used &= result >= 0


def acceptance_rates(reached: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """[K] rates, each given that all drafts before it were accepted.

    reached, accepted: [K] counts of windows in which draft i was to be decided, and was accepted. A position with few
    of them is taken to be like the one before it.
    """
    rates, rate = np.empty(len(reached)), _PRIOR_RATE
    for i, (tried, right) in enumerate(zip(reached, accepted, strict=True)):
        rate = (right + _PRIOR_WEIGHT * rate) / (tried + _PRIOR_WEIGHT)
        rates[i] = rate
    return rates


def expected_tokens(rates: np.ndarray) -> np.ndarray:
    """[1+K] mean tokens of a request's step with 0..K drafts."""
    return 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(rates))])


class AutoK:
    """Chooses K for each step and learns from what became of it. Host only; a step costs microseconds.

    choices: the values of K, ascending, from 0. slots: bucket sizes of the batch: a step computes a whole bucket.
    num_observed: steps that were measured so far.
    Raises ValueError for other choices.
    """

    def __init__(self, choices: Sequence[int], slots: Sequence[int]) -> None:
        if len(choices) < 2 or choices[0] != 0 or any(a >= b for a, b in itertools.pairwise(choices)):
            raise ValueError(f"choices is {list(choices)}; it must ascend from 0, at least two")
        self.choices, self.slots = tuple(choices), tuple(slots)
        self._windows = np.zeros((2, self.choices[-1]))  # reached, accepted
        self._times = np.zeros((2, len(self.slots), len(self.choices)))  # weight, weighted seconds ** _POWER
        self._rows = np.outer(self.slots, 1 + np.array(self.choices))
        self._drafts = np.broadcast_to(np.array(self.choices), self._rows.shape)
        self._fit: StepTime | None = None
        self.num_observed = self._unseen = 0  # unseen: steps measured since one with drafts
        # What follows depends on the calls of `choose` alone, which ranks make together.
        self._num_chosen = self._without = 0  # without: choices of 0 in a row
        self._current: int | None = None

    def observe(self, windows: Sequence[tuple[int, int]], num_running: int, num_drafts: int, seconds: float) -> None:
        """A step without prefill: (drafts, tokens emitted) of each request, its size, its K and how long it took.

        Raises ValueError for a time that is not positive.
        """
        if not seconds > 0:
            raise ValueError(f"seconds is {seconds}; it must be > 0")
        if num_drafts:
            self._windows *= _KEEP if self._unseen < _PROBE_EVERY // 2 else _KEEP_AT_PROBE
        for drafts, emitted in windows:
            self._windows[0, : min(drafts, emitted)] += 1
            self._windows[1, : emitted - 1] += 1
        cell = self.slots.index(bucket(self.slots, num_running)), self.choices.index(num_drafts)
        weight, total = self._times[:, *cell] * _KEEP_TIME
        self._times[:, cell[0]] *= _KEEP_UNUSED
        self._times[:, *cell] = weight + 1, total + seconds**_POWER
        self.num_observed += 1
        self._unseen = 0 if num_drafts else self._unseen + 1

    @property
    def statistics(self) -> np.ndarray:
        """What this rank has measured, as one vector of sums. Ranks add theirs up and give `choose` the total."""
        return np.concatenate([self._windows.ravel(), self._times.ravel()])

    def choose(self, num_running: int, statistics: np.ndarray | None = None) -> int:
        """K for a step of `num_running` requests (under data parallelism: the most of any rank)."""
        if num_running == 0:
            return 0
        self._num_chosen += 1
        chosen = self._chosen(num_running, self.statistics if statistics is None else statistics)
        self._without = 0 if chosen else self._without + 1
        if self._without > _PROBE_EVERY:
            chosen = self.choices[1]
            self._without %= _PROBE_EVERY + _PROBES
        return chosen

    def _chosen(self, num_running: int, statistics: np.ndarray) -> int:
        windows, times = self._split(statistics)
        if self._fit is None or self._num_chosen % _FIT_EVERY == 1:
            self._fit = self._fitted(times)
        row = self.slots.index(bucket(self.slots, num_running))
        throughput = self._throughput(row, windows, times)
        best = int(np.argmax(throughput))
        if self._current is None or throughput[best] > _WORTHWHILE * throughput[self._current]:
            self._current = best
        if self._num_chosen % _TRY_EVERY == 0:
            return self.choices[self._neighbour(times[0, row])]
        return self.choices[self._current]

    def _neighbour(self, weights: np.ndarray) -> int:
        """The next lower or higher choice if it was measured too little, else the current one."""
        assert self._current is not None
        for choice in (self._current - 1, self._current + 1):
            if 0 <= choice < len(weights) and weights[choice] < _ENOUGH:
                return choice
        return self._current

    def _split(self, statistics: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = self._windows.size
        return statistics[:size].reshape(self._windows.shape), statistics[size:].reshape(self._times.shape)

    def _fitted(self, times: np.ndarray) -> StepTime | None:
        seen = times[0] > 0
        if not seen.any():
            return None
        return fit_step_time(self._rows[seen], self._drafts[seen], _mean(*times[:, seen]))

    def _throughput(self, row: int, windows: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Tokens a second (up to a factor) of every choice: by its measured time, or where there is none the fit's."""
        tokens = expected_tokens(acceptance_rates(*windows))[list(self.choices)]
        if self._fit is None:
            return tokens
        seconds = self._fit(self._rows[row], self._drafts[row])
        measured = times[0, row] > 0
        seconds[measured] = _mean(*times[:, row, measured])
        return tokens / seconds


def _mean(weight: np.ndarray, total: np.ndarray) -> np.ndarray:
    return (total / weight) ** (1 / _POWER)
