"""From collected tokens to RequestOutputs: text, stop strings, and the n sequences of a request put together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxserve.detokenizer import Detokenizer, StopMatch
from jaxserve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxserve.prompt_scores import PromptScores
from jaxserve.request import Request
from jaxserve.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxserve.sampling_params import RequestOutputKind, SamplingParams


class Processed(NamedTuple):
    """output: to be handed to the user now, if any. stop: the engine must finish the request with this match. failed:
    the engine must finish the request, whose output ends with an error."""

    output: RequestOutput | None
    stop: StopMatch | None
    failed: bool = False


@dataclass(slots=True)
class _Parent:
    """What the user asked for: a prompt and n sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    sequences: dict[int, _Sequence] = field(default_factory=dict)  # by index; all n once all are added
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    sent_prompt_logprobs: bool = False  # under DELTA they are sent once
    num_finished: int = 0

    @property
    def finished(self) -> bool:
        return self.num_finished == self.params.n


@dataclass(slots=True)
class _Sequence:
    """One of them, as the engine runs it."""

    request_id: str
    index: int
    parent: _Parent
    detokenizer: Detokenizer | None
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_preemptions: int = 0
    sent_chars: int = 0  # of what DELTA handed out
    sent_tokens: int = 0
    changed: bool = False  # since the last output


