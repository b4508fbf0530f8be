"""Grammars followed on the host, one matcher per request: through llguidance, or by walking a table."""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxserve.structured.config import MatcherLimits
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.json_digits import DigitMasks, JsonPlace
from jaxserve.structured.table import START, TokenTable
from jaxserve.structured.table import forced_tokens as forced_by_table
from jaxserve.structured.vocabulary import Vocabulary, pack_bits

ALL = np.uint32(0xFFFFFFFF)
_MAX_THREADS = 16  # that llguidance computes masks in


class Matcher(Protocol):
    """The state of one request's grammar behind its accepted tokens."""

    def fill(self, drafts: Sequence[int], out: np.ndarray) -> int:
        """The masks of 1 + K rows into `out` [1+len(drafts), W] uint32: row j holds the tokens that are legal behind
        drafts[:j]. Returns how many of the drafts are legal; the rows behind them allow everything.

        Stop ids are set iff the text is whole; padding and special tokens are clear. Where the text is over and there
        is no stop id to say so, a row allows everything: nothing that is drawn there is kept. Raises GrammarError when
        the grammar cannot go on, as when it uses up what it may spend in a step.
        """

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on by tokens of the output, of which the last may be a stop id. Raises GrammarError on an illegal one."""

    @property
    def exhausted(self) -> bool:
        """Whether only a stop id may follow."""

    @property
    def is_done(self) -> bool:
        """Whether a stop id was accepted."""

    def forced(self, max_tokens: int) -> list[int]:
        """Up to `max_tokens` tokens, as the tokenizer writes them, about whose bytes the grammar leaves no choice.
        The model may spell these bytes in other tokens: they are drafts."""


class Window(NamedTuple):
    """What Matcher.fill is asked for: the masks of one request's rows."""

    matcher: Matcher
    drafts: Sequence[int]
    out: np.ndarray  # [1+len(drafts), W] uint32


def fill_windows(windows: Sequence[Window]) -> list[int | GrammarError]:
    """Matcher.fill for each window, of one vocabulary, side by side: the matchers of llguidance are at the same row of
    their windows, and it computes their masks in threads of its own. Returns what `fill` returns or raises."""
    results: list[int | GrammarError] = [0] * len(windows)
    going: dict[int, Filling] = {}
    for number, (matcher, drafts, out) in enumerate(windows):
        if isinstance(matcher, LLGuidanceMatcher):
            going[number] = matcher.filling(drafts, out)
        else:
            try:
                results[number] = matcher.fill(drafts, out)
            except GrammarError as error:
                results[number] = error
    masks: dict[int, np.ndarray | None] = dict.fromkeys(going)
    while going:
        asking: dict[int, LLGuidanceMatcher] = {}
        for number, filling in list(going.items()):
            try:
                asking[number] = filling.send(masks[number])
            except StopIteration as end:
                results[number] = end.value
                del going[number]
            except GrammarError as error:
                results[number] = error
                del going[number]
        masks = dict(zip(asking, compute_masks(list(asking.values())), strict=True)) if asking else {}
    return results


