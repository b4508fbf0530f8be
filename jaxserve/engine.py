"""The engine core: requests in, steps, outputs out. One thread owns it; the host stays one step behind the device."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import models
from jaxserve.block_pool import BlockPool
from jaxserve.config import EngineConfig, ReasoningConfig, make_buckets
from jaxserve.kv_manager import KVCacheManager
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import RequestOutput
from jaxserve.programs import use_persistent_cache
from jaxserve.prompt_scores import PromptScores
from jaxserve.request import Request, RequestStatus
from jaxserve.runner import InFlight, Runner
from jaxserve.sampling.processor import ProcessorConfig
from jaxserve.sampling.registry import make_processors, rows_of
from jaxserve.sampling.sampler import Sampler
from jaxserve.sampling.thinking import Markers
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import Scheduler, SchedulerConfig, SchedulerOutput, SchedulerStats
from models.base import Model
from models.sharding import make_mesh

Prompt = str | list[int] | dict[str, Any]

_DEFAULT_MAX_MODEL_LEN = 4096
_TILE = {"cpu": 16, "gpu": 128}  # prefill tokens that share one gather of their context
_BUDGET = {"cpu": 512, "gpu": 8192}  # prefill tokens beside the decode rows
_MEMORY_LIMIT_CPU = 4 << 30  # what the page pool takes of a host's memory unless asked for more


@dataclass(frozen=True)
class EngineStats:
    """Since the engine started.

    scheduler: queues, pool, preemptions, prefix hits. host_seconds: time the host worked on `num_steps` steps, its
    waiting for the device (`wait_seconds`) not counted; dispatch_seconds: the part of it that started programs.
    compilations: programs compiled after warm-up. tokens: output tokens collected.
    """

    scheduler: SchedulerStats
    num_steps: int
    host_seconds: float
    dispatch_seconds: float
    wait_seconds: float
    compilations: int
    tokens: int


class EngineCore:
    """Continuous batching over one model. Not thread-safe; see `LLM` and `AsyncEngine` for what users hold."""

    def __init__(self, model: Model, tokenizer: Any | None, config: EngineConfig, params: Any = None) -> None:
        """params: weights that are on the device already; None asks the model to load them."""
        use_persistent_cache(config.compilation_cache_dir)
        self.config, self.tokenizer = config, tokenizer
        self.max_model_len = _max_model_len(config, model)
        if hasattr(model, "with_max_model_len"):
            model = model.with_max_model_len(self.max_model_len)
        self.model = model
        self.vocab_size = model.vocab_size if tokenizer is None else min(model.vocab_size, len(tokenizer))
        mesh = _mesh(config.tensor_parallel_size)
        platform = models.default_platform()
        tile = _TILE[platform]
        budget = config.max_num_batched_tokens or max(
            _BUDGET[platform] + config.max_num_seqs, 0 if config.enable_chunked_prefill else self.max_model_len + tile
        )
        scheduler_config = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=self.max_model_len,
            block_size=config.block_size,
            policy=config.scheduling_policy,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            prefill_tile=tile,
        )
        num_blocks = config.num_blocks or _num_blocks(config, model, self.max_model_len)
        self.kv = KVCacheManager(
            BlockPool(num_blocks, config.enable_prefix_caching), config.block_size, config.watermark
        )
        self.scheduler = Scheduler(scheduler_config, self.kv)
        self._sampler = self._make_sampler()
        devices = config.tensor_parallel_size
        self.runner = Runner(
            model,
            mesh,
            make_buckets(config.max_num_seqs, self.max_model_len, budget, config.block_size, tile, devices),
            self.kv,
            self._sampler,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=self.max_model_len,
            keep_boundary_hidden=config.keep_boundary_hidden,
            params=params,
        )
        self._outputs = OutputProcessor(tokenizer)
        self._pending: list[RequestOutput] = []  # made between steps, by aborts
        self._in_flight: InFlight | None = None
        self._num_requests = self._num_steps = self._num_tokens = 0
        self._host_seconds = self._dispatch_seconds = self._wait_seconds = 0.0

    def _make_sampler(self) -> Sampler:
        config, vocab = self.config, self.model.vocab_size
        for_processors = ProcessorConfig(
            vocab_size=vocab,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            tokenizer=self.tokenizer,
            stop_token_ids=tuple(self.model.eos_token_ids),
        )
        markers = None
        if isinstance(config.reasoning_config, ReasoningConfig):
            markers = Markers(*config.reasoning_config.token_ids(self.tokenizer, self.vocab_size))
        return Sampler(
            vocab_limit=self.vocab_size,
            processors=make_processors(config.logits_processors, for_processors),
            markers=markers,
            max_logprobs=vocab if config.max_logprobs < 0 else min(config.max_logprobs, vocab),
            logprobs_mode=config.logprobs_mode,
        )

    @classmethod
    def from_model(cls, model: str | Path | Model, tokenizer: Any | None, config: EngineConfig) -> EngineCore:
        """model: a Hugging Face directory, a .gguf file or an object with the model protocol (models.base.Model).

        tokenizer: a tokenizer, a path to load one from, or None (the model's own; none for a model object).
        Raises FileNotFoundError, or ValueError naming what is wrong.
        """
        if isinstance(model, str | Path):
            tokenizer = tokenizer if tokenizer is not None else model
            model = models.load_model(model, config.dtype)
        elif not isinstance(model, Model):
            missing = [n for n in _protocol_members() if not hasattr(model, n)]
            raise ValueError(
                f"model is a {type(model).__name__}; it must be a directory, a .gguf file or an object with the model "
                f"protocol (models.base.Model), and this one lacks {', '.join(missing)}"
            )
        if isinstance(tokenizer, str | Path):
            from models.tokenizer import load_tokenizer  # transformers takes seconds to import

            tokenizer = load_tokenizer(tokenizer)
        return cls(model, tokenizer, config)

    # ---- requests ----

    def validate(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int]]:
        """The prompt as (text or None, token ids). Raises ValueError naming field, value and range."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is a {type(params).__name__}; it must be a SamplingParams")
        text, token_ids = self._encode(prompt)
        if not token_ids:
            raise ValueError("prompt is empty; it must have at least one token")
        for token in token_ids:
            if not isinstance(token, int | np.integer) or isinstance(token, bool):
                raise ValueError(f"prompt_token_ids holds {token!r}; every token id must be an integer")
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"prompt_token_ids holds {token}; token ids must be in [0, {self.vocab_size})")
        params.verify(self.vocab_size, self.max_model_len, len(token_ids), self.model.eos_token_ids)
        self._check_features(params)
        self._outputs.validate(params)
        return text, [int(token) for token in token_ids]

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request; with n > 1, n sequences that share the prompt's KV.

        Raises ValueError before anything is queued.
        """
        text, token_ids = self.validate(prompt, params)
        _check_request(request_id, priority, cache_salt)
        names = [request_id] if params.n == 1 else [f"{request_id}#{index}" for index in range(params.n)]
        for name in (request_id, *names):
            if name in self._outputs:
                raise ValueError(f"request_id {name!r} is in use by an unfinished request")
        arrival = time.time() if arrival_time is None else arrival_time
        seed = params.seed if params.seed is not None else _derive(self.config.seed, self._num_requests)
        requests = [
            Request(
                request_id=name,
                prompt_token_ids=token_ids,
                sampling_params=params,
                max_model_len=self.max_model_len,
                eos_token_ids=frozenset(self.model.eos_token_ids),
                priority=priority,
                arrival_time=arrival,
                cache_salt=cache_salt,
                seed=seed if index == 0 else _derive(seed, index),
                processor_rows=rows_of(self._sampler.processors, params),
                scores=self._prompt_scores(params, token_ids) if index == 0 else None,
            )
            for index, name in enumerate(names)
        ]
        for request in requests:  # the first is refused if any is: they differ in nothing that is checked
            self.scheduler.add_request(request)
        for index, request in enumerate(requests):
            parent = None if params.n == 1 else request_id
            self._outputs.add(request.request_id, text, token_ids, params, arrival, parent_id=parent, index=index)
        self._num_requests += 1

    def _check_features(self, params: SamplingParams) -> None:
        """What depends on how the engine was made."""
        most = self._sampler.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and (value > most or (value == -1 and most < self.model.vocab_size)):
                raise ValueError(f"{name} is {value}; it must be in [0, {most}], the engine's max_logprobs")
        if len(params.logprob_token_ids or ()) > self._sampler.max_listed:
            raise ValueError(
                f"logprob_token_ids has {len(params.logprob_token_ids or ())} ids; it must have at most "
                f"{self._sampler.max_listed} (the engine's max_logprobs is {most})"
            )
        if params.thinking_token_budget is not None and self._sampler.markers is None:
            raise ValueError(
                f"thinking_token_budget is {params.thinking_token_budget}, and this engine has no reasoning_config"
            )
        rows_of(self._sampler.processors, params)

    def _prompt_scores(self, params: SamplingParams, token_ids: list[int]) -> PromptScores | None:
        number = params.prompt_logprobs
        if number is None:
            return None
        return PromptScores(len(token_ids), self._sampler.max_logprobs if number < 0 else number)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            if len(prompt.keys() & {"prompt", "prompt_token_ids"}) != 1 or len(prompt) != 1:
                raise ValueError(f"prompt has the keys {list(prompt)}; it must have one: prompt or prompt_token_ids")
            (prompt,) = prompt.values()
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt is a string, and this engine has no tokenizer: pass token ids")
            try:
                return prompt, self.tokenizer(prompt)["input_ids"]
            except (TypeError, UnicodeError) as error:  # a lone surrogate, for one
                raise ValueError(f"prompt is not valid text: {error}") from error
        if isinstance(prompt, list | tuple):
            return None, list(prompt)
        raise ValueError(f"prompt is a {type(prompt).__name__}; it must be a string or a list of token ids")

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in any state; unknown ids are passed over. Their last outputs come with the next step."""
        running, outputs = self._outputs.abort(request_ids)
        self.scheduler.abort(running)
        self._pending += outputs

    def has_unfinished(self) -> bool:
        """Whether a further `step` has something to do."""
        return self.scheduler.has_unfinished() or self._in_flight is not None or bool(self._pending)

    # ---- steps ----

    def step(self) -> list[RequestOutput]:
        """Start the next step on the device, then take in the one before it."""
        started = time.perf_counter()
        scheduled = self.scheduler.schedule()
        before = time.perf_counter()
        dispatched = self.runner.dispatch(scheduled)
        self._dispatch_seconds += time.perf_counter() - before
        self.scheduler.after_dispatch(scheduled)
        previous, self._in_flight = self._in_flight, dispatched
        outputs, self._pending = self._pending, []
        waited = 0.0
        if previous is not None:
            before = time.perf_counter()
            collected = self.runner.collect(previous)
            waited = time.perf_counter() - before
            outputs += self._update(previous.scheduled, collected)
        elif dispatched is None and self.scheduler.has_unfinished():
            time.sleep(0.001)  # everyone waits for something outside, a grammar being compiled
        self._num_steps += 1
        self._wait_seconds += waited
        self._host_seconds += time.perf_counter() - started - waited
        return outputs

    def _update(self, scheduled: SchedulerOutput, collected: Any) -> list[RequestOutput]:
        lengths = {r.request_id: len(r.output_token_ids) for r in scheduled.decode}
        outputs = []
        for request in self.scheduler.update_from_output(scheduled, collected.tokens, collected.errors):
            new = request.output_token_ids[lengths[request.request_id] :]
            self._num_tokens += len(new)
            result = self._outputs.process(request, new, collected.logprobs.get(request.request_id))
            if result.stop is not None:
                request.stop_reason = result.stop.stop
                self.scheduler.finish(request, RequestStatus.FINISHED_STOPPED)
            if result.output is not None:
                outputs.append(result.output)
        return outputs + self._outputs.flush()

    def warmup(self, progress: bool = True) -> None:
        """Compile everything that any traffic can ask for; afterwards `num_compilations` stays 0."""
        self.runner.warmup(progress)
        self.runner.programs.compilations = 0

    @property
    def num_compilations(self) -> int:
        """Programs compiled while serving (since the warm-up, if there was one)."""
        return self.runner.programs.compilations

    def stats(self) -> EngineStats:
        return EngineStats(
            scheduler=self.scheduler.stats(),
            num_steps=self._num_steps,
            host_seconds=self._host_seconds,
            dispatch_seconds=self._dispatch_seconds,
            wait_seconds=self._wait_seconds,
            compilations=self.num_compilations,
            tokens=self._num_tokens,
        )

    def shutdown(self) -> None:
        """End every request and wait for the device."""
        self.abort([r.request_id for r in (*self.scheduler.running, *self.scheduler.waiting)])
        if self._in_flight is not None:
            self.runner.collect(self._in_flight)
            self._in_flight = None


