"""What speculation did: counts of a step, the line in the log, and Prometheus counters, under vLLM's names."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import REGISTRY, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily

PREFIXES = ("jaxserve:", "vllm:")
LOG_INTERVAL = 10.0  # seconds

_logger = logging.getLogger("jaxserve")


@dataclass
class SpecDecodingStats:
    """Counts since they were last cleared.

    num_drafts: windows that had a draft. num_accepted_tokens_per_pos[i]: how many of them had draft i accepted.
    """

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(init=False)
    num_draft_tokens_per_pos: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_accepted_tokens_per_pos = [0] * self.num_spec_tokens
        self.num_draft_tokens_per_pos = [0] * self.num_spec_tokens

    def observe(self, num_draft_tokens: int, num_emitted_tokens: int) -> None:
        """One request's window. The emitted tokens are its accepted drafts and one more.

        A request that ended inside its window emitted fewer than were right: what is cut off counts as not accepted.
        Raises ValueError for counts that no window has.
        """
        accepted = num_emitted_tokens - 1
        if not 0 <= num_draft_tokens <= self.num_spec_tokens:
            raise ValueError(f"num_draft_tokens is {num_draft_tokens}; it must be in [0, {self.num_spec_tokens}]")
        if not 0 <= accepted <= num_draft_tokens:
            raise ValueError(f"num_emitted_tokens is {num_emitted_tokens}; it must be in [1, {num_draft_tokens + 1}]")
        if num_draft_tokens == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += accepted
        for i in range(num_draft_tokens):
            self.num_draft_tokens_per_pos[i] += 1
            self.num_accepted_tokens_per_pos[i] += i < accepted

    def add(self, other: SpecDecodingStats) -> None:
        """Take in the counts of another rank, or of another interval."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        for ours, theirs in (
            (self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos),
            (self.num_draft_tokens_per_pos, other.num_draft_tokens_per_pos),
        ):
            ours.extend([0] * (len(theirs) - len(ours)))
            for i, count in enumerate(theirs):
                ours[i] += count
        self.num_spec_tokens = max(self.num_spec_tokens, other.num_spec_tokens)

    def since(self, earlier: SpecDecodingStats) -> SpecDecodingStats:
        """What was counted after `earlier`, a copy of these counts as they were then."""
        result = copy.deepcopy(self)
        result.num_drafts -= earlier.num_drafts
        result.num_draft_tokens -= earlier.num_draft_tokens
        result.num_accepted_tokens -= earlier.num_accepted_tokens
        for i, count in enumerate(earlier.num_accepted_tokens_per_pos):
            result.num_accepted_tokens_per_pos[i] -= count
            result.num_draft_tokens_per_pos[i] -= earlier.num_draft_tokens_per_pos[i]
        return result

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step of a request that had drafts: 1 + accepted / drafts; NaN before the first."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """Accepted of all drafted; NaN before the first."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else float("nan")

    @property
    def acceptance_rate_per_pos(self) -> list[float]:
        """The share of windows in which draft i was accepted (with all drafts before it)."""
        return [count / self.num_drafts if self.num_drafts else 0.0 for count in self.num_accepted_tokens_per_pos]