class LLTokens:
    """A vocabulary as llguidance reads it; made once, shared by all matchers. One of the ids that spell nothing serves
    as its end of sequence; it is never shown to anyone, stop ids are ours."""

    is_tokenizer_wrapper = True  # llguidance asks for these six names
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLTokenizer

        spelled = vocabulary.token_bytes
        self.vocabulary = vocabulary
        self.special_token_ids = [i for i, text in enumerate(spelled) if not text]
        self.tokens = [text or b"" for text in spelled]
        if not self.special_token_ids:
            self.special_token_ids.append(len(self.tokens))
            self.tokens.append(b"")
        self.eos_token_id = self.special_token_ids[0]
        self.tokenizer = LLTokenizer(self, n_vocab=len(self.tokens))  # type: ignore[arg-type]
        self.num_words = -(-len(self.tokens) // 32)
        self.spelled = pack_bits(np.array([bool(text) for text in spelled]))  # [W]
        self.tokens = []  # copied by now
        self.digits = DigitMasks(vocabulary)

    @cached_property
    def executor(self) -> Any:
        """llguidance's threads."""
        from llguidance import LLExecutor

        return LLExecutor(num_threads=min(_MAX_THREADS, os.cpu_count() or 1))

    def __call__(self, text: str | bytes) -> list[int]:
        return self.vocabulary.tokenize(text.encode("utf-8") if isinstance(text, str) else text)


@dataclass(eq=False)
class MatcherGrammar:
    """A grammar that llguidance compiles. text: in Lark, as llguidance extends it. stop_ids: of the request. is_json:
    its texts are JSON, whose numbers then have no more digits than in tables.

    Raises GrammarError when it does not compile, or when no token may begin it.
    """

    tokens: LLTokens
    text: str
    stop_ids: frozenset[int]
    limits: MatcherLimits = field(default_factory=MatcherLimits)
    is_json: bool = False

    def __post_init__(self) -> None:
        outside = [token for token in self.stop_ids if not 0 <= token < len(self.tokens.vocabulary)]
        if outside:
            raise ValueError(f"stop ids {outside} must be in [0, {len(self.tokens.vocabulary)})")
        self._lock = threading.Lock()
        stops = np.zeros(len(self.tokens.vocabulary), bool)
        stops[list(self.stop_ids)] = True
        self.stop_mask = pack_bits(stops)
        self.text_mask = self.tokens.spelled & ~self.stop_mask
        first = LLGuidanceMatcher(self)
        self.warnings: tuple[str, ...] = tuple(first.warnings)
        first.fill((), np.empty((1, len(self.stop_mask)), np.uint32))  # makes the lexer's first states, too
        self._spare: LLGuidanceMatcher | None = first

    @property
    def num_bytes(self) -> int:
        """An estimate for the cache: what llguidance makes of a text is not told."""
        return 64 * len(self.text) + (64 << 10)

    def new_matcher(self) -> LLGuidanceMatcher:
        """For one more request. Compiles anew but for the first one: copies would share a lock."""
        with self._lock:
            spare, self._spare = self._spare, None
        return spare or LLGuidanceMatcher(self)


class LLGuidanceMatcher:
    """See Matcher. Stop ids are kept here: llguidance forgets the end of a text that it was told of."""

    def __init__(self, grammar: MatcherGrammar) -> None:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**vars(grammar.limits), verbose_errors=False)
        self._grammar = grammar
        self._matcher: Any = LLMatcher(grammar.tokens.tokenizer, grammar.text, log_level=0, limits=limits)
        self._done = False
        self._place = JsonPlace() if grammar.is_json else None
        self._check()

    @property
    def warnings(self) -> list[str]:
        return list(self._matcher.get_grammar_warnings())

    @property
    def is_done(self) -> bool:
        return self._done

    @property
    def exhausted(self) -> bool:
        return self._done or (self._matcher.is_stopped() and not self._matcher.is_error())

    def fill(self, drafts: Sequence[int], out: np.ndarray) -> int:
        (result,) = fill_windows([Window(self, drafts, out)])
        if isinstance(result, GrammarError):
            raise result
        return result

    def filling(self, drafts: Sequence[int], out: np.ndarray) -> Filling:
        """`fill`, which yields this matcher whenever it has to be sent the mask that llguidance computes for it."""
        consumed = legal = 0
        done, place = self._done, self._place
        for row in range(len(drafts) + 1):
            mask = None if done else (yield self)
            can_go_on = self._fill_row(out[row], mask, place)
            if row == len(drafts) or not can_go_on or not _has(out[row], drafts[row]):
                break
            legal += 1
            if drafts[row] in self._grammar.stop_ids:
                done = True
            elif not done:
                consumed += self._matcher.consume_token(drafts[row])
                self._check()
                place = self._after(place, drafts[row : row + 1])
        out[legal + 1 :] = ALL
        if consumed:
            self._matcher.rollback(consumed)
            self._check()
        return legal

    def _after(self, place: JsonPlace | None, tokens: Sequence[int]) -> JsonPlace | None:
        return None if place is None else place.after(self._grammar.tokens.vocabulary.decode(tokens))

    def _fill_row(self, row: np.ndarray, mask: np.ndarray | None, place: JsonPlace | None) -> bool:
        """Whether anything may follow. mask: that of llguidance; None behind a stop id."""
        grammar = self._grammar
        if mask is None:
            row[:] = grammar.stop_mask
        else:
            self._check()
            np.bitwise_and(mask[: len(row)], grammar.text_mask, out=row)
            if self._matcher.is_accepting():
                row |= grammar.stop_mask
            if place is not None:
                grammar.tokens.digits.keep_bounded(place, row)
        if row.any():
            return True
        if not (mask is None or self._matcher.is_accepting()):
            raise GrammarError("no token of this vocabulary can follow")
        row[:] = ALL
        return False

    def accept(self, tokens: Sequence[int]) -> None:
        tokens = list(tokens)
        text = next((i for i, token in enumerate(tokens) if token in self._grammar.stop_ids), len(tokens))
        if text and self._done:
            raise GrammarError(f"token {tokens[0]} came after the end of the text")
        taken = self._matcher.try_consume_tokens(tokens[:text]) if text else 0
        self._check()
        if taken < text:
            raise GrammarError(f"token {tokens[taken]} is not legal here")
        self._place = self._after(self._place, tokens[:text])
        if text < len(tokens):
            self._stop(tokens[text:])

    def _stop(self, tokens: list[int]) -> None:
        if not (self._done or self._matcher.is_accepting()):
            raise GrammarError(f"stop id {tokens[0]} came before the text was whole")
        self._done = True
        illegal = [token for token in tokens if token not in self._grammar.stop_ids]
        if illegal:
            raise GrammarError(f"token {illegal[0]} came after the end of the text")

    def forced(self, max_tokens: int) -> list[int]:
        if max_tokens <= 0 or self.exhausted:
            return []
        text = self._matcher.compute_ff_bytes()
        self._check()
        return self._grammar.tokens.vocabulary.tokenize(text)[:max_tokens] if text else []

    def _check(self) -> None:
        """Errors of llguidance are states, never exceptions, and look like the end of a text."""
        if self._matcher.is_error():
            raise GrammarError(_readable(self._matcher.get_error()))


