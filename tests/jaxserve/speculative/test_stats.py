"""Counts, the log line and the counters of speculation."""

import logging
import math

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.outputs import RequestMetrics
from jaxserve.speculative.stats import (
    LOG_INTERVAL,
    SpecDecodingCollector,
    SpecDecodingLog,
    SpecDecodingLogger,
    SpecDecodingStats,
    metrics_text,
    register_metrics,
)

# (drafts of each request, tokens emitted) -> drafts, drafted, accepted, accepted by position
RECORDED = [
    ([3], [4], (1, 3, 3, [1, 1, 1])),
    ([3], [2], (1, 3, 1, [1, 0, 0])),
    ([2, 1], [3, 2], (2, 3, 3, [2, 1])),
    ([0], [1], (0, 0, 0, [0])),
    ([3, 3], [3, 2], (2, 6, 3, [2, 1, 0])),
]


def count(drafts, emitted, width=None):
    stats = SpecDecodingStats(width or max(1, *drafts))
    for window in zip(drafts, emitted, strict=True):
        stats.observe(*window)
    return stats


@pytest.mark.parametrize(("drafts", "emitted", "expected"), RECORDED)
def test_counts(drafts, emitted, expected):
    stats = count(drafts, emitted)
    actual = (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_accepted_tokens_per_pos)
    assert actual == expected


def test_mean_acceptance_length_counts_the_bonus():
    assert count([3, 3], [3, 2]).mean_acceptance_length == 2.5
    assert count([3, 3], [3, 2]).acceptance_rate == 0.5
    assert count([3, 3], [3, 2]).acceptance_rate_per_pos == [1.0, 0.5, 0.0]
    assert math.isnan(SpecDecodingStats(3).mean_acceptance_length)
    assert math.isnan(SpecDecodingStats(3).acceptance_rate)
    assert SpecDecodingStats(3).acceptance_rate_per_pos == [0.0, 0.0, 0.0]


def test_positions_that_had_a_draft():
    assert count([3, 1, 0], [1, 2, 1], width=4).num_draft_tokens_per_pos == [2, 1, 1, 0]


def test_adding_up():
    total = count([2], [3])
    total.add(count([3, 3], [3, 2]))
    assert total == count([2, 3, 3], [3, 3, 2], width=3)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ((4, 1), r"num_draft_tokens is 4; it must be in \[0, 3\]"),
        ((2, 4), r"num_emitted_tokens is 4; it must be in \[1, 3\]"),
        ((2, 0), r"num_emitted_tokens is 0; it must be in \[1, 3\]"),
    ],
)
def test_impossible_counts(window, message):
    with pytest.raises(ValueError, match=message):
        SpecDecodingStats(3).observe(*window)


def test_log_line():
    now = [10.0]
    log = SpecDecodingLog(3, clock=lambda: now[0])
    assert log.take_line() is None
    log.observe(count([3], [4]))
    log.observe(count([3], [2]))
    now[0] = 14.0
    assert log.take_line() == (
        "SpecDecoding metrics: Mean acceptance length: 3.00, Accepted throughput: 1.00 tokens/s, "
        "Drafted throughput: 1.50 tokens/s, Accepted: 4 tokens, Drafted: 6 tokens, "
        "Per-position acceptance rate: 1.000, 0.500, 0.500, Avg Draft acceptance rate: 66.7%"
    )
    assert log.take_line() is None


@pytest.mark.parametrize(("drafts", "emitted", "expected"), RECORDED)
def test_counts_of_a_request(drafts, emitted, expected):
    metrics = RequestMetrics(arrival_time=0.0)
    for window in zip(drafts, emitted, strict=True):
        metrics.add_window(*window)
    num_drafts, drafted, accepted, by_position = expected
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (
        num_drafts,
        drafted,
        accepted,
    )
    assert metrics.num_accepted_tokens_per_pos == by_position[: max(drafts)]


def test_counts_since():
    totals = count([3], [4])
    earlier = count([3], [4])
    totals.observe(2, 2)
    assert totals.since(earlier) == count([2], [2], width=3)
    assert totals == count([3, 2], [4, 2])


def test_the_line_comes_every_few_seconds(caplog):
    now, totals = [0.0], count([3], [2])
    logger = SpecDecodingLogger(totals, clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "jaxserve"):
        totals.observe(3, 4)
        now[0] = LOG_INTERVAL - 1
        logger.poll()
        assert not caplog.messages
        now[0] = LOG_INTERVAL
        logger.poll()
        logger.poll()
        assert len(caplog.messages) == 1
        assert "Accepted: 3 tokens, Drafted: 3 tokens" in caplog.text, "what came before the logger is not counted"
        totals.observe(3, 1)
        logger.poll(now=True)
        logger.poll(now=True)
        assert len(caplog.messages) == 2


@pytest.mark.parametrize("prefix", ["jaxserve:", "vllm:"])
def test_counters(prefix):
    totals = count([3, 3], [3, 2])
    collector = SpecDecodingCollector(totals, {"model_name": "m"}, prefix)

    def samples():
        families = text_string_to_metric_families(metrics_text(collector))
        return {(s.name, s.labels.get("position")): s.value for f in families for s in f.samples}

    name = prefix + "spec_decode_num_"
    assert samples() == {
        (name + "drafts_total", None): 2,
        (name + "draft_tokens_total", None): 6,
        (name + "accepted_tokens_total", None): 3,
        (name + "accepted_tokens_per_pos_total", "0"): 2,
        (name + "accepted_tokens_per_pos_total", "1"): 1,
        (name + "accepted_tokens_per_pos_total", "2"): 0,
    }
    assert 'model_name="m"' in metrics_text(collector)
    totals.observe(1, 2)
    assert samples()[name + "drafts_total", None] == 3


def test_registry():
    registry = CollectorRegistry()
    totals = count([3, 3], [3, 2])
    collector = register_metrics(totals, registry, {"model_name": "m"}, "vllm:")
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert registry.get_sample_value(name, {"model_name": "m", "position": "1"}) == 1
    with pytest.raises(ValueError, match="Duplicated"):
        register_metrics(totals, registry, prefix="vllm:")
    registry.unregister(collector)
    assert registry.get_sample_value(name, {"model_name": "m", "position": "1"}) is None


def test_unknown_prefix():
    with pytest.raises(ValueError, match="prefix is 'mine:'; it must be one of jaxserve:, vllm:"):
        SpecDecodingCollector(SpecDecodingStats(1), prefix="mine:")
