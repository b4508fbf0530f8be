"""One generation request as the host sees it: its tokens, where it stands, and when it ends."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.prompt_scores import PromptScores
    from jaxserve.sampling_params import SamplingParams
    from jaxserve.structured.constraint import Constraint


class RequestStatus(enum.Enum):
    """Life of a request. `finish_reason` is what the API reports: None until the request is finished."""

    WAITING = ("waiting", None)
    WAITING_FOR_GRAMMAR = ("waiting_for_grammar", None)
    RUNNING = ("running", None)
    PREEMPTED = ("preempted", None)
    FINISHED_STOPPED = ("finished_stopped", "stop")
    FINISHED_LENGTH = ("finished_length", "length")
    FINISHED_ABORTED = ("finished_aborted", "abort")
    FINISHED_ERROR = ("finished_error", "error")

    def __init__(self, label: str, finish_reason: str | None) -> None:
        self.label = label
        self.finish_reason = finish_reason
        self.is_finished = finish_reason is not None


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A prompt, its parameters and everything known about its progress.

    Invariant while RUNNING: positions [0, num_computed_tokens) hold KV written by dispatched programs, and
    num_computed_tokens <= num_tokens - 1 (positions whose KV is cached count from when they are scored, where the
    prompt's own log-probabilities are wanted). Equality means the prefill is complete: the last known token is the
    first input row of the next forward program.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0  # lower is served first
    arrival_time: float = field(default_factory=time.time)
    cache_salt: str | None = None
    seed: int = 0
    processor_rows: tuple[Any, ...] = ()  # its parameters for each logits processor, None where it does not use one
    scores: PromptScores | None = None  # where the log-probabilities of the prompt are wanted
    constraint: Constraint | None = None  # where the output is held to a grammar

    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(init=False, default_factory=list)
    token_ids: list[int] = field(init=False)  # prompt and output
    max_total_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prefix found in the cache when first admitted
    num_stored_tokens: int = 0  # prefix found in the cache when last admitted
    num_in_flight: int = 0  # upper bound of the tokens being sampled by steps not collected yet
    num_preemptions: int = 0
    slot: int | None = None  # owned by the runner
    stop_reason: int | str | None = None
    error: str | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    order: tuple[float, ...] = ()  # owned by the scheduler: its place in every queue
    block_hashes: list[bytes] = field(init=False, default_factory=list)  # owned by the KV cache manager
    is_shaped: bool = field(init=False)  # whether it uses anything that comes before temperature, or a processor
    stop_ids: frozenset[int] = field(init=False)  # what ends it: end of sequence and its own

    def __post_init__(self) -> None:
        params = self.sampling_params
        self.token_ids = list(self.prompt_token_ids)
        self.max_total_tokens = self.max_model_len
        if params.max_tokens is not None:
            self.max_total_tokens = min(self.max_model_len, len(self.token_ids) + params.max_tokens)
        if params.ignore_eos:
            self.eos_token_ids = frozenset()
        uses = any(row is not None for row in self.processor_rows)
        self.is_shaped = uses or params.penalizes or params.thinking_token_budget is not None
        self.stop_ids = self.eos_token_ids | frozenset(params.stop_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens the host knows: the prompt and the collected output."""
        return len(self.token_ids)

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens other than the last one still lack KV."""
        return self.num_computed_tokens < len(self.token_ids) - 1

    @property
    def awaits_grammar(self) -> bool:
        """Whether it cannot decode yet, because its grammar is still being compiled."""
        return self.constraint is not None and not self.constraint.is_ready

    def append_token(self, token: int) -> None:
        self.output_token_ids.append(token)
        self.token_ids.append(token)

    def check_stop(self, token: int) -> RequestStatus | None:
        """The status the request ends with, given that `token` was just appended; None if it goes on.

        Sets `stop_reason` to the token when it is one of the request's own stop_token_ids (None for EOS).
        A stop id always ends the request: below min_tokens the device does not emit one unless the grammar
        leaves no other choice, and then the request must end.
        """
        if token in self.stop_ids:
            self.stop_reason = None if token in self.eos_token_ids else token
            return RequestStatus.FINISHED_STOPPED
        if len(self.token_ids) >= self.max_total_tokens:
            return RequestStatus.FINISHED_LENGTH
        params = self.sampling_params
        repetition = params.repetition_detection
        long_enough = len(self.output_token_ids) >= params.min_tokens
        if repetition is not None and long_enough and repetition.found_in(self.output_token_ids):
            self.stop_reason = "repetition_detected"
            return RequestStatus.FINISHED_STOPPED
        return None