class OutputProcessor:
    """Holds the text side of every request in the engine. Not thread-safe: used by the thread that steps.

    Each step: process() for every request with new tokens or a new end, then flush() once.
    A request with n > 1 is added n times, each under an id of its own with parent_id and index.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._sequences: dict[str, _Sequence] = {}
        self._parents: dict[str, _Parent] = {}
        self._changed: dict[str, _Parent] = {}  # in order of change

    def validate(self, params: SamplingParams) -> None:
        """Raises ValueError when `params` ask for text and there is no tokenizer."""
        if self._tokenizer is None and params.stop:
            raise ValueError(f"stop={params.stop!r} needs a tokenizer, and this engine has none")

    def __contains__(self, request_id: str) -> bool:
        """Whether the request is running, under the id the user gave or that of one of its n sequences."""
        return request_id in self._parents or request_id in self._sequences

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        arrival_time: float,
        *,
        parent_id: str | None = None,
        index: int = 0,
    ) -> None:
        """Registers sequence `index` of a request.

        request_id: the id the engine runs it under. parent_id: the user's id when that is another one (n > 1).
        params: the user's, with the user's n. Raises ValueError for an id in use, or as `validate` does.
        """
        self.validate(params)
        name = request_id if parent_id is None else parent_id
        parent = self._parents.get(name)
        if request_id in self._sequences or (parent is not None and index in parent.sequences):
            raise ValueError(f"request id {request_id!r} is in use")
        detokenizer = self._detokenizer(prompt_token_ids, params)
        if parent is None:
            parent = _Parent(name, prompt, prompt_token_ids, params, RequestMetrics(arrival_time))
            self._parents[name] = parent
        sequence = _Sequence(request_id, index, parent, detokenizer)
        parent.sequences[index] = sequence
        self._sequences[request_id] = sequence

    def process(
        self,
        request: Request,
        new_token_ids: list[int],
        logprobs: Sequence[TokenLogprobs] | None,
        window: tuple[int, int] = (0, 0),
    ) -> Processed:
        """Takes in the tokens collected for `request`, whose status and stop_reason tell whether they end it.

        logprobs: of each new token, where the request wants them. window: drafts that the step verified for it, and
        tokens that it gave, also those after an end that only the host knows. A stop string that matches wins over any
        other end: the request then ends with the first `stop.num_tokens` of the new tokens. Requests unknown here
        (aborted meanwhile) give nothing. A tokenizer that raises ends the request with an error: it may be a user's.
        """
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            return Processed(None, None)
        sequence.parent.metrics.add_window(*window)
        stop, error = None, request.error
        try:
            stop = self._take_in(sequence, request, new_token_ids, logprobs)
        except Exception as raised:
            error = f"the tokenizer failed: {type(raised).__name__}: {raised}"
        if stop is not None:
            self._finish(sequence, "stop", stop.stop)
        elif error is not None:
            self._finish(sequence, "error", error=error)
        elif request.status.is_finished:
            self._finish(sequence, request.status.finish_reason, request.stop_reason)
        _update_metrics(sequence, request)
        return Processed(self._emit(sequence), stop, failed=error is not None)

    def _take_in(
        self,
        sequence: _Sequence,
        request: Request,
        new_token_ids: list[int],
        logprobs: Sequence[TokenLogprobs] | None,
    ) -> StopMatch | None:
        """Adds tokens to a sequence, up to a stop string; and the prompt's scores to its parent."""
        if request.scores is not None and request.scores.is_complete:
            self._add_prompt_logprobs(sequence.parent, request.scores)
        stop = None
        if sequence.detokenizer is not None and new_token_ids:
            stop = sequence.detokenizer.push(new_token_ids, hidden_last=_is_hidden(request, new_token_ids[-1]))
        num_tokens = len(new_token_ids) if stop is None else stop.num_tokens
        sequence.token_ids += new_token_ids[:num_tokens]
        if logprobs is not None:
            self._add_logprobs(sequence, new_token_ids[:num_tokens], logprobs)
        return stop

    def flush(self) -> list[RequestOutput]:
        """The outputs of requests with n > 1 that changed since the last call, one each."""
        outputs = [_take_output(parent) for parent in self._changed.values()]
        self._changed.clear()
        return outputs

    def abort(self, request_ids: Iterable[str]) -> tuple[list[str], list[RequestOutput]]:
        """Ends requests, given by the user's ids or those of single sequences; unknown ids are passed over.

        Returns the ids that the engine runs them under, and their last outputs with finish_reason "abort".
        """
        running: list[str] = []
        outputs: list[RequestOutput] = []
        for request_id in request_ids:
            sequences = self._running(request_id)
            for sequence in sequences:
                sequence.changed = True
                self._finish(sequence, "abort")
                running.append(sequence.request_id)
            if sequences:
                parent = sequences[0].parent
                self._changed.pop(parent.request_id, None)
                if parent.finished or _kind(parent) is not RequestOutputKind.FINAL_ONLY:
                    outputs.append(_take_output(parent))
        return running, outputs

    def _running(self, request_id: str) -> list[_Sequence]:
        if (parent := self._parents.get(request_id)) is not None:
            return [s for s in _in_order(parent) if s.finish_reason is None]
        sequence = self._sequences.get(request_id)
        return [] if sequence is None else [sequence]

    def _detokenizer(self, prompt_token_ids: list[int], params: SamplingParams) -> Detokenizer | None:
        if self._tokenizer is None or not params.detokenize:
            return None
        return Detokenizer(
            self._tokenizer,
            prompt_token_ids,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            min_tokens=params.min_tokens,
        )

    def _add_logprobs(self, sequence: _Sequence, token_ids: list[int], logprobs: Sequence[TokenLogprobs]) -> None:
        for token, found in zip(token_ids, logprobs, strict=False):  # those after a stop string are dropped
            sequence.cumulative_logprob += found[token][0]
            sequence.logprobs.append(self._logprobs(found))

    def _add_prompt_logprobs(self, parent: _Parent, scores: PromptScores) -> None:
        if parent.prompt_logprobs is None:
            tokens = zip(parent.prompt_token_ids, scores.entries(), strict=True)
            parent.prompt_logprobs = [
                None if found is None else self._logprobs(token_logprobs(found, (), token, scores.number))
                for token, found in tokens
            ]

    def _logprobs(self, found: TokenLogprobs) -> dict[int, Logprob]:
        return {i: Logprob(value, rank, self._decode(i)) for i, (value, rank) in found.items()}

    def _decode(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=False)

    def _finish(
        self, sequence: _Sequence, reason: str | None, stop_reason: int | str | None = None, error: str | None = None
    ) -> None:
        sequence.finish_reason, sequence.stop_reason, sequence.error = reason, stop_reason, error
        parent = sequence.parent
        parent.num_finished += 1
        del self._sequences[sequence.request_id]
        if parent.finished:
            parent.metrics.finished_time = time.time()
            del self._parents[parent.request_id]

    def _emit(self, sequence: _Sequence) -> RequestOutput | None:
        sequence.changed = True
        parent = sequence.parent
        if _kind(parent) is RequestOutputKind.FINAL_ONLY and not parent.finished:
            return None
        if parent.params.n == 1:
            return _take_output(parent)
        self._changed[parent.request_id] = parent
        return None


