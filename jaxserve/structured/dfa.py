"""Regular expression to minimal DFA over bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.structured.errors import GrammarError, LimitError
from jaxserve.structured.nfa import NFA, determinize
from jaxserve.structured.regex_parser import parse
from jaxserve.structured.regex_syntax import strip_anchors

_NFA_STATES = 8  # times max_raw_states: what the expression itself may take


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """What one table grammar may take. On the 17 grammars measured the defaults cost at most 0.22 s to build.

    max_regex_chars: of the expression, also of one made from a schema.
    max_raw_states, max_states: of the DFA before and after minimisation.
    max_cells: of a table, states x token classes.
    max_masks: distinct masks of a table.
    max_walk_cells: entries of the largest intermediate array, states x distinct token spellings.
    max_seconds, max_bytes: CPU time and address space of the worker process that compiles one table.
    """

    max_regex_chars: int = 64 * 1024
    max_raw_states: int = 16_384
    max_states: int = 4096
    max_cells: int = 1 << 20
    max_masks: int = 512
    max_walk_cells: int = 1 << 27
    max_seconds: float = 2.0
    max_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"GrammarLimits.{name}={value} must be positive")


@dataclass(frozen=True, eq=False)
class ByteDFA:
    """Every state is reachable from state 0 and reaches a final one. transitions: [N, 256] int32, -1 where the byte
    is illegal; final: [N] bool."""

    transitions: np.ndarray
    final: np.ndarray

    @property
    def num_states(self) -> int:
        return len(self.final)

    def run(self, text: bytes, state: int = 0) -> int:
        """The state after `text`, -1 when it is no prefix of the language."""
        for byte in text:
            if state < 0:
                return -1
            state = int(self.transitions[state, byte])
        return state

    def accepts(self, text: bytes) -> bool:
        state = self.run(text)
        return state >= 0 and bool(self.final[state])


def compile_regex(regex: str, limits: GrammarLimits | None = None) -> ByteDFA:
    """The minimal DFA of the texts that `regex` matches as a whole; NUL is in none of them.

    Raises NoTableError for syntax that it does not know, LimitError, and GrammarError when there is no such text.
    """
    limits = limits or GrammarLimits()
    if len(regex) > limits.max_regex_chars:
        raise LimitError(f"the expression has {len(regex)} characters, over the limit of {limits.max_regex_chars}")
    try:
        nfa = NFA(parse(strip_anchors(regex)), _NFA_STATES * limits.max_raw_states)
    except RecursionError:
        raise LimitError("the expression is nested too deep") from None
    dfa = minimize(*determinize(nfa, limits.max_raw_states))
    if dfa.num_states > limits.max_states:
        raise LimitError(f"the automaton has {dfa.num_states} states, over the limit of {limits.max_states}")
    return dfa


def minimize(transitions: np.ndarray, final: np.ndarray) -> ByteDFA:
    """The minimal DFA with state 0 as start, without states that reach no final one (Moore's algorithm, vectorised).

    transitions: [N, 256] int32, -1 illegal; final: [N] bool. States of different distance to the nearest final state
    are never equal, so partitioning starts from distances: a chain of a thousand states takes one round, not a
    thousand. Raises GrammarError when the language is empty.
    """
    first, byte_class = group_rows(transitions.T)
    columns = transitions[:, first]
    distance = _distance_to_final(columns, final)
    if distance[0] < 0:
        raise GrammarError("the expression matches no text")
    alive = np.append(distance >= 0, False)
    columns = np.where(alive[columns], columns, -1)
    blocks, count = np.unique(distance, return_inverse=True)[1], 0
    while blocks.max() + 1 > count:
        count = blocks.max() + 1
        padded = np.append(blocks, -1)
        blocks = group_rows(np.column_stack([blocks, padded[columns]]))[1]
    return _quotient(columns[:, byte_class], final, blocks)


def group_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Equal rows of `rows` [N, C] form a group: the first row of every group [G], in order, and the group of every row
    [N]. Hashing whole rows beats np.unique(axis=0), which sorts them column by column."""
    rows = np.ascontiguousarray(rows)
    number: dict[bytes, int] = {}
    group = np.fromiter((number.setdefault(row.tobytes(), len(number)) for row in rows), np.int64, len(rows))
    return np.unique(group, return_index=True)[1], group


def _distance_to_final(columns: np.ndarray, final: np.ndarray) -> np.ndarray:
    """[N] int64: the fewest bytes from a state to a final one, -1 when there is no way."""
    distance = np.where(final, 0, -1)
    sources, edges = np.nonzero(columns >= 0)
    targets = columns[sources, edges]
    step = 0
    while True:
        reached = sources[(distance[targets] == step) & (distance[sources] < 0)]
        if not len(reached):
            return distance
        step += 1
        distance[reached] = step


def _quotient(transitions: np.ndarray, final: np.ndarray, blocks: np.ndarray) -> ByteDFA:
    """One state per block that is reachable from the start, in the order of a breadth-first search."""
    representative = np.unique(blocks, return_index=True)[1]
    merged = np.append(blocks, -1)[transitions[representative]]  # [blocks, 256]
    order, seen = [int(blocks[0])], {int(blocks[0])}
    for block in order:
        fresh = [int(b) for b in np.unique(merged[block]) if b >= 0 and int(b) not in seen]
        seen.update(fresh)
        order.extend(fresh)
    rename = np.full(len(representative) + 1, -1, np.int32)
    rename[order] = np.arange(len(order))
    return ByteDFA(rename[merged[order]], final[representative[order]])
