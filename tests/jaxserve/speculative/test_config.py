"""speculative_config: what is accepted, what is refused and in which words, and how many drafts a batch gets."""

import json
from pathlib import Path

import pytest

from jaxserve.speculative.config import (
    AUTO_DRAFTS,
    SpeculativeConfig,
    conditional_rates,
    k_for_batch,
    rates_from_length,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "sampling_cases.json").read_text(encoding="utf-8"))
SCHEDULE = [(1, 16, 3), (32, 128, 2), (256, 2048, 0)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SYNTHETIC = NGRAM | {"rejection_sample_method": "synthetic"}


def config(**options):
    return SpeculativeConfig.from_dict(options)


@pytest.mark.parametrize(("running", "drafts"), [(int(n), k) for n, k in GOLDEN["dynsd"].items()])
def test_drafts_by_batch_size(running, drafts):
    assert k_for_batch(SCHEDULE, 3, running) == drafts
    assert config(**NGRAM, num_speculative_tokens_per_batch_size=SCHEDULE).drafts_for(running) == drafts


def test_drafts_outside_the_table():
    assert k_for_batch([(4, 8, 1)], 3, 3) == 3
    assert k_for_batch([(4, 8, 1)], 3, 9) == 1
    assert k_for_batch([], 3, 1) == 3


def test_disable_by_batch_size():
    limited = config(**NGRAM, disable_by_batch_size=4)
    assert [limited.drafts_for(n) for n in (0, 1, 4, 5)] == [0, 3, 3, 0]
    assert limited.draft_counts == (0, 3)


@pytest.mark.parametrize(("length", "count", "rates"), GOLDEN["synthetic"])
def test_rates_of_a_mean_length(length, count, rates):
    assert list(rates_from_length(length, count)) == rates
    assert 1 + sum(rates_from_length(length, count)) == pytest.approx(length)


@pytest.mark.parametrize(("rates", "conditional"), GOLDEN["u2c"])
def test_conditional_rates(rates, conditional):
    assert list(conditional_rates(rates)) == conditional


def test_synthetic_rates_of_a_config():
    by_rates = config(**SYNTHETIC, synthetic_acceptance_rates=[0.9, 0.6, 0.3])
    assert by_rates.conditional_acceptance_rates == pytest.approx((0.9, 2 / 3, 0.5))
    assert config(**SYNTHETIC, synthetic_acceptance_length=2.5).conditional_acceptance_rates == (1.0, 0.5, 0.0)
    assert config(**NGRAM).conditional_acceptance_rates is None


def test_defaults():
    assert config(model="path", num_speculative_tokens=2).method == "draft_model"
    ngram = config(**NGRAM)
    assert (ngram.prompt_lookup_min, ngram.prompt_lookup_max, ngram.rejection_sample_method) == (5, 5, "coupled")
    assert config(**NGRAM, prompt_lookup_max=4).prompt_lookup_min == 4
    assert config(**NGRAM, prompt_lookup_min=2).prompt_lookup_max == 2
    assert config(method="suffix").max_drafts == 24
    drawn = config(method="eagle", model="m", num_speculative_tokens=2, draft_sample_method="probabilistic")
    assert drawn.rejection_sample_method == "standard"


def test_automatic_draft_counts():
    auto = config(method="ngram", num_speculative_tokens="auto")
    assert auto.max_drafts == AUTO_DRAFTS
    assert auto.draft_counts[0] == 0
    assert auto.draft_counts[-1] == AUTO_DRAFTS
    assert config(**NGRAM, num_speculative_tokens_per_batch_size=SCHEDULE).draft_counts == (0, 2, 3)


def test_a_configuration_is_hashable():
    one, two = (config(**NGRAM, num_speculative_tokens_per_batch_size=SCHEDULE) for _ in range(2))
    assert hash(one) == hash(two)
    assert one == two


@pytest.mark.parametrize("size", [None, 1, 8])
def test_draft_tensor_parallel_size(size):
    draft = config(method="eagle", model="m", num_speculative_tokens=1, draft_tensor_parallel_size=size)
    draft.check_tensor_parallel(8)
    if size == 8:
        with pytest.raises(ValueError, match="draft_tensor_parallel_size is 8; it must be 1 or the target's, 4"):
            draft.check_tensor_parallel(4)


REFUSED = {
    "num_specs": ({"num_specs": 3}, r"unknown keys \['num_specs'\]; known: method"),
    "no method": ({}, "method is None; it must be one of ngram"),
    "method": ({"method": "lookahead"}, "method is 'lookahead'; it must be one of"),
    "no K": ({"method": "ngram"}, r"num_speculative_tokens is None; it must be an integer in \[1, 128\] or 'auto'"),
    "K = 0": ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
    "K = 129": ({"method": "ngram", "num_speculative_tokens": 129}, r"num_speculative_tokens is 129.*\[1, 128\]"),
    "K = True": ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens is True"),
    "n-gram with a model": (NGRAM | {"model": "m"}, "model is 'm'; it is for method draft_model or eagle"),
    "eagle without a model": ({"method": "eagle", "num_speculative_tokens": 2}, "model is None; method eagle needs"),
    "custom without a class": ({"method": "custom", "num_speculative_tokens": 2}, "proposer is None"),
    "proposer": (NGRAM | {"proposer": "x:Y"}, "proposer is 'x:Y'; it is for method custom"),
    "lookup order": (
        NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
        "prompt_lookup_min is 4.*prompt_lookup_max = 3",
    ),
    "lookup range": (NGRAM | {"prompt_lookup_min": 0}, r"prompt_lookup_min is 0; it must be an integer in \[1, 64\]"),
    "lookup method": ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max is 3; it is for method ngram"),
    "suffix option": (
        NGRAM | {"suffix_decoding_max_tree_depth": 9},
        "suffix_decoding_max_tree_depth is 9; it is for method suffix",
    ),
    "suffix range": (
        {"method": "suffix", "suffix_decoding_min_token_prob": 2.0},
        r"suffix_decoding_min_token_prob is 2.0.*\[0, 1\]",
    ),
    "drawn n-grams": (
        NGRAM | {"draft_sample_method": "probabilistic"},
        "draft_sample_method is 'probabilistic'.*method ngram",
    ),
    "rejection": (
        NGRAM | {"rejection_sample_method": "strict"},
        "rejection_sample_method is 'strict'; it must be one of",
    ),
    "rates alone": (
        NGRAM | {"synthetic_acceptance_rates": [1, 1, 1]},
        r"synthetic_acceptance_rates is \[1, 1, 1\]; .*'synthetic'",
    ),
    "neither": (SYNTHETIC, "needs exactly one of them"),
    "both": (
        SYNTHETIC | {"synthetic_acceptance_rates": [1, 1, 1], "synthetic_acceptance_length": 2},
        "needs exactly one of them",
    ),
    "rates length": (
        SYNTHETIC | {"synthetic_acceptance_rates": [0.5]},
        r"\[0.5\]; it must be a list of num_speculative_tokens = 3",
    ),
    "rates range": (
        SYNTHETIC | {"synthetic_acceptance_rates": [1.2, 1, 0]},
        r"synthetic_acceptance_rates is 1.2.*\[0, 1\]",
    ),
    "rates rise": (SYNTHETIC | {"synthetic_acceptance_rates": [0.3, 0.6, 0.1]}, "rates must not increase"),
    "length": (SYNTHETIC | {"synthetic_acceptance_length": 4.5}, r"synthetic_acceptance_length is 4.5.*\[1, 4\]"),
    "NaN": (SYNTHETIC | {"synthetic_acceptance_length": float("nan")}, "synthetic_acceptance_length is nan"),
    "overlap": (
        NGRAM | {"num_speculative_tokens_per_batch_size": [(1, 8, 3), (8, 9, 1)]},
        "sorted and must not overlap",
    ),
    "unsorted": (
        NGRAM | {"num_speculative_tokens_per_batch_size": [(9, 12, 3), (1, 4, 1)]},
        "sorted and must not overlap",
    ),
    "range": (
        NGRAM | {"num_speculative_tokens_per_batch_size": [(5, 4, 3)]},
        r"range \(5, 4\); it must be 1 <= lo <= hi",
    ),
    "table K": (NGRAM | {"num_speculative_tokens_per_batch_size": [(1, 4, 4)]}, r"K = 4; it must be in \[0, .* = 3\]"),
    "table": (NGRAM | {"num_speculative_tokens_per_batch_size": [(1, 4)]}, "must be a list of"),
    "auto table": (
        {"method": "ngram", "num_speculative_tokens": "auto", "num_speculative_tokens_per_batch_size": [(1, 4, 1)]},
        "with num_speculative_tokens 'auto' it must be None",
    ),
    "disable": (NGRAM | {"disable_by_batch_size": 0}, "disable_by_batch_size is 0; it must be an integer >= 1"),
    "draft tp": (NGRAM | {"draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size is 1; it is for method"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_dict(options)
