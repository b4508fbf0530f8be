"""The engine core: requests in, steps, outputs out. One thread owns it; the host stays one step behind the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

import models
from jaxserve.admission import Admission, PreparedRequest, Prompt
from jaxserve.assembly import assemble
from jaxserve.block_pool import BlockPool
from jaxserve.config import EngineConfig
from jaxserve.kv_manager import KVCacheManager
from jaxserve.memory import load_weights, make_cache, num_blocks
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import RequestOutput
from jaxserve.programs import use_persistent_cache
from jaxserve.request import Request, RequestStatus
from jaxserve.runner import Collected, InFlight, Runner
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import Scheduler, SchedulerOutput, SchedulerStats
from jaxserve.speculative.speculation import Speculation
from jaxserve.speculative.stats import SpecDecodingStats
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.forced import ForcedTokens
from jaxserve.structured.manager import StructuredOutputs
from models.base import Model


@dataclass(frozen=True)
class EngineStats:
    """Since the engine started.

    scheduler: queues, pool, preemptions, prefix hits. host_seconds: time the host worked on `num_steps` steps, its
    waiting for the device (`wait_seconds`) not counted; dispatch_seconds: the part of it that started programs.
    compilations: programs compiled after warm-up. tokens: output tokens collected. speculation: what became of drafts.
    grammar_violations: outputs that left their grammar, each of which would be a fault of jaxserve. mask_seconds,
    mask_bytes: that matchers took for masks, and what of them was sent to the device.
    """

    scheduler: SchedulerStats
    num_steps: int
    host_seconds: float
    dispatch_seconds: float
    wait_seconds: float
    compilations: int
    tokens: int
    speculation: SpecDecodingStats
    grammar_violations: int
    mask_seconds: float
    mask_bytes: int


class EngineCore:
    """Continuous batching over one model. Not thread-safe; see `LLM` and `AsyncEngine` for what users hold."""

    def __init__(self, model: Model, tokenizer: Any | None, config: EngineConfig, params: Any = None) -> None:
        """params: weights that are on the device already; None asks the model to load them."""
        use_persistent_cache(config.compilation_cache_dir)
        self.config, self.tokenizer = config, tokenizer
        made = assemble(model, tokenizer, config)
        self.model, self.vocab_size, self.max_model_len = made.parts.model, made.vocab_size, made.max_model_len
        weights = load_weights(made.parts, params)
        cache_of = partial(
            make_cache,
            made.parts,
            weights.model,
            block_size=config.block_size,
            keep_boundary_hidden=made.keep_boundary_hidden,
        )
        blocks = config.num_blocks or num_blocks(config, self.max_model_len, cache_of(1))
        pool = BlockPool(blocks, config.enable_prefix_caching)
        self.kv = KVCacheManager(pool, config.block_size, config.watermark)
        self._speculation = Speculation(config.speculation, made.draft_counts, made.buckets.slots)
        self._suffix = made.suffix
        self.scheduler = Scheduler(made.scheduler, self.kv, self._drafts_for)
        sampler = made.parts.sampler
        self._structured = StructuredOutputs(tokenizer, self.model.vocab_size, made.structured, sampler.markers)
        self._forced = ForcedTokens(made.draft_counts if config.speculation is None else (0,), made.buckets.slots)
        self._compiling: list[Request] = []
        self._admission = Admission(
            tokenizer,
            sampler,
            self.model.vocab_size,
            self.vocab_size,
            made.eos_token_ids,
            self.max_model_len,
            config.seed,
            self._structured,
        )
        self.runner = Runner(
            made.parts,
            made.buckets,
            self.kv,
            weights,
            cache_of(blocks),
            max_model_len=self.max_model_len,
            draft_counts=made.draft_counts,
            suffix=made.suffix,
            draft_logits=config.speculation is not None and config.speculation.probabilistic,
            grammar_bytes=0 if made.structured is None else made.structured.pool_bytes,
        )
        self._outputs = OutputProcessor(tokenizer)
        self._pending: list[RequestOutput] = []  # made between steps, by aborts
        self._in_flight: InFlight | None = None
        self._num_requests = self._num_steps = self._num_tokens = self._grammar_violations = 0
        self._preparing = threading.Lock()  # a tokenizer may change its settings while it encodes
        self._is_shut_down = False
        self._compiled = 0  # programs, when the last step was taken in
        self._last_decoded: float | None = None  # when, if it did nothing but decode
        self._host_seconds = self._dispatch_seconds = self._wait_seconds = 0.0

    @classmethod
    def from_model(cls, model: str | Path | Model, tokenizer: Any | None, config: EngineConfig) -> EngineCore:
        """model: a Hugging Face directory, a .gguf file or an object with the model protocol (models.base.Model).

        tokenizer: one of transformers or tokenizers, an object like these, a path to load one from, or None (the
        model's own; none for a model object). A model object has its dtype already: config.dtype is that or "auto".
        Raises FileNotFoundError, or ValueError naming what is wrong.
        """
        if isinstance(model, str | Path):
            tokenizer = tokenizer if tokenizer is not None else model
            model = models.load_model(model, config.dtype)
        elif not isinstance(model, Model):
            missing = [n for n in dir(Model) if not n.startswith("_") and not hasattr(model, n)]
            raise ValueError(
                f"model is a {type(model).__name__}; it must be a directory, a .gguf file or an object with the model "
                f"protocol (models.base.Model), and this one lacks {', '.join(missing)}"
            )
        elif config.dtype not in ("auto", own := getattr(model, "dtype", "auto")):
            raise ValueError(
                f"dtype is {config.dtype!r}; the model object given has {own!r}: it must be that or 'auto'"
            )
        if isinstance(tokenizer, str | Path | tokenizers.Tokenizer):
            from models.tokenizer import load_tokenizer  # transformers takes seconds to import

            tokenizer = load_tokenizer(tokenizer)
        return cls(model, tokenizer, config)

    # ---- requests ----

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What the model recommends. Raises ValueError where no request can ask for it."""
        return SamplingParams.from_generation_config(getattr(self.model, "generation_config", {}))

    def prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedRequest:
        """Encode and check what a request asks, which takes time: other threads than the engine's may do it.

        Raises ValueError naming field, value and range.
        """
        with self._preparing:
            prepared = self._admission.prepare(prompt, params)
        self._outputs.validate(params)
        return prepared

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request; with n > 1, n sequences that share the prompt's KV.

        prompt: as LLM.generate takes it. Raises ValueError before anything is queued.
        """
        self.add_prepared(request_id, self.prepare(prompt, params), priority=priority, arrival_time=arrival_time)

    def add_prepared(
        self, request_id: str, prepared: PreparedRequest, *, priority: int = 0, arrival_time: float | None = None
    ) -> None:
        """Queue what `prepare` has made."""
        self._check_alive()
        params, arrival = prepared.params, time.time() if arrival_time is None else arrival_time
        requests = self._admission.requests(
            request_id, prepared, self._num_requests, priority=priority, arrival_time=arrival
        )
        for name in {request_id, *(request.request_id for request in requests)}:
            if name in self._outputs:
                raise ValueError(f"request_id {name!r} is in use by an unfinished request")
        parent = None if params.n == 1 else request_id
        try:
            for index, request in enumerate(requests):
                self._outputs.add(
                    request.request_id,
                    prepared.text,
                    prepared.token_ids,
                    params,
                    arrival,
                    parent_id=parent,
                    index=index,
                )
            for request in requests:
                self.scheduler.add_request(request)
        except BaseException:
            self.scheduler.abort(self._outputs.abort([request_id])[0])
            raise
        if params.structured_outputs is not None:
            self._compiling += requests
        self._num_requests += 1

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End one or several requests in any state; unknown ids are passed over. Their last outputs come with the next
        step."""
        request_ids = [request_ids] if isinstance(request_ids, str) else request_ids
        running, outputs = self._outputs.abort(request_ids)
        self.scheduler.abort(running)
        self._pending += outputs

    def has_unfinished(self) -> bool:
        """Whether a further `step` has something to do."""
        return self.scheduler.has_unfinished() or self._in_flight is not None or bool(self._pending)

    # ---- steps ----

    def step(self) -> list[RequestOutput]:
        """Start the next step on the device, and take in the one before it: while the device computes logits where the
        host has to make masks of them, else once everything is started."""
        self._check_alive()
        started = time.perf_counter()
        outputs, self._pending = self._pending, []
        outputs += self._drop_uncompiled()
        scheduled = self.scheduler.schedule()
        before = time.perf_counter()
        flight = self.runner.start(scheduled)
        self.scheduler.after_dispatch(scheduled)
        self._dispatch_seconds += time.perf_counter() - before
        previous, self._in_flight = self._in_flight, flight
        waited = 0.0
        if flight is None or not flight.matched:
            self._sample(flight)
            waited = self._collect(previous, outputs)
        else:
            waited = self._collect(previous, outputs)
            outputs += self._sample(flight)
        outputs += self._outputs.flush()
        if flight is None and previous is None:
            if self.scheduler.has_unfinished():
                time.sleep(0.001)  # everyone waits for something outside, a grammar being compiled
            return outputs
        self._num_steps += 1
        self._wait_seconds += waited
        self._host_seconds += time.perf_counter() - started - waited
        return outputs

    def _sample(self, flight: InFlight | None) -> list[RequestOutput]:
        """The rest of a started step; the outputs of requests whose masks could not be made."""
        if flight is None:
            return []
        before = time.perf_counter()
        errors = self.runner.sample(flight)
        self._dispatch_seconds += time.perf_counter() - before
        failed = [(request, errors[request.request_id]) for _, request in flight.rows if request.request_id in errors]
        return [output for request, message in failed for output in self._fail(request, message)]

    def _collect(self, flight: InFlight | None, outputs: list[RequestOutput]) -> float:
        """Take in a step, add what it gives to `outputs`; the seconds that the device kept us waiting."""
        if flight is None:
            return 0.0
        before = time.perf_counter()
        collected = self.runner.collect(flight)
        waited = time.perf_counter() - before
        self._follow(flight, collected)
        outputs += self._update(flight.scheduled, collected)
        return waited

    def _follow(self, flight: InFlight, collected: Collected) -> None:
        """Tell matchers what was said."""
        for _, request in flight.matched:
            if request.status.is_finished or request.constraint is None:
                continue
            name = request.request_id
            try:
                count = request.constraint.accept(collected.tokens[name])
                collected.tokens[name] = collected.tokens[name][:count]
                if name in collected.logprobs:
                    collected.logprobs[name] = collected.logprobs[name][:count]
            except GrammarError as error:
                collected.errors[name] = f"structured_outputs: {error}"
                collected.num_violations += 1
            if request.constraint.is_exhausted:
                collected.complete.add(name)
        self._grammar_violations += collected.num_violations

    def _update(self, scheduled: SchedulerOutput, collected: Collected) -> list[RequestOutput]:
        windows = [(drafts, len(collected.tokens[name])) for name, drafts in collected.num_drafts.items()]
        drafts = scheduled.num_positions - 1
        seconds = self._seconds_of(scheduled)
        self._speculation.observe(windows, drafts, seconds)
        self._forced.observe((emitted for _, emitted in windows), drafts, seconds)
        lengths = {r.request_id: len(r.output_token_ids) for r in scheduled.decode}
        outputs = []
        touched = self.scheduler.update_from_output(scheduled, collected.tokens, collected.errors, collected.complete)
        for request in touched:
            new = request.output_token_ids[lengths[request.request_id] :]
            self._num_tokens += len(new)
            name = request.request_id
            window = collected.num_drafts.get(name, 0), len(collected.tokens.get(name, ()))
            result = self._outputs.process(request, new, collected.logprobs.get(name), window)
            if result.stop is not None:
                request.stop_reason = result.stop.stop
                self.scheduler.finish(request, RequestStatus.FINISHED_STOPPED)
            if result.failed:
                self.scheduler.finish(request, RequestStatus.FINISHED_ERROR)
            if self._suffix is not None and request.status.is_finished:
                self._suffix.add_finished(request.output_token_ids)
            if result.output is not None:
                outputs.append(result.output)
        return outputs

    def _seconds_of(self, scheduled: SchedulerOutput) -> float | None:
        """What a collected step took: the time since the one before it, where neither was more than a decode."""
        compiled, self._compiled = self.num_compilations - self._compiled, self.num_compilations
        before, now = self._last_decoded, time.perf_counter()
        self._last_decoded = None if scheduled.prefill or compiled else now
        return None if before is None or self._last_decoded is None else now - before

    def _drafts_for(self, num_running: int) -> int:
        """K for a step of so many requests."""
        if self.config.speculation is not None:
            return self._speculation.drafts_for(num_running)
        return self._forced.drafts_for(num_running, any(r.constraint is not None for r in self.scheduler.running))

    def _drop_uncompiled(self) -> list[RequestOutput]:
        """End the requests whose grammar turned out not to compile."""
        if not self._compiling:
            return []
        outputs = []
        for request in self._compiling:
            if request.constraint is not None and (error := request.constraint.error) is not None:
                outputs += self._fail(request, error)
        self._compiling = [r for r in self._compiling if r.awaits_grammar and not r.status.is_finished]
        return outputs

    def _fail(self, request: Request, message: str) -> list[RequestOutput]:
        """End a request with an error."""
        if request.status.is_finished:
            return []
        request.error = message
        self.scheduler.finish(request, RequestStatus.FINISHED_ERROR)
        output = self._outputs.process(request, [], None).output
        return [] if output is None else [output]

    def warmup(self, progress: bool = True) -> None:
        """Compile everything that any traffic can ask for; afterwards `num_compilations` stays 0."""
        self._check_alive()
        self.runner.warmup(progress)
        self.runner.programs.compilations = self._compiled = 0

    @property
    def num_compilations(self) -> int:
        """Programs compiled while serving (since the warm-up, if there was one)."""
        return self.runner.programs.compilations

    def stats(self) -> EngineStats:
        grammars = self.runner.grammars
        return EngineStats(
            scheduler=self.scheduler.stats(),
            num_steps=self._num_steps,
            host_seconds=self._host_seconds,
            dispatch_seconds=self._dispatch_seconds,
            wait_seconds=self._wait_seconds,
            compilations=self.num_compilations,
            tokens=self._num_tokens,
            speculation=self._speculation.stats,
            grammar_violations=self._grammar_violations,
            mask_seconds=0.0 if grammars is None else grammars.fill_seconds,
            mask_bytes=0 if grammars is None else grammars.bytes_sent,
        )

    def shutdown(self) -> None:
        """End every request, wait for the device and free its memory. The engine takes no more requests."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        try:
            self.abort([r.request_id for r in (*self.scheduler.running, *self.scheduler.waiting)])
            if self._in_flight is not None:
                self.runner.collect(self._in_flight)
        finally:
            self._in_flight = None
            self._structured.shutdown()
            self.runner.release()

    def _check_alive(self) -> None:
        if self._is_shut_down:
            raise RuntimeError("the engine has been shut down")
