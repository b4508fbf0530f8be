"""What one request asks of the sampler, checked when it is made."""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_N = 16384
MAX_TEMPERATURE = 3.4e38  # the device holds it as float32
_INT32_MAX = 2**31 - 1
_INT64 = (-(2**63), 2**63 - 1)


class RequestOutputKind(enum.Enum):
    """Which outputs a request produces while it runs."""

    CUMULATIVE = 0  # everything so far, every step
    DELTA = 1  # what is new, every step
    FINAL_ONLY = 2  # everything, once, at the end


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample, when to stop and what to return. Names and defaults are vLLM's.

    n: sequences to generate for the prompt; each has a seed of its own, derived from `seed`.
    temperature: 0 is greedy; any other value samples.
    top_p: keep the smallest set of most probable tokens with this probability; 1 is off.
    top_k: keep this many tokens; 0 and -1 are off.
    min_p: keep tokens at least this fraction as probable as the most probable one; 0 is off.
    seed: 64-bit; the same seed and logits give the same tokens, whatever else is in the batch.
    max_tokens: most tokens to generate; None is up to the model's maximum length.
    stop: strings that end the output (a single str is accepted); not part of it unless include_stop_str_in_output.
    stop_token_ids: further token ids that end the output, besides the model's end of sequence.
    ignore_eos: go on after the model's end of sequence.
    detokenize: whether to produce text; without it stop strings are refused.
    skip_special_tokens, spaces_between_special_tokens: how special tokens appear in the text.
    logprobs: 0 returns the log-probability of every sampled token; None returns none.
    output_kind: see RequestOutputKind.

    Raises ValueError naming the field, the value and the range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._set("n", _integer("n", self.n, 1, MAX_N))
        self._set("temperature", _real("temperature", self.temperature, 0.0, MAX_TEMPERATURE, "a finite number >= 0"))
        self._set("top_p", _real("top_p", self.top_p, 0.0, 1.0, "in (0, 1]"))
        if self.top_p == 0.0 and self.temperature > 0.0:
            raise _error("top_p", self.top_p, "in (0, 1] (0 only at temperature 0)")
        self._set("top_k", _integer("top_k", self.top_k, -1, _INT32_MAX))
        self._set("min_p", _real("min_p", self.min_p, 0.0, 1.0, "in [0, 1]"))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, *_INT64))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, None))
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _error(name, getattr(self, name), "True or False")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs detokenize=True: stop strings are searched in the text")
        if self.logprobs is not None and (isinstance(self.logprobs, bool) or self.logprobs != 0):
            raise _error("logprobs", self.logprobs, "None or 0 (the log-probability of the sampled token)")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _error("output_kind", self.output_kind, "a RequestOutputKind")

    def verify(self, vocab_size: int, max_model_len: int, prompt_len: int) -> None:
        """Checks what depends on the model and the prompt. Raises ValueError."""
        if prompt_len < 1:
            raise ValueError("the prompt is empty: it must have at least one token")
        if prompt_len >= max_model_len:
            raise ValueError(
                f"the prompt has {prompt_len} tokens; with max_model_len={max_model_len} it must have at most "
                f"{max_model_len - 1}, so that one token can be generated"
            )
        for token in self.stop_token_ids:
            if token >= vocab_size:
                raise _error("stop_token_ids", self.stop_token_ids, f"token ids in [0, {vocab_size - 1}]")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def _error(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{name} is {value!r}; it must be {expected}")


def _integer(name: str, value: Any, low: int, high: int | None) -> int:
    expected = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    number = int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else None
    if number is None or number < low or (high is not None and number > high):
        raise _error(name, value, expected)
    return number


def _real(name: str, value: Any, low: float, high: float, expected: str) -> float:
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not low <= number <= high:  # NaN is in no range
        raise _error(name, value, expected)
    return number


def _stop_strings(stop: Any) -> list[str]:
    if stop is None:
        return []
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise _error("stop", stop, "a string or a list of strings, none of them empty")
    return list(strings)


def _stop_token_ids(ids: Any) -> list[int]:
    if ids is None:
        return []
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise _error("stop_token_ids", ids, "a list of token ids")
    return [_integer("stop_token_ids", i, 0, None) for i in ids]
