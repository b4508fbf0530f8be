"""Grammars compiled off the loop: tables in processes, matchers in threads; compiled ones are kept."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxserve.structured.config import StructuredOutputsConfig
from jaxserve.structured.errors import GrammarError, NoTableError
from jaxserve.structured.lark import to_lark
from jaxserve.structured.matcher import LLTokens, MatcherGrammar
from jaxserve.structured.params import GrammarKey, StructuredOutputsParams
from jaxserve.structured.table import TokenTable
from jaxserve.structured.vocabulary import Vocabulary
from jaxserve.structured.worker import TABLE_KINDS, TableWorker

Grammar = TokenTable | MatcherGrammar
_LOGGER = logging.getLogger("jaxserve")


class _Job(NamedTuple):
    """What a compiled grammar is kept under. backend: not "auto" unless the engine's is."""

    key: GrammarKey
    stop_ids: frozenset[int]
    backend: str


class GrammarCompiler:
    """vocabulary: or a tokenizer, of which one is made when the first grammar is compiled. vocab_size: width of the
    logits. Safe to use from several threads."""

    def __init__(self, vocabulary: Any, vocab_size: int, config: StructuredOutputsConfig | None = None) -> None:
        self.config = config or StructuredOutputsConfig()
        self._source, self._vocab_size = vocabulary, vocab_size
        self._tables = ThreadPoolExecutor(self.config.num_workers, "grammar-table")
        self._matchers = ThreadPoolExecutor(self.config.num_workers, "grammar-matcher")
        self._workers: list[TableWorker] = []
        self._idle: queue.SimpleQueue[TableWorker] = queue.SimpleQueue()
        self._kept = _Kept(self.config.cache_size, self.config.cache_bytes)
        self._made = threading.Lock()  # of the next two, which take a second to make
        self._vocabulary: Vocabulary | None = None
        self._tokens: LLTokens | None = None

    def validate(self, params: StructuredOutputsParams) -> None:
        """What can be said at once: raises ValueError for a grammar that does not translate, or that the backend this
        engine was made with cannot hold."""
        backend = self._backend(params)
        if backend == "table" and params.kind not in TABLE_KINDS:
            raise ValueError(f"structured_outputs.{params.kind} is not regular, and this engine holds tables only")
        if params.kind not in TABLE_KINDS:
            to_lark(params.key())

    def submit(self, params: StructuredOutputsParams, stop_ids: frozenset[int]) -> Future[Grammar]:
        """Compile for a request that ends in one of `stop_ids`. Equal grammars are compiled once.

        The future raises GrammarError, ValueError for stop ids outside the vocabulary. To cancel it does not stop the
        compilation, for which others may wait.
        """
        key = params.key()
        plain = key._replace(options=tuple(option for option in key.options if option[0] != "backend"))
        job = _Job(plain, frozenset(stop_ids), self._backend(params))
        return _follower(self._kept.get(job, lambda: self._start(job)))

    def shutdown(self) -> None:
        """End the processes; what is not compiled yet fails."""
        self._tables.shutdown(wait=False, cancel_futures=True)
        self._matchers.shutdown(wait=False, cancel_futures=True)
        with self._made:
            for worker in self._workers:
                worker.close()

    def _backend(self, params: StructuredOutputsParams) -> str:
        return self.config.backend if params.backend == "auto" else params.backend

    def _start(self, job: _Job) -> Future[Grammar]:
        result: Future[Grammar] = Future()
        deadline = time.monotonic() + self.config.compile_timeout
        if job.backend == "llguidance" or job.key.kind not in TABLE_KINDS:
            _settle(result, self._matchers, lambda: self._matcher(job, deadline))
        elif job.backend == "table":
            _settle(result, self._tables, lambda: self._table(job, deadline))
        else:
            _settle(result, self._tables, lambda: self._table(job, deadline), self._instead(job, result))
        return result

    def _instead(self, job: _Job, result: Future[Grammar]) -> Callable[[NoTableError], None]:
        """Where there is no table: a matcher, however long that took to be known."""
        return lambda why: _settle(result, self._matchers, lambda: self._matcher(job, math.inf, why))

    def _table(self, job: _Job, deadline: float) -> TokenTable:
        _check_time(deadline)
        worker = self._worker()
        try:
            return worker.compile(job.key, job.stop_ids)
        finally:
            self._idle.put(worker)

    def _worker(self) -> TableWorker:
        """An idle one; there are as many as threads that ask."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            vocabulary = self._known_vocabulary()
            worker = TableWorker(vocabulary, self.config.limits, self.config.compile_timeout)
            with self._made:
                self._workers.append(worker)
            return worker

    def _matcher(self, job: _Job, deadline: float, no_table: NoTableError | None = None) -> MatcherGrammar:
        """no_table: why there is no table, said where there is no matcher either."""
        _check_time(deadline)
        vocabulary = self._known_vocabulary()
        with self._made:
            self._tokens = self._tokens or LLTokens(vocabulary)
        try:
            made = MatcherGrammar(
                self._tokens, to_lark(job.key), job.stop_ids, self.config.matcher_limits, job.key.is_json
            )
            for warning in made.warnings:  # only `lenient` ignores anything
                _LOGGER.warning("structured_outputs.%s: %s", job.key.kind, warning)
            return made
        except GrammarError as error:
            if no_table is None:
                raise
            raise GrammarError(f"{error}\n(and no table: {no_table})") from None

    def _known_vocabulary(self) -> Vocabulary:
        with self._made:
            if self._vocabulary is None:
                source = self._source
                made = source if isinstance(source, Vocabulary) else Vocabulary.from_tokenizer(source, self._vocab_size)
                self._vocabulary = made
            return self._vocabulary


class _Kept:
    """Futures of grammars, the least recently asked for dropped first. Failures are forgotten at once."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._lock = threading.RLock()
        self._futures: OrderedDict[_Job, Future[Grammar]] = OrderedDict()
        self._bytes: dict[_Job, int] = {}

    def get(self, job: _Job, start: Callable[[], Future[Grammar]]) -> Future[Grammar]:
        with self._lock:
            known = self._futures.get(job)
            if known is not None:
                self._futures.move_to_end(job)
                return known
            future = self._futures[job] = start()
        future.add_done_callback(lambda done: self._finished(job, done))
        return future

    def _finished(self, job: _Job, future: Future[Grammar]) -> None:
        with self._lock:
            if self._futures.get(job) is not future:
                return
            if future.exception() is not None:
                del self._futures[job]
                return
            self._bytes[job] = future.result().num_bytes
            while len(self._bytes) > self._max_count or sum(self._bytes.values()) > self._max_bytes:
                oldest = next(kept for kept in self._futures if kept in self._bytes)
                del self._futures[oldest], self._bytes[oldest]


def _settle(
    result: Future[Grammar],
    pool: ThreadPoolExecutor,
    make: Callable[[], Grammar],
    without_table: Callable[[NoTableError], None] | None = None,
) -> None:
    """Have `make` run in `pool` and `result` hold what comes of it; NoTableError goes to `without_table`."""

    def run() -> None:
        try:
            made = make()
        except NoTableError as error:
            (without_table or result.set_exception)(error)
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(made)

    def ended(future: Future[None]) -> None:
        if future.cancelled():
            result.set_exception(GrammarError("the compiler was shut down"))

    try:
        pool.submit(run).add_done_callback(ended)
    except RuntimeError:
        result.set_exception(GrammarError("the compiler was shut down"))


def _follower(shared: Future[Grammar]) -> Future[Grammar]:
    """A future of its own for everyone who waits, so that to cancel it concerns nobody else."""
    own: Future[Grammar] = Future()

    def copy(done: Future[Grammar]) -> None:
        if not own.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is None:
            own.set_result(done.result())
        else:
            own.set_exception(error)

    shared.add_done_callback(copy)
    return own


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise GrammarError("it waited longer for other grammars to compile than a request may wait")