def _check_request(request_id: str, priority: int, cache_salt: str | None) -> None:
    """What is not seen until the request is scheduled, when it is too late to refuse it."""
    if not isinstance(request_id, str):
        raise ValueError(f"request_id is {request_id!r}; it must be a string")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ValueError(f"priority is {priority!r}; it must be an integer")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise ValueError(f"cache_salt is {cache_salt!r}; it must be a string or None")


def _derive(seed: int, index: int) -> int:
    """A 64-bit seed from a seed and a number: of the n-th sequence of a request, or of a request without a seed."""
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


def _protocol_members() -> list[str]:
    return sorted(n for n in dir(Model) if not n.startswith("_"))


def _max_model_len(config: EngineConfig, model: Model) -> int:
    if config.max_model_len is None:
        return min(model.max_model_len, _DEFAULT_MAX_MODEL_LEN)
    if not 2 <= config.max_model_len <= model.max_model_len:
        raise ValueError(f"max_model_len is {config.max_model_len}; this model takes [2, {model.max_model_len}]")
    return config.max_model_len


def _mesh(tensor_parallel_size: int) -> Mesh | None:
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ValueError(f"tensor_parallel_size is {tensor_parallel_size}; this host has {len(devices)} device(s)")
    return None if tensor_parallel_size == 1 else make_mesh(devices[:tensor_parallel_size])


def _num_blocks(config: EngineConfig, model: Model, max_model_len: int) -> int:
    """Pages for everyone at full length, or what memory allows; page 0 is nobody's."""
    wanted = 1 + config.max_num_seqs * -(-max_model_len // config.block_size)
    per_block = model.kv_bytes_per_block(config.block_size)
    if per_block == 0:
        return wanted
    affordable = int(config.kv_cache_memory_fraction * _free_memory(config.tensor_parallel_size)) // per_block
    needed = 1 + -(-max_model_len // config.block_size)
    if affordable < needed:
        raise ValueError(
            f"max_model_len {max_model_len} needs {needed} KV pages of {per_block} bytes, memory allows {affordable}: "
            "lower max_model_len, or raise kv_cache_memory_fraction or num_blocks"
        )
    return min(wanted, affordable)


def _free_memory(devices: int) -> int:
    """Bytes free on the devices together; on CPU of the host, up to a limit that leaves it usable."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return devices * (stats["bytes_limit"] - stats["bytes_in_use"])
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
    return min(pages * os.sysconf("SC_PAGE_SIZE"), 2 * _MEMORY_LIMIT_CPU) if pages else _MEMORY_LIMIT_CPU