class SpecDecodingLog:
    """The log line of an interval, in the format of vLLM's. clock: seconds, monotonic."""

    def __init__(self, num_spec_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_spec_tokens, self._clock = num_spec_tokens, clock
        self._reset()

    def _reset(self) -> None:
        self._stats, self._since = SpecDecodingStats(self._num_spec_tokens), self._clock()

    def observe(self, step: SpecDecodingStats) -> None:
        """Take in the counts of a step."""
        self._stats.add(step)

    def take_line(self) -> str | None:
        """The line about everything since the last one; None when nothing was drafted."""
        stats, seconds = self._stats, self._clock() - self._since
        self._reset()
        if not stats.num_drafts:
            return None
        per_second = 1 / seconds if seconds > 0 else 0.0
        rates = ", ".join(f"{rate:.3f}" for rate in stats.acceptance_rate_per_pos)
        return (
            "SpecDecoding metrics: "
            f"Mean acceptance length: {stats.mean_acceptance_length:.2f}, "
            f"Accepted throughput: {stats.num_accepted_tokens * per_second:.2f} tokens/s, "
            f"Drafted throughput: {stats.num_draft_tokens * per_second:.2f} tokens/s, "
            f"Accepted: {stats.num_accepted_tokens} tokens, "
            f"Drafted: {stats.num_draft_tokens} tokens, "
            f"Per-position acceptance rate: {rates}, "
            f"Avg Draft acceptance rate: {stats.acceptance_rate * 100:.1f}%"
        )


class SpecDecodingLogger:
    """Writes that line to the logger "jaxserve" every LOG_INTERVAL seconds in which something was drafted.

    stats: the totals, which the engine goes on adding to. clock: seconds, monotonic.
    """

    def __init__(self, stats: SpecDecodingStats, clock: Callable[[], float] = time.monotonic) -> None:
        self._stats, self._clock, self._last = stats, clock, clock()
        self._seen = copy.deepcopy(stats)
        self._log = SpecDecodingLog(stats.num_spec_tokens, clock)

    def poll(self, now: bool = False) -> None:
        """To be called after every step; now: whatever the time is."""
        if not now and self._clock() - self._last < LOG_INTERVAL:
            return
        self._log.observe(self._stats.since(self._seen))
        self._seen, self._last = copy.deepcopy(self._stats), self._clock()
        if line := self._log.take_line():
            _logger.info(line)


class SpecDecodingCollector:
    """Counters of `stats` as prometheus_client collects them: register it, or ask for `metrics_text`.

    stats: the totals, which the engine goes on adding to. prefix: "jaxserve:", or "vllm:" for existing dashboards.
    labels: names and values on every sample, such as model_name. Raises ValueError for another prefix.
    """

    def __init__(
        self, stats: SpecDecodingStats, labels: Mapping[str, str] | None = None, prefix: str = PREFIXES[0]
    ) -> None:
        if prefix not in PREFIXES:
            raise ValueError(f"prefix is {prefix!r}; it must be one of {', '.join(PREFIXES)}")
        self._stats, self._labels, self._prefix = stats, dict(labels or {}), f"{prefix}spec_decode_num_"

    def collect(self) -> Sequence[Metric]:
        stats = self._stats
        totals = [
            self._counter("drafts", "Number of spec decoding drafts.", stats.num_drafts),
            self._counter("draft_tokens", "Number of draft tokens.", stats.num_draft_tokens),
            self._counter("accepted_tokens", "Number of accepted tokens.", stats.num_accepted_tokens),
        ]
        by_position = CounterMetricFamily(
            f"{self._prefix}accepted_tokens_per_pos", "Accepted tokens per draft position.",
            labels=[*self._labels, "position"],
        )  # fmt: skip
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            by_position.add_metric([*self._labels.values(), str(position)], count)
        return [*totals, by_position]

    def describe(self) -> Sequence[Metric]:
        """By which a registry knows that it has these counters already."""
        return self.collect()

    def _counter(self, name: str, help_text: str, value: int) -> CounterMetricFamily:
        family = CounterMetricFamily(self._prefix + name, help_text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


def register_metrics(
    stats: SpecDecodingStats,
    registry: CollectorRegistry | None = None,
    labels: Mapping[str, str] | None = None,
    prefix: str = PREFIXES[0],
) -> SpecDecodingCollector:
    """Have a registry (None: prometheus_client's own) show the counters from now on; `registry.unregister` ends it.

    Raises ValueError for another prefix, or when the registry has counters of these names already.
    """
    collector = SpecDecodingCollector(stats, labels, prefix)
    (REGISTRY if registry is None else registry).register(collector)  # type: ignore[arg-type]
    return collector


def metrics_text(collector: SpecDecodingCollector) -> str:
    """The counters in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)  # type: ignore[arg-type]  # a collector by its method, without the base class
    return generate_latest(registry).decode()
