"""Cases that every implementation must answer alike: tests run them all, benchmarks take their shapes from here.

A case is a few rows of one vocabulary with a name for each row, so that a kernel, interpreted at seconds a row, is
compiled once for many of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.distribution import Filters
from pallas_kernels.drafted import Proposal

VOCABS = (100, 8193, 10000, 128256, 151936)  # of tests: multiples of nothing, of 16, of 256, of 128
BENCH_ROWS = (1, 8, 64, 256, 512)
BENCH_VOCABS = (32000, 128256, 151936)
_OFF = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class Case:
    """Rows with their names. logits [R, V]; words [R, 8] uint32; the fields of Filters [R]; allowed [R, V] bool, all
    True but in rows that are masked."""

    names: tuple[str, ...]
    logits: np.ndarray
    filters: Filters
    words: np.ndarray
    allowed: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        """`allowed` as implementations take it, [R, ceil(V / 32)] uint32."""
        bits = np.packbits(self.allowed, axis=1, bitorder="little")
        return np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4))).view("<u4").astype(np.uint32)

    @property
    def masked(self) -> np.ndarray:
        """[R, V] float32, the logits as the mask leaves them."""
        return np.where(self.allowed, self.logits.astype(np.float32), np.float32(-np.inf))


@dataclass(frozen=True)
class _Row:
    """words: None for random ones. allowed: None for no mask."""

    name: str
    logits: np.ndarray
    filters: dict[str, float]
    words: np.ndarray | None = None
    allowed: np.ndarray | None = None


def _row(name: str, logits: np.ndarray, words: Any = None, allowed: Any = None, **filters: float) -> _Row:
    return _Row(name, logits.astype(np.float32), _OFF | filters, words, allowed)


def sampling_case(vocab: int, seed: int = 0, only: str = "", dtype: Any = np.float32) -> Case:
    """The rows of one vocabulary whose names contain `only`; what a row holds does not depend on the others.

    dtype: of the logits, which are rounded to it."""
    rows = [row for row in _rows(vocab, np.random.default_rng(vocab + seed)) if only in row.name]
    random = np.random.default_rng(seed).integers(0, 2**32, (len(rows), 8), dtype=np.uint32)
    return Case(
        names=tuple(row.name for row in rows),
        logits=np.stack([row.logits for row in rows]).astype(dtype),
        filters=filters_of([row.filters for row in rows]),
        words=np.stack([words if row.words is None else row.words for row, words in zip(rows, random, strict=True)]),
        allowed=np.stack([np.ones(vocab, bool) if row.allowed is None else row.allowed for row in rows]),
    )


@dataclass(frozen=True)
class DraftCase:
    """Slots with their names and up to two drafts each. logits [S, 3, V], drafts [S, 2] int32, filters [S], words
    [S, 3, 8] uint32, uniforms [S, 2]; draft_logits [S, 2, V] and draft_filters [S], what drafts were drawn from; rates
    [2]."""

    names: tuple[str, ...]
    logits: np.ndarray
    drafts: np.ndarray
    filters: Filters
    words: np.ndarray
    uniforms: np.ndarray
    draft_logits: np.ndarray
    draft_filters: Filters
    rates: np.ndarray

    @property
    def proposal(self) -> Proposal:
        return Proposal(jnp.asarray(self.draft_logits), self.draft_filters)


def draft_case(vocab: int, only: str = "", dtype: Any = np.float32) -> DraftCase:
    """Slots of one vocabulary whose names contain `only`; what a slot holds does not depend on the others.

    dtype: of the logits, which are rounded to it."""
    rng = np.random.default_rng(vocab)
    slots = [slot for slot in _slots(vocab, rng) if only in slot[0]]
    names, logits, q, settings, uniforms = zip(*slots, strict=True)
    draft_logits = np.stack(q)
    drafts = np.argmax(draft_logits + np.random.default_rng(1).gumbel(size=(len(slots), 1, vocab)), axis=2)
    for row, name in enumerate(names):
        drafts[row, {"no draft": 0, "one draft": 1}.get(name, 2) :] = -1
    for row in (row for row, name in enumerate(names) if name == "greedy"):
        drafts[row, 0] = np.argmax(logits[row][0])  # one that coupled verification keeps too
    rng = np.random.default_rng(2)
    return DraftCase(
        names=names,
        logits=np.stack(logits).astype(dtype),
        drafts=drafts.astype(np.int32),
        filters=filters_of(settings),
        words=rng.integers(0, 2**32, (len(slots), 3, 8), dtype=np.uint32),
        uniforms=np.array(uniforms, np.float32),
        draft_logits=draft_logits.astype(dtype),
        draft_filters=filters_of([_draft_filters(name) for name in names]),
        rates=np.array([0.7, 0.5], np.float32),
    )


def _draft_filters(name: str) -> dict[str, float]:
    """Of a slot. Drafts are drawn without filters: one that "filtered" cuts off has no q."""
    return _OFF | {"temperature": 1.5 if "warm" in name else 1.0, "top_k": 20 if "filtered drafts" in name else 0}


def _slots(vocab: int, rng: np.random.Generator) -> list[tuple[str, np.ndarray, np.ndarray, dict[str, float], Any]]:
    """Name, target logits [3, V], draft logits [2, V], filters, uniforms of each slot."""
    flat, peaked, noise = 0.3 * rng.standard_normal((3, vocab)), 3 * rng.standard_normal((3, vocab)), rng.random((2, 2))
    bad, other = peaked.copy(), peaked[:2] + rng.standard_normal((2, vocab))
    bad[1, vocab // 2] = np.nan
    ties = rng.integers(0, 3, (3, vocab)).astype(np.float64)
    no_first, no_last = peaked.copy(), peaked.copy()
    no_first[0] = no_last[2] = -np.inf
    keep, reject = [0.0, 0.0], [0.01, 0.9999999]

    def slot(name: str, p: np.ndarray, q: np.ndarray, u: Any, **filters: float) -> Any:
        return name, p, q, _OFF | filters, u

    return [
        slot("greedy", peaked, other, noise[0], temperature=0.0),
        slot("plain", peaked, other, reject),
        slot("plain, flat", flat, flat[1:], reject, temperature=1.3),
        slot("plain, equal", peaked, peaked[:2], noise[1]),
        slot("top_k 50", peaked, other, reject, top_k=50),
        slot("top_p 0.9, warm drafts", peaked, other, keep, top_p=0.9),
        slot("top_p 0.9, flat", flat, flat[1:], reject, top_p=0.9),
        slot("NaN in the second row", bad, other, keep),
        slot("one draft", peaked, other, keep, top_k=5),
        slot("no draft", peaked, other, keep, top_p=0.9),
        slot("ties", ties, ties[1:], reject),
        slot("top_k 40 of ties", ties, ties[1:], reject, top_k=40),
        slot("top_k 1", peaked, other, reject, top_k=1),
        slot("top_k of everything", peaked, other, reject, top_k=vocab),
        slot("top_k 50, filtered drafts", peaked, other, reject, top_k=50),
        slot("top_p 1 - 1e-7", peaked, other, reject, top_p=0.9999999),
        slot("min_p 0.1", peaked, other, reject, min_p=0.1),
        slot("all -inf in the first row", no_first, other, keep),
        slot("all -inf in the last row", no_last, other, keep, top_k=50),
    ]


def filters_of(settings: Any) -> Filters:
    """Filters of rows given as one dict each."""
    columns = {name: np.array([s[name] for s in settings], np.float32) for name in ("temperature", "min_p", "top_p")}
    return Filters(top_k=np.array([s["top_k"] for s in settings], np.int32), **columns)


def _rows(vocab: int, rng: np.random.Generator) -> list[_Row]:
    peaked, flat = 3 * rng.standard_normal(vocab), 0.3 * rng.standard_normal(vocab)
    ties = rng.integers(0, 3, vocab).astype(np.float64)
    few = np.full(vocab, -np.inf)
    few[[vocab // 3, vocab - 1]] = 1.0, 2.0
    last = np.full(vocab, -50.0)
    last[-3:] = 5.0, 6.0, 7.0
    infinite = peaked.copy()
    infinite[[vocab // 2, vocab - 2]] = np.inf
    bad = peaked.copy()
    bad[vocab // 2] = np.nan
    zeros = np.where(np.arange(vocab) % 3 == 0, -0.0, np.where(np.arange(vocab) % 3 == 1, 0.0, -1.0))
    half = rng.random(vocab) < 0.5
    not_best = np.arange(vocab) != np.argmax(peaked)
    lowest, highest = np.zeros(8, np.uint32), np.full(8, 2**32 - 1, np.uint32)
    second = np.tile(np.array([2**32 - 1, 2**32 - 1, 0, 0], np.uint32), 2)  # the first number belongs to nobody
    return [
        _row("greedy", peaked, temperature=0.0),
        _row("greedy, ties", ties, temperature=0.0),
        _row("plain", peaked),
        _row("plain, flat", flat, temperature=1.3),
        _row("plain, all equal", np.zeros(vocab)),
        _row("plain, all the mass in the last tile", last),
        _row("plain, two tokens", few),
        _row("plain, cold", peaked, temperature=1e-6),
        _row("top_k 1", peaked, top_k=1),
        _row("top_k 50", peaked, top_k=50),
        _row("top_k 50, flat", flat, top_k=50),
        _row("top_k 50 of ties", ties, top_k=50),
        _row("top_k 3 of zeros of either sign", zeros, top_k=3),
        _row("top_k 300", peaked, top_k=min(300, vocab - 1)),
        _row("top_k of everything", peaked, top_k=vocab),
        _row("top_p 0.9", peaked, top_p=0.9),
        _row("top_p 0.9, flat", flat, top_p=0.9),
        _row("top_p 0.5 of ties", ties, top_p=0.5),
        _row("top_p 1 - 1e-7", peaked, top_p=0.9999999),
        _row("top_p 1e-9", peaked, top_p=1e-9),
        _row("top_k 50 and top_p 0.9", peaked, temperature=0.7, top_k=50, top_p=0.9),
        _row("top_k 50 and top_p 0.9, flat", flat, temperature=0.7, top_k=50, top_p=0.9),
        _row("min_p 0.1", peaked, min_p=0.1),
        _row("min_p 0.3, flat", flat, min_p=0.3),
        _row("min_p, top_k and top_p", peaked, temperature=1.5, min_p=0.05, top_k=40, top_p=0.8),
        _row("top_p of two tokens", few, top_p=0.9),
        _row("+inf", infinite, top_p=0.9),
        _row("NaN", bad, top_k=5),
        _row("all -inf", np.full(vocab, -np.inf), top_p=0.5),
        _row("words of 0", peaked, words=lowest),
        _row("words of 0, 50 left", peaked, words=lowest, top_k=50),
        _row("words of 0, flat nucleus", flat, words=lowest, top_p=0.9),
        _row("words of ones", peaked, words=highest),
        _row("words of ones, 50 left", peaked, words=highest, top_k=50),
        _row("words of ones, flat nucleus", flat, words=highest, top_p=0.9),
        _row("words of ones, two tokens", few, words=highest),
        _row("words of a second number", peaked, words=second, top_p=0.9),
        _row("masked", peaked, allowed=half),
        _row("masked, 50 left", peaked, allowed=half, top_k=50),
        _row("masked, flat nucleus", flat, allowed=half, top_p=0.9),
        _row("masked, the argmax forbidden", peaked, allowed=not_best, temperature=0.0),
        _row("masked, only the last token", peaked, allowed=np.arange(vocab) == vocab - 1, top_p=0.9),
        _row("masked, a NaN forbidden", bad, allowed=np.isfinite(bad), top_k=5),
        _row("masked, all forbidden", peaked, allowed=np.zeros(vocab, bool)),
    ]
