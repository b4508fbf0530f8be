"""Decides, step by step, which requests compute what.

The scheduler runs ahead of the device: a step is scheduled while the one before it is still in flight, so the
host's view of a running request is `num_tokens` known tokens plus up to `num_in_flight` that are being sampled.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType

from jaxserve.kv_manager import KVCacheManager
from jaxserve.prompt_scores import ScoreCache
from jaxserve.request import Request, RequestStatus
from jaxserve.scheduler_config import SchedulerConfig

_NO_ERRORS: Mapping[str, str] = MappingProxyType({})
_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """KV of the request's tokens [start, start + count) is computed."""

    request: Request
    start: int
    count: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step. The runner first releases the slots of requests that no longer run, then fills those of `admitted`,
    then prefills, then decodes.

    KV positions at or past max_total_tokens - 1 of a request have no block: rows there are written to the null block.
    """

    num_positions: int  # rows per request in `decode`: 1 + K, or 1 where the budget has no room for drafts
    next_drafts: int = 0  # to be made for the step after, for each request in `decode`
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)
    block_table_changes: list[Request] = field(default_factory=list)  # including the admitted


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    num_running: int
    num_waiting: int
    kv_usage: float
    num_preemptions: int
    prefix_queried_tokens: int  # prompt tokens looked up at admission
    prefix_hit_tokens: int


class Scheduler:
    """Continuous batching over a paged KV cache.

    `running` and `waiting` are both sorted by the policy's order, so the tail of `running` is always the request
    to preempt, and the head of `running` can always grow: nobody waits for ever.
    """

    def __init__(
        self, config: SchedulerConfig, kv_manager: KVCacheManager, num_drafts: Callable[[int], int] | None = None
    ) -> None:
        """num_drafts: K for a step of so many requests, at most num_speculative_tokens; None is always that."""
        if kv_manager.block_size != config.block_size:
            raise ValueError(f"block_size is {config.block_size}, but the KV manager's is {kv_manager.block_size}")
        self.config = config
        self._num_drafts = num_drafts or (lambda num_running: config.num_speculative_tokens)
        self.kv = kv_manager
        self.score_cache = ScoreCache()
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._num_added = 0
        self._waits_for_blocks = False  # whether the last step left somebody waiting for them
        self._being_written: set[bytes] = set()  # blocks, by content, that prefills of this step will come to fill
        self._num_preemptions = 0
        self._prefix_queried_tokens = 0
        self._prefix_hit_tokens = 0

    # ---- requests come and go

    def add_request(self, request: Request) -> None:
        """Queues a new request. Raises ValueError if it could never be served."""
        self._check(request)
        by_priority = (request.priority, request.arrival_time) if self.config.policy == "priority" else ()
        request.order = (*by_priority, self._num_added)
        self._num_added += 1
        if request.awaits_grammar:
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
        self._requests[request.request_id] = request
        bisect.insort(self.waiting, request, key=_order)

    def _check(self, request: Request) -> None:
        length, limit = request.num_tokens, self.config.max_model_len
        if request.request_id in self._requests:
            raise ValueError(f"request_id {request.request_id!r} is already in use by an unfinished request")
        if request.max_model_len > limit:
            raise ValueError(f"max_model_len of the request must be at most {limit}, got {request.max_model_len}")
        if not 1 <= length < request.max_total_tokens:
            raise ValueError(
                f"prompt_token_ids must have 1 to {limit - 1} tokens (max_model_len {limit}, one token of output), "
                f"and max_tokens must be at least 1; got {length} tokens, at most {request.max_total_tokens} in total"
            )
        if not self.kv.fits(request.max_total_tokens - 1):
            room = self.kv.pool.num_usable * self.config.block_size
            raise ValueError(
                f"prompt and max_tokens need {request.max_total_tokens - 1} KV positions, "
                f"but the whole KV cache has {room}: lower max_tokens or raise num_blocks"
            )
        if request.priority and self.config.policy != "priority":
            raise ValueError(f"priority must be 0 unless the scheduling policy is 'priority', got {request.priority}")

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Ends requests in any state, also with steps in flight; ids that are unknown or finished are passed over."""
        requests = [self._requests[i] for i in dict.fromkeys(request_ids) if i in self._requests]
        for request in requests:
            self.finish(request, RequestStatus.FINISHED_ABORTED)
        return requests

    def finish(self, request: Request, status: RequestStatus) -> None:
        """Ends a request with a finished status and frees its blocks; a second call changes nothing."""
        if request.status.is_finished:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.kv.free(request)
        else:
            self.waiting.remove(request)
        del self._requests[request.request_id]
        request.status = status
        request.finished_time = time.time()

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_usage=self.kv.pool.usage,
            num_preemptions=self._num_preemptions,
            prefix_queried_tokens=self._prefix_queried_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
        )

    # ---- one step

    def schedule(self) -> SchedulerOutput:
        """The next step: everyone who decodes, then prefills under way, then (if nobody had to yield) new requests."""
        output = SchedulerOutput(*self._num_positions())
        self._waits_for_blocks = False
        self._being_written.clear()
        prefilling = self._decode_running(output)
        budget = self.config.max_num_batched_tokens - output.num_positions * len(output.decode)
        for request in prefilling:
            budget = self._advance(request, output, budget)
        if output.preempted:
            self._waits_for_blocks = True
        else:
            self._admit(output, budget)
        return output

    def _num_positions(self) -> tuple[int, int]:
        """1 + K, unless drafts for everyone who might run would leave no room for a tile of prefill; and K itself."""
        # Whom the last step had no KV blocks for does not run in this one either, but for one that ended meanwhile.
        waiting = 0 if self._waits_for_blocks else len(self.waiting)
        candidates = min(max(len(self.running) + waiting, 1), self.config.max_num_seqs)  # one that ended leaves blocks
        drafts = self._num_drafts(candidates)
        needed = candidates * (1 + drafts) + self.config.prefill_tile
        return 1 + drafts if needed <= self.config.max_num_batched_tokens else 1, drafts

    def _decode_running(self, output: SchedulerOutput) -> list[Request]:
        """Schedules every running request that can decode; returns those that are still prefilling."""
        prefilling = []
        positions = output.num_positions
        for request in self.running:  # preemption takes from the tail, which this loop has not reached
            if request.is_prefilling:
                prefilling.append(request)
                continue
            if request.awaits_grammar:
                continue
            ahead = request.num_tokens + request.num_in_flight
            if ahead >= request.max_total_tokens:  # its end is in flight
                continue
            positions_ahead = ahead + positions + self.config.num_lookahead_tokens
            if self._grow(request, min(positions_ahead, request.max_total_tokens) - 1, output):
                request.num_in_flight += positions
                output.decode.append(request)
        return prefilling

    def _grow(self, request: Request, num_positions: int, output: SchedulerOutput) -> bool:
        """Gets KV blocks for `num_positions`, preempting from the tail; False if the request itself had to go."""
        while (blocks := self.kv.allocate_slots(request, num_positions)) is None:
            victim = self.running.pop()
            self._preempt(victim, output)
            if victim is request:
                return False
        if blocks:
            output.block_table_changes.append(request)
        return True

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Back to waiting, without KV. Tokens in flight are still collected: the request resumes after them."""
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        bisect.insort(self.waiting, request, key=_order)
        output.preempted.append(request)

    def _advance(self, request: Request, output: SchedulerOutput, budget: int) -> int:
        """Prefills a chunk and, where that was the last, decodes too; returns the budget that is left."""
        todo = request.num_tokens - 1 - request.num_computed_tokens
        if count := self._chunk_size(todo, budget):
            output.prefill.append(PrefillChunk(request, request.num_computed_tokens, count))
            self._being_written.update(self.kv.shareable_hashes(request, request.num_computed_tokens))
            request.num_computed_tokens += count
            budget -= self.config.padded(count)
        if count == todo and budget >= output.num_positions and not request.awaits_grammar:
            request.num_in_flight += output.num_positions
            output.decode.append(request)
            budget -= output.num_positions
        return budget

    def _chunk_size(self, todo: int, budget: int) -> int:
        """How many of `todo` prefill tokens this step computes."""
        config = self.config
        room = budget - budget % config.prefill_tile
        if not config.enable_chunked_prefill:
            return todo if todo <= room else 0
        return min(todo, room, config.long_prefill_token_threshold or todo)

    def _admit(self, output: SchedulerOutput, budget: int) -> None:
        """Admits waiting requests in order, up to the first that does not fit. Those whose grammar is still being
        compiled come after everyone else: they prefill meanwhile, but others could decode."""
        for compiled in (True, False):
            position = 0
            while position < len(self.waiting) and len(self.running) < self.config.max_num_seqs:
                request = self.waiting[position]
                if compiled and request.awaits_grammar:
                    position += 1
                    continue
                left = self._try_to_start(request, output, budget)
                if left is None:
                    return
                budget = left

    def _try_to_start(self, request: Request, output: SchedulerOutput, budget: int) -> int | None:
        """Admits a waiting request and returns the budget that is left; None where it does not fit, or where most of
        its prompt is being computed for another."""
        if request.num_in_flight or budget < output.num_positions:
            return None
        cached_blocks, num_cached = self.kv.get_computed_blocks(request)
        start = self._start_position(request, num_cached)
        todo = request.num_tokens - 1 - start
        if todo and not self._chunk_size(todo, budget):
            return None
        if 2 * self._num_being_written(request, num_cached) > todo:
            return None
        # Blocks for all known tokens and the first decode: a prefill never stops half-way for want of memory.
        first_decode = request.num_tokens + self.config.num_speculative_tokens + self.config.num_lookahead_tokens
        needed = min(first_decode, request.max_total_tokens - 1)
        if self.kv.allocate_slots(request, needed, computed_blocks=cached_blocks) is None:
            self._waits_for_blocks = True
            return None
        self.waiting.remove(request)
        self._start(request, start, num_cached, output)
        return self._advance(request, output, budget)

    def _num_being_written(self, request: Request, num_cached: int) -> int:
        """Positions after the cached prefix that are being computed for somebody else, as for the first sequence of a
        request with n > 1: whoever waits can share them."""
        hashes = self.kv.shareable_hashes(request, num_cached) if self._being_written else []
        shared = itertools.takewhile(self._being_written.__contains__, hashes)
        return self.config.block_size * sum(1 for _ in shared)

    def _start_position(self, request: Request, num_cached: int) -> int:
        """Where computing begins: after the cached prefix, or in it where the prompt's own scores are not known."""
        if request.scores is None:
            return num_cached
        self.score_cache.recall(request.scores, self.kv.prompt_hashes(request))
        return request.scores.start_position(num_cached)

    def _start(self, request: Request, start: int, num_cached: int, output: SchedulerOutput) -> None:
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = start
        request.num_stored_tokens = num_cached
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.time()
            request.num_cached_tokens = num_cached
            self._prefix_queried_tokens += request.num_tokens
            self._prefix_hit_tokens += num_cached
        bisect.insort(self.running, request, key=_order)
        output.admitted.append(request)
        output.block_table_changes.append(request)

    # ---- what became of it

    def after_dispatch(self, output: SchedulerOutput) -> None:
        """Shares the blocks of prompts whose KV the step's programs, now dispatched, write."""
        for chunk in output.prefill:
            if chunk.request.status is RequestStatus.RUNNING:
                self.kv.cache_written(chunk.request, chunk.start + chunk.count)

    def update_from_output(
        self,
        output: SchedulerOutput,
        tokens: Mapping[str, Sequence[int]],
        errors: Mapping[str, str] = _NO_ERRORS,
        complete: Collection[str] = (),
    ) -> list[Request]:
        """Takes in what a step sampled (by request id, 1 to num_positions tokens each); returns those it changed.

        Tokens past a request's end are dropped, as are those of requests that ended meanwhile. A preempted request
        keeps its tokens. A request named in `errors` ends with that message; one in `complete` ends because its grammar
        leaves nothing more to say.
        """
        touched = []
        now = time.time()
        for chunk in output.prefill:
            if (scores := chunk.request.scores) is not None and self.kv.pool.enable_caching:
                hashes = self.kv.prompt_hashes(chunk.request)
                self.score_cache.remember(scores, hashes, self.config.block_size)
        for request in output.decode:
            request.num_in_flight -= output.num_positions
            if request.status.is_finished:
                continue
            if request.request_id in errors:
                request.error = errors[request.request_id]
                self.finish(request, RequestStatus.FINISHED_ERROR)
                touched.append(request)
            elif sampled := tokens.get(request.request_id):
                if request.first_token_time is None:
                    request.first_token_time = now
                self._append(request, sampled, request.request_id in complete)
                touched.append(request)
        return touched

    def _append(self, request: Request, sampled: Sequence[int], complete: bool) -> None:
        end = None
        for token in sampled:
            request.append_token(token)
            if (end := request.check_stop(token)) is not None:
                break
        if request.status is RequestStatus.RUNNING:  # the step has written the KV of all tokens but the newest
            request.num_computed_tokens = len(request.token_ids) - 1
            self.kv.cache_written(request, request.num_computed_tokens)
        if complete:
            end = RequestStatus.FINISHED_STOPPED
        if end is not None:
            self.finish(request, end)
