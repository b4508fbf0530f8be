"""Tables are compiled in processes of their own: they do not hold up the engine's threads, and are ended when a grammar
takes more time or memory than it may. A process is this module under Python, without JAX; a dead one is replaced."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from typing import Any

from jaxserve.structured.dfa import GrammarLimits, compile_regex
from jaxserve.structured.errors import GrammarError, NoTableError
from jaxserve.structured.json_numbers import alternatives
from jaxserve.structured.json_schema import DEFAULT_WHITESPACE, schema_to_regex
from jaxserve.structured.json_strings import escape
from jaxserve.structured.params import GrammarKey
from jaxserve.structured.table import TokenTable, compile_table
from jaxserve.structured.vocabulary import Vocabulary

TABLE_KINDS = ("json", "regex", "choice")
_START_SECONDS = 120.0  # to start Python and read a vocabulary, on a busy machine
_ONE_THREAD = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS")}
_MAIN = "import sys; from jaxserve.structured.worker import main; main(int(sys.argv[1]))"


def compile_grammar(
    key: GrammarKey, vocabulary: Vocabulary, stop_ids: frozenset[int], limits: GrammarLimits
) -> TokenTable:
    """The table of `key`, in this process. Raises NoTableError, GrammarError, ValueError."""
    dfa = compile_regex(regex_of(key, limits), limits)
    return compile_table(dfa, vocabulary, sorted(stop_ids), limits)


def regex_of(key: GrammarKey, limits: GrammarLimits) -> str:
    """The regular expression of `key`. Raises NoTableError where there is none."""
    if key.kind == "regex":
        return key.text
    if key.kind == "choice":
        return alternatives([escape(choice) for choice in json.loads(key.text)]) or ""
    if key.kind != "json":
        raise NoTableError(f"{key.kind} is not a regular language")
    options = dict(key.options)
    space = "" if options.get("disable_any_whitespace") else options.get("whitespace_pattern", DEFAULT_WHITESPACE)
    close = bool(options.get("disable_additional_properties"))
    return schema_to_regex(
        json.loads(key.text), whitespace=space, close_objects=close, max_chars=limits.max_regex_chars
    )


class TableWorker:
    """One process, started when first needed. For one thread at a time; close() may come from another.

    timeout: seconds by the clock for one grammar, past which the process is killed. limits.max_seconds of CPU time and
    limits.max_bytes of address space beyond what it starts with end it, too.
    """

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits, timeout: float) -> None:
        self._setup, self._timeout, self._limits = (_picklable(vocabulary), limits), timeout, limits
        self._lock = threading.Lock()  # of the next three
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, None while there is none."""
        return None if self._process is None else self._process.pid

    def compile(self, key: GrammarKey, stop_ids: frozenset[int]) -> TokenTable:
        """Raises NoTableError, also for what the process did not survive, and GrammarError."""
        try:
            connection = self._connected()
            connection.send((key, stop_ids))
            if not connection.poll(self._timeout):
                raise NoTableError(f"compiling it took longer than {self._timeout} s")
            status, answer = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            raise NoTableError(self._cause_of_death()) from None
        except NoTableError:
            self._kill()
            raise
        if status == "table":
            return TokenTable(**answer)
        raise (NoTableError if status == "no table" else GrammarError)(answer)

    def close(self) -> None:
        """End the process; no other is started."""
        with self._lock:
            self._closed = True
        self._kill()

    def _connected(self) -> Connection:
        with self._lock:
            if self._closed:
                raise NoTableError("the compiler was shut down")
            if self._process is not None and self._process.poll() is not None:
                self._process = self._connection = None
            if self._connection is None:
                self._process, self._connection = _start()
            else:
                return self._connection
        self._connection.send_bytes(pickle.dumps(self._setup))
        if not self._connection.poll(_START_SECONDS):
            raise NoTableError(f"the process that compiles did not start in {_START_SECONDS} s")
        self._connection.recv_bytes()
        return self._connection

    def _kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            if self._connection is not None:
                self._connection.close()
            self._process = self._connection = None

    def _cause_of_death(self) -> str:
        process = self._process
        code = None if process is None else process.wait()
        self._kill()
        if code == -signal.SIGPROF:
            return f"compiling it took more than {self._limits.max_seconds} s of CPU time"
        return f"compiling it ended the process that did (status {code}), as too large expressions do"


def _picklable(vocabulary: Vocabulary) -> Vocabulary:
    """Without an encoder that cannot be sent: forced tokens are then the longest that fit."""
    try:
        pickle.dumps(vocabulary.encoder)
    except Exception:  # whatever a class that is not ours raises
        return Vocabulary(vocabulary.token_bytes)
    return Vocabulary(vocabulary.token_bytes, vocabulary.encoder)


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    paths = [os.path.abspath(path) for path in sys.path if path]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno())],
        env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)},
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a panic tells of itself here
        start_new_session=True,  # Ctrl-C is for the engine, which ends this process in its own time
    )
    theirs.close()
    return process, ours


def main(fd: int) -> None:
    """The process: reads jobs from a socket until the other end is closed."""
    connection: Connection = Connection(fd)
    vocabulary, limits = pickle.loads(connection.recv_bytes())
    vocabulary.tokenize(b"warm")
    with contextlib.suppress(GrammarError):  # a vocabulary without letters
        compile_table(compile_regex("a|b", limits), vocabulary, [], limits)
    _limit_memory(limits.max_bytes)
    connection.send_bytes(b"ready")
    while True:
        try:
            key, stop_ids = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, limits.max_seconds)  # nobody handles it: the process ends
        answer = pickle.dumps(_answer(key, vocabulary, stop_ids, limits), protocol=5)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(answer)


def _answer(
    key: GrammarKey, vocabulary: Vocabulary, stop_ids: frozenset[int], limits: GrammarLimits
) -> tuple[str, Any]:
    try:
        return "table", vars(compile_grammar(key, vocabulary, stop_ids, limits))
    except (NoTableError, MemoryError, RecursionError) as error:
        return "no table", str(error) or type(error).__name__
    except (ValueError, TypeError, KeyError, OverflowError, ArithmeticError) as error:  # of a malformed schema
        return "error", str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _limit_memory(num_bytes: int) -> None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux, which alone keeps to this limit
        return
    soft = math.ceil(used + num_bytes)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