Filling = Generator[LLGuidanceMatcher, "np.ndarray | None", int]


def compute_masks(matchers: Sequence[LLGuidanceMatcher]) -> np.ndarray:
    """[n, words] uint32: what llguidance allows next in each of the matchers, which share a vocabulary. Other threads
    run meanwhile. Errors are left in the matchers."""
    tokens = matchers[0]._grammar.tokens
    out = np.empty((len(matchers), tokens.num_words), np.uint32)
    inner = [(matcher._matcher, row) for row, matcher in enumerate(matchers)]
    if len(inner) == 1:
        inner[0][0].unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
    else:
        tokens.executor.unsafe_compute_mask_ptr(inner, out.ctypes.data, out.strides[0], len(out))
    return out


class TableMatcher:
    """See Matcher. A table walked on the host, where the device has no room for it."""

    def __init__(self, table: TokenTable) -> None:
        self._table, self._state = table, START

    @property
    def is_done(self) -> bool:
        return self._state == self._table.done

    @property
    def exhausted(self) -> bool:
        return bool(self._table.exhausted[self._state])

    def fill(self, drafts: Sequence[int], out: np.ndarray) -> int:
        table, state = self._table, self._state
        for row in range(len(drafts) + 1):
            out[row] = table.mask(state)
            if row == len(drafts):
                break
            state = table.advance(state, drafts[row : row + 1])
            if state == table.dead:
                break
        out[row + 1 :] = ALL
        return row

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            state = self._table.advance(self._state, (token,))
            if state == self._table.dead:
                raise GrammarError(f"token {token} is not legal here")
            self._state = state

    def forced(self, max_tokens: int) -> list[int]:
        return forced_by_table(self._table, self._state, max_tokens)


def new_matcher(grammar: MatcherGrammar | TokenTable) -> Matcher:
    """At the beginning of a text."""
    return grammar.new_matcher() if isinstance(grammar, MatcherGrammar) else TableMatcher(grammar)


def _has(mask: np.ndarray, token: int) -> bool:
    return 0 <= token < 32 * len(mask) and bool(int(mask[token // 32]) >> (token % 32) & 1)


def _readable(error: str) -> str:
    """What llguidance says, without its traces and what was added to the text of the request."""
    lines = [line.rstrip() for line in error.split("<backtrace>")[0].splitlines() if line.strip()]
    if not lines:
        return "llguidance failed"
    if lines[0] == "NoExtensionBias":
        return "no token of this vocabulary can follow"
    _, of_schema, why = lines[0].partition("failed to compile JSON schema: ")
    if of_schema:  # then comes our rule around it
        rest = itertools.takewhile(lambda line: not re.match(r"\s*\d+ \| ", line), lines[1:])
        return "\n".join([f"JSON Schema: {why}", *rest])
    return "\n".join(line for line in lines if "%llguidance" not in line)
