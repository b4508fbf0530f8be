"""The engine as a service inside one process: one thread steps it, any number of coroutines wait for their outputs."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Self

from jaxserve.admission import Prompt
from jaxserve.config import STRUCTURED_OUTPUTS, EngineConfig, ReasoningConfig
from jaxserve.engine import EngineCore
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.speculative.config import SpeculativeConfig
from jaxserve.speculative.stats import SpecDecodingLogger, register_metrics
from jaxserve.structured.config import StructuredOutputsConfig


class EngineDeadError(RuntimeError):
    """The engine's thread has ended: by an error, which is the cause of this one, or by shutdown()."""


class AsyncEngine:
    """Serves requests of many coroutines, also of several event loops, with one batch.

        async with AsyncEngine("path/to/model") as engine:
            async for output in engine.generate("Hello", SamplingParams(output_kind=RequestOutputKind.DELTA)):
                print(output.outputs[0].text, end="")

    The arguments are those of LLM, but what became of drafts is logged unless disable_log_stats is set. The constructor
    loads the model and blocks meanwhile.

    Only the engine's thread touches the EngineCore: callers post commands to it, which run between two steps.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory_fraction: float = 0.5,
        tensor_parallel_size: int = 1,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: str = "fcfs",
        watermark: float = 0.01,
        seed: int = 0,
        keep_boundary_hidden: bool = False,
        logits_processors: Sequence[Any] = (),
        max_logprobs: int = 20,
        logprobs_mode: str = "raw_logprobs",
        sampling_implementation: str | None = None,
        attention_implementation: str | None = None,
        reasoning_config: ReasoningConfig | Mapping[str, Any] | str | None = None,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        structured_outputs_config: StructuredOutputsConfig | Mapping[str, Any] | None = STRUCTURED_OUTPUTS,
        compilation_cache_dir: str | Path | None = None,
        disable_log_stats: bool = False,
    ) -> None:
        config = EngineConfig(
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            kv_cache_memory_fraction=kv_cache_memory_fraction,
            tensor_parallel_size=tensor_parallel_size,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            scheduling_policy=scheduling_policy,
            watermark=watermark,
            seed=seed,
            keep_boundary_hidden=keep_boundary_hidden,
            logits_processors=logits_processors,
            max_logprobs=max_logprobs,
            logprobs_mode=logprobs_mode,
            sampling_implementation=sampling_implementation,
            attention_implementation=attention_implementation,
            reasoning_config=reasoning_config,
            speculative_config=speculative_config,
            structured_outputs_config=structured_outputs_config,
            compilation_cache_dir=compilation_cache_dir,
        )
        core = EngineCore.from_model(model, tokenizer, config)
        self._start(core, None if disable_log_stats else SpecDecodingLogger(core.stats().speculation))

    @classmethod
    def from_core(cls, core: EngineCore) -> Self:
        """Serves an engine that exists already; from now on only this object may use it."""
        engine = cls.__new__(cls)
        engine._start(core)
        return engine

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come, by sampling_params.output_kind; the last one has `finished` set.

        sampling_params: None takes what the model recommends (SamplingParams.from_generation_config). A consumer slower
        than the engine loses nothing: under CUMULATIVE it sees only the newest state, under DELTA every piece. Closing
        the generator or cancelling its consumer aborts the request.
        Raises ValueError when the request cannot be served, EngineDeadError when the engine ends.
        """
        arrival = time.time()
        params = self._core.default_sampling_params if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is a {type(params).__name__}; it must be a SamplingParams")
        # In a thread of its own: neither the loop nor the engine waits for a long prompt.
        prepared = await asyncio.to_thread(self._core.prepare, prompt, params)
        name = uuid.uuid4().hex if request_id is None else request_id
        stream = _Stream(asyncio.get_running_loop(), params.output_kind)
        add = partial(self._core.add_prepared, name, prepared, priority=priority, arrival_time=arrival)
        try:
            await asyncio.wrap_future(self._post(partial(self._add, name, stream, add)))
            finished = False
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield output
        finally:
            if not stream.ended:
                self._post(partial(self._drop, name, stream))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; whoever waits for them gets a last output with finish_reason "abort". Unknown ids are fine."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await asyncio.wrap_future(self._post(partial(self._abort, ids)))

    async def warmup(self, progress: bool = True) -> None:
        """Compiles everything a request can need."""
        await asyncio.wrap_future(self._post(partial(self._core.warmup, progress)))

    async def stats(self) -> Any:
        return await asyncio.wrap_future(self._post(self._core.stats))

    async def register_metrics(
        self, registry: Any = None, labels: Mapping[str, str] | None = None, prefix: str = "jaxserve:"
    ) -> Any:
        """Prometheus counters of speculation, as jaxserve.speculative.register_metrics makes them."""
        return register_metrics((await self.stats()).speculation, registry, labels, prefix)

    def get_tokenizer(self) -> Any:
        return self._core.tokenizer

    @property
    def is_running(self) -> bool:
        return self._death is None

    def shutdown(self) -> None:
        """Aborts what is outstanding and ends the thread. May be called from any thread, and more than once; without it
        the engine lives until the process exits."""
        with self._lock:
            if self._death is None:
                self._commands.put((Future(), self._stop))
        self._thread.join()
        atexit.unregister(self.shutdown)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.shutdown)

    # What follows runs on the engine's thread, except for _start and _post.

    def _start(self, core: EngineCore, log: SpecDecodingLogger | None = None) -> None:
        self._core, self._spec_log = core, log
        self._streams: dict[str, _Stream] = {}  # of the engine's thread alone
        self._commands: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # no command is posted once _death is set
        self._death: EngineDeadError | None = None
        self._stopping = self._in_step = False
        self._aborted: set[str] = set()  # since the last step, which will bring their last outputs
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)  # a thread inside the runtime while the interpreter exits would crash

    def _post(self, command: Callable[[], Any]) -> Future[Any]:
        """Have the engine's thread call `command` between two steps; the future holds what it returns or raises."""
        future: Future[Any] = Future()
        with self._lock:
            if self._death is None:
                self._commands.put((future, command))
            else:
                future.set_exception(self._dead())
        return future

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_commands(wait=not self._core.has_unfinished())
                if self._core.has_unfinished():
                    self._step()
            self._abort(list(self._streams))
            while self._core.has_unfinished():
                self._step()
            self._core.shutdown()
        except BaseException as error:
            self._die(error)
            with contextlib.suppress(Exception):  # what failed may fail again
                self._core.shutdown()
        else:
            self._die(None)

    def _run_commands(self, wait: bool) -> None:
        while True:
            try:
                future, command = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(command())
            except BaseException as error:
                future.set_exception(error)
                if self._in_step:
                    raise

    def _stop(self) -> None:
        self._stopping = True

    def _step(self) -> None:
        self._aborted.clear()
        self._in_step = True  # stays so when it fails: the core is not to be used again
        outputs = self._core.step()
        self._in_step = False
        if self._spec_log is not None:
            self._spec_log.poll()
        self._deliver(outputs)

    def _add(self, request_id: str, stream: _Stream, add: Callable[[], None]) -> None:
        if request_id in self._aborted:  # or the new request would be given the end of the old one
            self._step()
        add()
        self._streams[request_id] = stream

    def _drop(self, request_id: str, stream: _Stream) -> None:
        """The consumer is gone. If `add` refused its id as one in use, the id belongs to another's request."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._abort([request_id])

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._aborted.update(request_ids)
        self._core.abort(request_ids)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Waking a loop costs a system call: one for each loop, not for each output."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, _Item]]] = defaultdict(list)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            by_loop[stream.loop].append((stream, output))
            if output.finished:
                del self._streams[output.request_id]
        for loop, items in by_loop.items():
            if not _send(loop, items):
                self._drop_loop(loop)

    def _drop_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        lost = [request_id for request_id, stream in self._streams.items() if stream.loop is loop]
        for request_id in lost:
            del self._streams[request_id]
        self._abort(lost)

    def _die(self, cause: BaseException | None) -> None:
        death = EngineDeadError("the engine has been shut down" if cause is None else f"the engine failed: {cause!r}")
        death.__cause__ = cause
        with self._lock:
            self._death = death
        for stream in self._streams.values():
            _send(stream.loop, [(stream, self._dead())])
        self._streams.clear()
        while not self._commands.empty():
            future, _ = self._commands.get()
            if future.set_running_or_notify_cancel():
                future.set_exception(self._dead())

    def _dead(self) -> EngineDeadError:
        """An exception of its own for every caller: raising one object in many tasks would mix their tracebacks."""
        assert self._death is not None
        error = EngineDeadError(*self._death.args)
        error.__cause__ = self._death.__cause__
        return error


_Item = RequestOutput | EngineDeadError


class _Stream:
    """Outputs on their way from the engine's thread to one consumer. Used in the consumer's loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: RequestOutputKind) -> None:
        self.loop = loop
        self.ended = False  # the engine has nothing more to say
        self._newest_only = kind is RequestOutputKind.CUMULATIVE
        self._items: deque[_Item] = deque()
        self._ready = asyncio.Event()

    def put(self, item: _Item) -> None:
        if isinstance(item, EngineDeadError) or item.finished:
            self.ended = True
        if self._newest_only and isinstance(item, RequestOutput):
            self._items.clear()
        self._items.append(item)
        self._ready.set()

    async def next(self) -> RequestOutput:
        """The next output. Raises what ended the engine."""
        while not self._items:
            self._ready.clear()
            await self._ready.wait()
        item = self._items.popleft()
        if isinstance(item, EngineDeadError):
            raise item
        return item


def _send(loop: asyncio.AbstractEventLoop, items: Sequence[tuple[_Stream, _Item]]) -> bool:
    """Puts items into streams of `loop`, from another thread. False when the loop is closed."""
    try:
        loop.call_soon_threadsafe(_put_all, items)
    except RuntimeError:
        return False
    return True


def _put_all(items: Sequence[tuple[_Stream, _Item]]) -> None:
    for stream, item in items:
        stream.put(item)
