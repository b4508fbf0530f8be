"""The grammars of the requests that sit in slots: their tables on the device, or their matchers on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxserve.programs import Programs
from jaxserve.request import Request, RequestStatus
from jaxserve.structured.device import FREE, ON_HOST, Grammars
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.matcher import ALL, Window, fill_windows
from jaxserve.structured.pool import CHUNK, GrammarPool, PooledTable, uploads


class Masks(NamedTuple):
    """words [n, W] uint32 of rows [2, n]: slots and places in their windows; errors by request id."""

    rows: np.ndarray
    words: np.ndarray
    errors: dict[str, str]


class GrammarTables:
    """Owns the device's arena. A request is held from its first decode in a slot until it leaves the slot."""

    def __init__(
        self, num_bytes: int, slots: int, drafts: int, vocab_size: int, place: Callable[[Any], Any] = lambda x: x
    ) -> None:
        """num_bytes: of the arena. place: puts a pytree on the devices."""
        words = -(-vocab_size // 32)
        self._pool = GrammarPool(-(-num_bytes // (4 * CHUNK)), words)
        head = self._pool.empty()
        arena = jnp.zeros(self._pool.num_chunks * CHUNK, jnp.uint32).at[: len(head)].set(head)
        self.values: Grammars = place(Grammars(arena, jnp.zeros((slots, 1 + drafts, words), jnp.uint32)))
        self._words = words
        self._held: dict[str, tuple[Request, PooledTable | None]] = {}
        self.fill_seconds, self.bytes_sent = 0.0, 0  # of the host's masks

    @property
    def num_held(self) -> int:
        return len(self._held)

    def holds(self, request: Request) -> bool:
        return request.request_id in self._held

    def hold(self, request: Request, programs: Programs) -> tuple[int, int, int]:
        """What the device has to know of a request's grammar, its row's `classes` and `start`, and the state in which
        the text stands; sends the table there, if it has one and there is room.

        A table that finds no room is followed on the host.
        """
        constraint = request.constraint
        assert constraint is not None
        table = None if constraint.is_on_host else constraint.table
        placed = None if table is None else self._pool.acquire(table)
        if placed is None:
            constraint.follow_on_host(request)
            self._held[request.request_id] = request, None
            return ON_HOST, FREE, FREE
        pooled, is_new = placed
        if is_new:
            for address, words in uploads(pooled):
                self.values = programs["upload",](self.values, np.int32(address), words)
        self._held[request.request_id] = request, pooled
        state = constraint.table_state(request)
        return pooled.classes, pooled.start, FREE if state is None else pooled.state(state)

    def release(self) -> None:
        """Let go of requests that are about to leave their slots."""
        gone = [name for name, (request, _) in self._held.items() if request.status is not RequestStatus.RUNNING]
        for name in gone:
            _, pooled = self._held.pop(name)
            if pooled is not None:
                self._pool.release(pooled)

    def fill(self, matched: Sequence[tuple[int, Request]], drafts: np.ndarray) -> Masks:
        """The masks of requests that matchers follow, in the slots given. drafts: [S, K], -1 after the last."""
        started = time.perf_counter()
        width = 1 + drafts.shape[1]
        words = np.empty((len(matched), width, self._words), np.uint32)
        windows: dict[int, Window] = {}
        for number, (row, request) in enumerate(matched):
            known = drafts[row].tolist()
            known = known[: known.index(-1)] if -1 in known else known
            assert request.constraint is not None
            if (window := request.constraint.window(known, words[number])) is not None:
                windows[number] = window
        errors = {}
        for number, result in zip(windows, fill_windows(list(windows.values())), strict=True):
            if isinstance(result, GrammarError):
                words[number] = ALL
                errors[matched[number][1].request_id] = f"structured_outputs: {result}"
        slots = np.repeat([row for row, _ in matched], width)
        rows = np.stack([slots, np.tile(np.arange(width), len(matched))]).astype(np.int32)
        self.fill_seconds += time.perf_counter() - started
        self.bytes_sent += words.nbytes
        return Masks(rows, words.reshape(-1, self._words), errors)
