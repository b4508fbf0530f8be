"""What a request returns."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

_INFINITY_JSON = 9999.0  # JSON has no infinity; OpenAI-compatible servers send -9999 for a log-probability of -inf


@dataclass(slots=True)
class Logprob:
    """Of one token, in the engine's logprobs_mode. rank: 1 + number of tokens strictly more probable."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestMetrics:
    """Of all n sequences of a request: wall-clock times (time.time()), None until it happened, and counts.

    num_drafts: verified windows that had a draft. num_draft_tokens, num_accepted_tokens: the drafts in them, and those
    that were right. num_accepted_tokens_per_pos[i]: windows in which the i-th draft was. All 0 without speculation.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def add_window(self, num_draft_tokens: int, num_emitted_tokens: int) -> None:
        """A verified window: the tokens it gave are its accepted drafts and one more."""
        if not num_draft_tokens or not num_emitted_tokens:
            return
        accepted = num_emitted_tokens - 1
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += accepted
        counts = self.num_accepted_tokens_per_pos
        counts += [0] * (num_draft_tokens - len(counts))
        for i in range(accepted):
            counts[i] += 1


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence, or under DELTA what is new of it.

    text, token_ids, logprobs: the token that ended the sequence is part of token_ids, but not of text.
    cumulative_logprob: sum over the whole sequence so far (also under DELTA); None without logprobs.
    logprobs: for every token id in token_ids a dict from token id to its Logprob, the token itself first; None without
        logprobs.
    finish_reason: "stop", "length", "abort", "error"; None while running.
    stop_reason: the stop string or the id of stop_token_ids that ended it; None for end of sequence and other ends.
    error: why it failed, with finish_reason "error".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request: all of its n sequences in order of index, or under DELTA those that changed.

    prompt: the text, None when the request came as token ids.
    finished: whether all n sequences are. No further output follows.
    num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    prompt_logprobs: for every prompt token a dict as in CompletionOutput.logprobs, None for the first; None where they
        were not asked for, or are not known yet.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None

    def to_json(self) -> str:
        """All of it as strict JSON. Log-probabilities of -inf become -9999, those of tokens are keyed by id."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else math.copysign(_INFINITY_JSON, value)