def _kind(parent: _Parent) -> RequestOutputKind:
    return parent.params.output_kind


def _in_order(parent: _Parent) -> list[_Sequence]:
    return [parent.sequences[index] for index in sorted(parent.sequences)]


def _is_hidden(request: Request, last_token: int) -> bool:
    """Whether the last token is a stop token whose text is not wanted."""
    if request.status.finish_reason != "stop" or request.sampling_params.include_stop_str_in_output:
        return False
    return last_token in request.eos_token_ids or last_token in request.sampling_params.stop_token_ids


def _update_metrics(sequence: _Sequence, request: Request) -> None:
    parent = sequence.parent
    metrics = parent.metrics
    if sequence.index == 0:  # later ones find the prompt that the first one computed
        parent.num_cached_tokens = request.num_cached_tokens
    if metrics.first_scheduled_time is None:
        metrics.first_scheduled_time = request.first_scheduled_time
    if metrics.first_token_time is None and sequence.token_ids:
        metrics.first_token_time = request.first_token_time or time.time()
    metrics.num_preemptions += request.num_preemptions - sequence.num_preemptions
    sequence.num_preemptions = request.num_preemptions


def _take_output(parent: _Parent) -> RequestOutput:
    """What there is to say now: of all sequences, or under DELTA of those that changed."""
    sequences = _in_order(parent)
    if _kind(parent) is RequestOutputKind.DELTA:
        sequences = [s for s in sequences if s.changed]
    for sequence in sequences:
        sequence.changed = False
    prompt_logprobs = parent.prompt_logprobs
    if _kind(parent) is RequestOutputKind.DELTA:
        prompt_logprobs = None if parent.sent_prompt_logprobs else prompt_logprobs
        parent.sent_prompt_logprobs = parent.prompt_logprobs is not None
    return RequestOutput(
        request_id=parent.request_id,
        prompt=parent.prompt,
        prompt_token_ids=parent.prompt_token_ids,
        outputs=[_completion(s) for s in sequences],
        finished=parent.finished,
        num_cached_tokens=parent.num_cached_tokens,
        prompt_logprobs=prompt_logprobs,
        metrics=parent.metrics,
    )


def _completion(sequence: _Sequence) -> CompletionOutput:
    params = sequence.parent.params
    text = "" if sequence.detokenizer is None else sequence.detokenizer.text
    end = 0 if sequence.detokenizer is None else sequence.detokenizer.num_visible(sequence.finish_reason is not None)
    first_char = first_token = 0
    if params.output_kind is RequestOutputKind.DELTA:
        first_char, first_token = sequence.sent_chars, sequence.sent_tokens
        sequence.sent_chars, sequence.sent_tokens = end, len(sequence.token_ids)
    with_logprobs = params.wants_logprobs
    return CompletionOutput(
        index=sequence.index,
        text=text[first_char:end],
        token_ids=sequence.token_ids[first_token:],
        cumulative_logprob=sequence.cumulative_logprob if with_logprobs else None,
        logprobs=sequence.logprobs[first_token:] if with_logprobs else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=sequence.error,
    )
