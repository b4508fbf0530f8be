"""What users ask of speculation: `speculative_config`, checked, and how many drafts a batch of a given size gets."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_DRAFTS = 128  # K, at most
AUTO_DRAFTS = 7  # K of "auto", at most: a window of eight rows
METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp", "custom")
REJECTION_METHODS = ("coupled", "standard", "block", "synthetic")
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")

_LOOKUP_ONLY = ("ngram", "suffix")  # methods without a distribution or weights
_NEEDS_MODEL = ("draft_model", "eagle", "eagle3", "medusa")
_TAKES_MODEL = (*_NEEDS_MODEL, "mtp")  # mtp without a model: the target's own checkpoint holds the module
_DEFAULT_LOOKUP = 5
_MAX_LOOKUP = 64

Schedule = tuple[tuple[int, int, int], ...]  # (fewest running requests, most, K), ascending


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding as the user asks for it; names are vLLM's. Raises ValueError with field, value and range.

    method: the proposer; None is "draft_model" where `model` is given.
    num_speculative_tokens: K, drafts a step, 1 to 128; "auto" chooses among 0 to 7 from measured acceptance and step
        time. Required but for suffix, where it defaults to the tree's depth.
    model: path of the draft model or the heads. For mtp None means the target's own checkpoint.
    proposer: for method "custom": a class, "package.module:Name", or the name of an entry point in the group
        "jaxserve.proposers".
    prompt_lookup_min, prompt_lookup_max: shortest and longest suffix that n-gram looks for, 1 to 64. One alone stands
        for both; neither: 5.
    draft_tensor_parallel_size: 1 (replicated) or the target's; None is the target's.
    draft_sample_method: "greedy" drafts are the argmax; "probabilistic" ones are drawn from the draft's distribution.
    rejection_sample_method: None is "standard" for probabilistic drafts, else "coupled".
    synthetic_acceptance_rates: for "synthetic": K unconditional rates (the share of steps in which the i-th draft is
        accepted), not increasing, each in [0, 1].
    synthetic_acceptance_length: instead of rates, the mean tokens a step, 1 to K + 1.
    num_speculative_tokens_per_batch_size: ((lo, hi, K), ...), K for lo..hi running requests (`k_for_batch`).
    disable_by_batch_size: no drafts while more requests than this run.
    suffix_decoding_max_tree_depth: longest match plus continuation. suffix_decoding_max_cached_requests: finished
        outputs kept, 0 for none. suffix_decoding_max_spec_factor: drafts per token of the match.
        suffix_decoding_min_token_prob: a draft less probable than this, given the match, ends the drafts.
    """

    method: str | None = None
    num_speculative_tokens: int | str | None = None
    model: str | None = None
    proposer: Any = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    draft_tensor_parallel_size: int | None = None
    draft_sample_method: str = "greedy"
    rejection_sample_method: str | None = None
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    num_speculative_tokens_per_batch_size: Schedule | None = None
    disable_by_batch_size: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> SpeculativeConfig:
        """The configuration of a dict. Raises ValueError, also for a key that is not a field."""
        known = [f.name for f in dataclasses.fields(cls)]
        if unknown := [key for key in options if key not in known]:
            raise ValueError(
                f"speculative_config has unknown keys {sorted(map(str, unknown))}; known: {', '.join(known)}"
            )
        return cls(**options)

    def __post_init__(self) -> None:
        if self.method is None and self.model is not None:
            self._set("method", "draft_model")
        _one_of("method", self.method, METHODS)
        if self.method == "suffix" and self.num_speculative_tokens is None:
            self._set("num_speculative_tokens", min(self.suffix_decoding_max_tree_depth, MAX_DRAFTS))
        if self.num_speculative_tokens != "auto":
            _integer("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS, or_else="or 'auto'")
        self._check_source()
        self._check_lookup()
        self._check_suffix()
        self._check_sampling()
        self._check_synthetic()
        self._check_batch_sizes()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _only_for(self, name: str, *methods: str) -> None:
        if getattr(self, name) is not None and self.method not in methods:
            raise ValueError(f"{name} is {getattr(self, name)!r}; it is for method {' or '.join(methods)} only")

    def _check_source(self) -> None:
        self._only_for("model", *_TAKES_MODEL)
        self._only_for("proposer", "custom")
        if self.method in _NEEDS_MODEL and not self.model:
            raise ValueError(f"model is {self.model!r}; method {self.method} needs the path of its weights")
        if self.method == "custom" and not self.proposer:
            raise ValueError(f"proposer is {self.proposer!r}; method custom needs a class or its name")
        self._only_for("draft_tensor_parallel_size", *_TAKES_MODEL, "custom")
        if self.draft_tensor_parallel_size is not None:
            _integer("draft_tensor_parallel_size", self.draft_tensor_parallel_size, 1)

    def _check_lookup(self) -> None:
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            self._only_for(name, "ngram")
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 1, _MAX_LOOKUP)
        if self.method != "ngram":
            return
        default = _DEFAULT_LOOKUP if low is None and high is None else None
        self._set("prompt_lookup_min", next(x for x in (low, high, default) if x is not None))
        self._set("prompt_lookup_max", next(x for x in (high, low, default) if x is not None))
        if self.prompt_lookup_min > self.prompt_lookup_max:  # type: ignore[operator]
            raise ValueError(f"prompt_lookup_min is {low}; it must be at most prompt_lookup_max = {high}")

    def _check_suffix(self) -> None:
        for field in dataclasses.fields(self):
            if field.name.startswith("suffix_") and getattr(self, field.name) != field.default:
                self._only_for(field.name, "suffix")
        _integer("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 2)
        _integer("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0)
        _number("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, 0, math.inf)
        _number("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 0, 1)

    def _check_sampling(self) -> None:
        _one_of("draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS)
        if self.rejection_sample_method is None:
            self._set("rejection_sample_method", "standard" if self.probabilistic else "coupled")
        _one_of("rejection_sample_method", self.rejection_sample_method, REJECTION_METHODS)
        if self.probabilistic and self.method in _LOOKUP_ONLY:
            raise ValueError(
                f"draft_sample_method is 'probabilistic'; it must be 'greedy' for method {self.method}, "
                "which has no distribution to draw from"
            )

    def _check_synthetic(self) -> None:
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if self.rejection_sample_method != "synthetic":
            for name in ("synthetic_acceptance_rates", "synthetic_acceptance_length"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r}; it is for rejection_sample_method 'synthetic', "
                        f"not {self.rejection_sample_method!r}"
                    )
            return
        if (rates is None) == (length is None):
            raise ValueError(
                f"synthetic_acceptance_rates is {rates!r} and synthetic_acceptance_length is {length!r}; "
                "rejection_sample_method 'synthetic' needs exactly one of them"
            )
        if self.num_speculative_tokens == "auto":
            raise ValueError(
                "num_speculative_tokens is 'auto'; with rejection_sample_method 'synthetic' it must be a number"
            )
        if rates is None:
            _number("synthetic_acceptance_length", length, 1, self.max_drafts + 1)
        else:
            self._set("synthetic_acceptance_rates", _checked_rates(rates, self.max_drafts))

    def _check_batch_sizes(self) -> None:
        if self.num_speculative_tokens_per_batch_size is not None:
            schedule = _checked_schedule(self.num_speculative_tokens_per_batch_size, self.max_drafts)
            self._set("num_speculative_tokens_per_batch_size", schedule)
            if self.num_speculative_tokens == "auto":
                raise ValueError(
                    f"num_speculative_tokens_per_batch_size is {schedule}; "
                    "with num_speculative_tokens 'auto' it must be None"
                )
        if self.disable_by_batch_size is not None:
            _integer("disable_by_batch_size", self.disable_by_batch_size, 1)

    # ---- what follows from it

    @property
    def probabilistic(self) -> bool:
        """Whether drafts are drawn from a distribution that verification has to know."""
        return self.draft_sample_method == "probabilistic"

    @property
    def max_drafts(self) -> int:
        """K that the batch is laid out for."""
        k = self.num_speculative_tokens
        return k if isinstance(k, int) else AUTO_DRAFTS

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """Every K that can be asked for, ascending: what warm-up compiles."""
        if self.num_speculative_tokens == "auto":
            return tuple(sorted({0, 1, 2, 3, 5, AUTO_DRAFTS}))
        counts = {self.max_drafts, *(k for _, _, k in self.num_speculative_tokens_per_batch_size or ())}
        if self.disable_by_batch_size is not None:
            counts.add(0)
        return tuple(sorted(counts))

    @property
    def conditional_acceptance_rates(self) -> tuple[float, ...] | None:
        """For synthetic verification: the rate of each position [K] given that all before it were accepted."""
        if self.rejection_sample_method != "synthetic":
            return None
        rates = self.synthetic_acceptance_rates
        if rates is None:
            assert self.synthetic_acceptance_length is not None
            rates = rates_from_length(self.synthetic_acceptance_length, self.max_drafts)
        return conditional_rates(rates)

    def drafts_for(self, num_running: int) -> int:
        """K for a step of `num_running` requests, by the table and the limit; "auto" is decided in `auto.AutoK`."""
        if self.disable_by_batch_size is not None and num_running > self.disable_by_batch_size:
            return 0
        return k_for_batch(self.num_speculative_tokens_per_batch_size or (), self.max_drafts, num_running)

    def check_tensor_parallel(self, tensor_parallel_size: int) -> None:
        """Raises ValueError when the draft's own tensor parallelism does not fit the target's."""
        size = self.draft_tensor_parallel_size
        if size not in (None, 1, tensor_parallel_size):
            raise ValueError(
                f"draft_tensor_parallel_size is {size}; it must be 1 or the target's, {tensor_parallel_size}"
            )


def k_for_batch(schedule: Sequence[tuple[int, int, int]], default: int, num_running: int) -> int:
    """K of the range that `num_running` is in.

    In a gap between ranges the one before goes on; below the first range `default` holds, above the last one the last.
    Nobody running: 0.
    """
    if num_running == 0:
        return 0
    k = default
    for low, _, drafts in schedule:
        if num_running >= low:
            k = drafts
    return k


def rates_from_length(mean_length: float, num_drafts: int) -> tuple[float, ...]:
    """Unconditional acceptance rates [K] that make steps of `mean_length` tokens, whole positions first."""
    return tuple(min(max(mean_length - 1 - i, 0.0), 1.0) for i in range(num_drafts))


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """The rate of each position given that all before it were accepted; 0 where that never happens."""
    before = (1.0, *rates)
    return tuple(rate / last if last > 0 else 0.0 for rate, last in zip(rates, before, strict=False))


def _checked_rates(rates: Any, count: int) -> tuple[float, ...]:
    name = "synthetic_acceptance_rates"
    if isinstance(rates, str) or not isinstance(rates, Sequence) or len(rates) != count:
        raise ValueError(f"{name} is {rates!r}; it must be a list of num_speculative_tokens = {count} numbers")
    for rate in rates:
        _number(name, rate, 0, 1)
    if any(later > earlier for earlier, later in itertools.pairwise(rates)):
        raise ValueError(f"{name} is {rates!r}; rates must not increase: a draft counts only after all before it")
    return tuple(float(rate) for rate in rates)


def _checked_schedule(schedule: Any, most: int) -> Schedule:
    name = "num_speculative_tokens_per_batch_size"
    entries = _triples(name, schedule)
    previous = 0
    for low, high, drafts in entries:
        if not 1 <= low <= high:
            raise ValueError(f"{name} has the range ({low}, {high}); it must be 1 <= lo <= hi")
        if low <= previous:
            raise ValueError(f"{name} is {list(entries)}; ranges must be sorted and must not overlap")
        if not 0 <= drafts <= most:
            raise ValueError(f"{name} has K = {drafts}; it must be in [0, num_speculative_tokens = {most}]")
        previous = high
    return entries


def _triples(name: str, schedule: Any) -> Schedule:
    try:
        entries = tuple((low, high, k) for low, high, k in schedule)
    except (TypeError, ValueError):
        entries = ()
    if not entries or not all(type(x) is int for entry in entries for x in entry):
        raise ValueError(f"{name} is {schedule!r}; it must be a list of (lo, hi, K) of integers, at least one")
    return entries


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def _integer(name: str, value: Any, low: int, high: int | None = None, or_else: str = "") -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        valid = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
        raise ValueError(f"{name} is {value!r}; it must be {valid} {or_else}".rstrip())


def _number(name: str, value: Any, low: float, high: float) -> None:
    valid = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not valid or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a number in [{low}, {high}]")
