"""What one request asks of the sampler, checked when it is made."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.structured.params import StructuredOutputsParams

MAX_N = 16384
MAX_STOP_IDS = 64  # of a request, with the model's own
MAX_TEMPERATURE = 3.4e38  # the device holds it as float32
_INT32_MAX = 2**31 - 1
_REPETITION = (0.01, 100.0)  # both a factor and a divisor of logits: float32 has room for neither 0 nor infinity
_INT64 = (-(2**63), 2**63 - 1)
_RECOMMENDED = {  # fields of generation_config.json, and what they are called here
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


class RequestOutputKind(enum.Enum):
    """Which outputs a request produces while it runs."""

    CUMULATIVE = 0  # everything so far, every step
    DELTA = 1  # what is new, every step
    FINAL_ONLY = 2  # everything, once, at the end


@dataclass(frozen=True, kw_only=True)
class RepetitionDetection:
    """The output ends (finish_reason "stop", stop_reason "repetition_detected") when its last tokens are one pattern,
    of min_pattern_size to max_pattern_size tokens, min_count times in a row."""

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1

    def __post_init__(self) -> None:
        for name, low in (("max_pattern_size", 1), ("min_pattern_size", 1), ("min_count", 2)):
            _integer(f"repetition_detection.{name}", getattr(self, name), low, _INT32_MAX)
        if self.min_pattern_size > self.max_pattern_size:
            raise _error(
                "repetition_detection.min_pattern_size", self.min_pattern_size, f"at most {self.max_pattern_size}"
            )

    def found_in(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens end in such a repetition."""
        return any(
            len(token_ids) >= size * self.min_count
            and all(token_ids[-i] == token_ids[-i - size] for i in range(1, size * (self.min_count - 1) + 1))
            for size in range(self.min_pattern_size, self.max_pattern_size + 1)
        )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample, when to stop and what to return. Names and defaults are vLLM's.

    n: sequences to generate for the prompt; each has a seed of its own, derived from `seed`.
    temperature: 0 is greedy; any other value samples.
    top_p: keep the smallest set of most probable tokens with this probability; 1 is off.
    top_k: keep this many tokens; 0 and -1 are off.
    min_p: keep tokens at least this fraction as probable as the most probable one; 0 is off.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output; 1 is off.
    frequency_penalty: taken from a logit for every occurrence of its token in the output.
    presence_penalty: taken from the logits of all tokens in the output.
    logit_bias: token id -> number in [-100, 100] added to its logit.
    allowed_token_ids: nothing else is generated.
    bad_words: texts that are not generated: the last token of one is masked after the ones before it.
    thinking_token_budget: most tokens inside a thinking section; then its end marker is forced. -1 is None. Needs the
        engine's reasoning_config.
    seed: 64-bit; -1 is None; the same seed and logits give the same tokens, whatever else is in the batch.
    min_tokens: nothing that would end the output before it has this many tokens: no stop id, no stop string.
    max_tokens: most tokens to generate; None is up to the model's maximum length.
    stop: strings that end the output (a single str is accepted); not part of it unless include_stop_str_in_output.
    stop_token_ids: further token ids that end the output, besides the model's end of sequence.
    ignore_eos: go on after the model's end of sequence.
    detokenize: whether to produce text; without it stop strings are refused.
    skip_special_tokens, spaces_between_special_tokens: how special tokens appear in the text.
    repetition_detection: end the output when it repeats itself; a RepetitionDetection or a dict of its fields.
    logprobs: for every output token the log-probabilities of this many most probable tokens and of the token itself;
        0: of the token alone; -1: of the whole vocabulary; None: none. Limited by the engine's max_logprobs.
    prompt_logprobs: the same for the tokens of the prompt.
    logprob_token_ids: ids whose log-probabilities are returned with those of `logprobs`, or alone with the token's own.
    output_kind: see RequestOutputKind.
    extra_args: what logits processors of your own read; a key that none of them declares is refused.
    structured_outputs: the language that the output must belong to: a StructuredOutputsParams or a dict of its fields.

    Raises ValueError naming the field, the value and the range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    thinking_token_budget: int | None = None
    seed: int | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    repetition_detection: RepetitionDetection | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._set("n", _integer("n", self.n, 1, MAX_N))
        self._set("temperature", _real("temperature", self.temperature, 0.0, MAX_TEMPERATURE, "a finite number >= 0"))
        self._set("top_p", _real("top_p", self.top_p, 0.0, 1.0, "in (0, 1]"))
        if self.top_p == 0.0 and self.temperature > 0.0:
            raise _error("top_p", self.top_p, "in (0, 1] (0 only at temperature 0)")
        self._set("top_k", _integer("top_k", self.top_k, -1, _INT32_MAX))
        self._set("min_p", _real("min_p", self.min_p, 0.0, 1.0, "in [0, 1]"))
        penalty = (-2.0, 2.0, "in [-2, 2]")
        self._set("frequency_penalty", _real("frequency_penalty", self.frequency_penalty, *penalty))
        self._set("presence_penalty", _real("presence_penalty", self.presence_penalty, *penalty))
        repetition = _real("repetition_penalty", self.repetition_penalty, *_REPETITION, "in [0.01, 100]")
        self._set("repetition_penalty", repetition)
        self._set("logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise _error("allowed_token_ids", [], "None or a list of at least one token id")
        self._set("bad_words", _strings("bad_words", self.bad_words))
        if self.thinking_token_budget is not None:
            budget = _integer("thinking_token_budget", self.thinking_token_budget, -1, _INT32_MAX)
            self._set("thinking_token_budget", None if budget == -1 else budget)
        if self.seed is not None:
            seed = _integer("seed", self.seed, *_INT64)
            self._set("seed", None if seed == -1 else seed)
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, 1, None))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, _INT32_MAX))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _error("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or []))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _error(name, getattr(self, name), "True or False")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs detokenize=True: stop strings are searched in the text")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), -1, None))
        if self.logprob_token_ids is not None:
            self._set("logprob_token_ids", _token_ids("logprob_token_ids", self.logprob_token_ids))
        if isinstance(self.repetition_detection, Mapping):
            made = _from_dict("repetition_detection", RepetitionDetection, self.repetition_detection)
            self._set("repetition_detection", made)
        if not isinstance(self.repetition_detection, RepetitionDetection | None):
            raise _error("repetition_detection", self.repetition_detection, "a RepetitionDetection, a dict or None")
        if self.extra_args is not None and not _is_str_dict(self.extra_args):
            raise _error("extra_args", self.extra_args, "a dict with str keys, or None")
        if isinstance(self.structured_outputs, Mapping):
            made = _from_dict("structured_outputs", StructuredOutputsParams, self.structured_outputs)
            self._set("structured_outputs", made)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise _error("structured_outputs", self.structured_outputs, "a StructuredOutputsParams, a dict or None")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _error("output_kind", self.output_kind, "a RequestOutputKind")

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingParams:
        """What a model's generation_config.json recommends: temperature, top_p, top_k, min_p, repetition_penalty and
        max_new_tokens, as vLLM reads it. The rest is as it is in SamplingParams().

        Raises ValueError naming the field, the value and the range.
        """
        found = {ours: config[theirs] for theirs, ours in _RECOMMENDED.items() if config.get(theirs) is not None}
        return cls(**found)

    def verify(self, vocab_size: int, max_model_len: int, prompt_len: int, eos_token_ids: Sequence[int] = ()) -> None:
        """Checks what depends on the model and the prompt. Raises ValueError."""
        if prompt_len < 1:
            raise ValueError("the prompt is empty: it must have at least one token")
        if prompt_len >= max_model_len:
            raise ValueError(
                f"the prompt has {prompt_len} tokens; with max_model_len={max_model_len} it must have at most "
                f"{max_model_len - 1}, so that one token can be generated"
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise ValueError(f"{name} holds the token id {token}; token ids must be in [0, {vocab_size - 1}]")

        stops = {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        if len(stops) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids has, with the model's end of sequence, {len(stops)} ids; "
                f"it must have at most {MAX_STOP_IDS}"
            )
        if self.min_tokens and self.allowed_token_ids and stops.issuperset(self.allowed_token_ids):
            raise ValueError(
                f"min_tokens is {self.min_tokens}, but allowed_token_ids={self.allowed_token_ids!r} holds nothing but "
                "stop ids, of which none may come first: allow another id, or set min_tokens=0"
            )

    @property
    def wants_logprobs(self) -> bool:
        """Whether output tokens come with log-probabilities."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def penalizes(self) -> bool:
        """Whether any of the penalties is on."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

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


def _strings(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise _error(name, value, "a string or a list of strings, none of them empty")
    return list(strings)


def _token_ids(name: str, ids: Any) -> list[int]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise _error(name, ids, "a list of token ids")
    return [_integer(name, i, 0, None) for i in ids]


def _logit_bias(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise _error("logit_bias", bias, "a dict from token id to a number in [-100, 100], or None")
    return {_bias_id(i): _real("logit_bias", v, -100.0, 100.0, "in [-100, 100] for every id") for i, v in bias.items()}


def _bias_id(token: Any) -> int:
    """JSON has no integer keys."""
    return _integer("logit_bias", int(token) if isinstance(token, str) and token.isdecimal() else token, 0, None)


def _is_str_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _from_dict(name: str, kind: Any, fields: Mapping[str, Any]) -> Any:
    known = [f.name for f in dataclasses.fields(kind)]
    if unknown := sorted(set(fields) - set(known)):
        raise ValueError(f"{name} has the keys {unknown}; it must have only {', '.join(known)}")
    return kind(**fields)
