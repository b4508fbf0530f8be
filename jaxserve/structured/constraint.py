"""What one request's output must satisfy, as the host follows it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.structured.matcher import ALL, Matcher, Window, new_matcher
from jaxserve.structured.table import START, TokenTable

if TYPE_CHECKING:
    from jaxserve.request import Request


class Constraint:
    """A grammar being compiled, then followed: by the device where it has room for the grammar's table, else by a
    matcher here, which must be told every token.

    end: the marker after which the grammar begins, None where it begins with the output.
    """

    def __init__(self, compiled: Future[Any], end: tuple[int, ...] | None) -> None:
        self._compiled, self._end = compiled, end
        self._matcher: Matcher | None = None
        self._begun = end is None
        self._tail: list[int] = []  # the last tokens of a thinking section, as many as the marker has

    @property
    def is_ready(self) -> bool:
        """Whether there is a grammar. One that failed has none: its request waits until its error is seen."""
        return self._compiled.done() and self._compiled.exception() is None

    @property
    def error(self) -> str | None:
        """Why there is no grammar; None when there is one, or not yet."""
        if not self._compiled.done():
            return None
        error = self._compiled.exception()
        return None if error is None else f"structured_outputs: {error}"

    @property
    def table(self) -> TokenTable | None:
        grammar = self._compiled.result()
        return grammar if isinstance(grammar, TokenTable) else None

    @property
    def is_on_host(self) -> bool:
        """Whether a matcher follows the output."""
        return self._matcher is not None

    def table_state(self, request: Request) -> int | None:
        """Where the text stands in the table; None while the grammar has not begun."""
        assert self.table is not None
        first = self._first_token(request)
        return None if first is None else self.table.advance(START, request.token_ids[first:])

    def follow_on_host(self, request: Request) -> None:
        """From now on a matcher follows the output; it is told what there is of it."""
        if self._matcher is not None:
            return
        self._matcher = new_matcher(self._compiled.result())
        first = self._first_token(request)
        self._begun = first is not None
        known = request.token_ids
        if first is not None:
            self._matcher.accept(known[first:])
        elif self._end is not None:
            self._tail = known[-len(self._end) :]

    def accept(self, tokens: Sequence[int]) -> int:
        """New output of a request that a matcher follows; how many of the tokens count: those after which nothing more
        can be said do not. Raises GrammarError for a token that is illegal."""
        assert self._matcher is not None
        count = self._enter(tokens)
        while count < len(tokens) and not self.is_exhausted:
            self._matcher.accept(tokens[count : count + 1])
            count += 1
        return count

    @property
    def is_exhausted(self) -> bool:
        """Whether only a stop id may follow."""
        return self._matcher is not None and self._begun and self._matcher.exhausted

    def window(self, drafts: Sequence[int], out: np.ndarray) -> Window | None:
        """The rows of out [1+K, W], before and after each draft, that the grammar is about; those before it begins, and
        behind the drafts, are set to allow everything."""
        assert self._matcher is not None
        out[:] = ALL
        begun, tail = self._begun, self._tail
        free = self._enter(drafts)  # drafts that are still free
        begins, self._begun, self._tail = self._begun, begun, tail
        return Window(self._matcher, drafts[free:], out[free : len(drafts) + 1]) if begins else None

    def forced(self, count: int) -> list[int]:
        """Up to `count` tokens that have to come next."""
        return self._matcher.forced(count) if self._matcher is not None and self._begun else []

    def _enter(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` come before the grammar; notes where it begins."""
        if self._begun:
            return 0
        assert self._end is not None
        for index, token in enumerate(tokens):
            self._tail = [*self._tail, token][-len(self._end) :]
            if tuple(self._tail) == self._end:
                self._begun = True
                return index + 1
        return len(tokens)

    def _first_token(self, request: Request) -> int | None:
        """Index of the first token that the grammar is about; None while there is none."""
        prompt = len(request.prompt_token_ids)
        if self._end is None:
            return prompt
        size, tokens = len(self._end), request.token_ids
        for after in range(prompt + 1, len(tokens) + 1):
            if tuple(tokens[max(0, after - size) : after]) == self._end:
                return after
        return None


def thinking_is_over(prompt: Sequence[int], start: tuple[int, ...], end: tuple[int, ...]) -> bool:
    """Whether the last marker in a prompt is the one that ends a thinking section."""

    def last(marker: tuple[int, ...]) -> int:
        size = len(marker)
        return next((i for i in range(len(prompt) - size, -1, -1) if tuple(prompt[i : i + size]) == marker), -1)

    return last(end) > last(start)
