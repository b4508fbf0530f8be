"""Trees of regular expressions to automata over bytes: Thompson's construction, then the subset construction.

Both are bounded, and ours: the automata of outlines-core are made for searching, which for expressions as plain as
[1-9][0-9]{0,31} needs 2**31 states.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from jaxserve.structured.errors import LimitError
from jaxserve.structured.regex_parser import Chars, Either, Node, Ranges, Repeat, Sequence

NUM_BYTES = 256
_SURROGATES = (0xD800, 0xDFFF)
_MEMBERS = 64  # times the states of an automaton: of the NFA, in all of them together
_LAST_OF_LENGTH = (0x7F, 0x7FF, 0xFFFF, 0x10FFFF)  # code points of so many bytes in UTF-8
Bytes = tuple[tuple[int, int], ...]  # one range of bytes after the other


class NFA:
    """States 0.. of which 0 accepts. edges[s]: (low byte, high byte, target); empty[s]: targets without a byte."""

    def __init__(self, tree: Node, max_states: int) -> None:
        self.edges: list[list[tuple[int, int, int]]] = [[]]
        self.empty: list[list[int]] = [[]]
        self._max_states = max_states
        self._known: dict[tuple[tuple[Bytes, ...], int], int] = {}
        self.start = self._build(tree, 0)

    def _state(self) -> int:
        if len(self.edges) >= self._max_states:
            raise LimitError(f"the expression takes more than {self._max_states} states before they are merged")
        self.edges.append([])
        self.empty.append([])
        return len(self.edges) - 1

    def _build(self, node: Node, then: int) -> int:
        """The state from which `node` leads to the state `then`."""
        if isinstance(node, Chars):
            return self._chars(tuple(_utf8(node.ranges)), then)
        if isinstance(node, Sequence):
            for part in reversed(node.parts):
                then = self._build(part, then)
            return then
        if isinstance(node, Either):
            return self._either([self._build(option, then) for option in node.options])
        return self._repeat(node, then)

    def _either(self, states: list[int]) -> int:
        state = self._state()
        self.empty[state] = states
        return state

    def _repeat(self, node: Repeat, then: int) -> int:
        entry = then
        if node.high is None:
            entry = self._state()
            self.empty[entry] = [self._build(node.body, entry), then]
        else:
            for _ in range(node.high - node.low):
                body = self._build(node.body, entry)
                if body == entry:
                    break
                entry = self._either([body, then])
        for _ in range(node.low):
            before = entry
            entry = self._build(node.body, entry)
            if entry == before:  # an empty body, perhaps a billion times
                break
        return entry

    def _chars(self, spelled: tuple[Bytes, ...], then: int) -> int:
        """Sequences of bytes that go on alike share their states."""
        known = self._known.get((spelled, then))
        if known is not None:
            return known
        state = self._state()
        for (low, high), group in groupby(spelled, key=lambda sequence: sequence[0]):
            rest = tuple(sequence[1:] for sequence in group)
            self.edges[state].append((low, high, self._chars(rest, then) if rest[0] else then))
        self._known[spelled, then] = state
        return state


def _utf8(ranges: Ranges) -> Iterator[Bytes]:
    """How the characters of `ranges` are spelled, in order; NUL and surrogates are not."""
    for low, high in ranges:
        for start, end in ((max(low, 1), min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)):
            if start <= end:
                yield from _spelled(start, end)


def _spelled(low: int, high: int) -> Iterator[Bytes]:
    """Cut where the number of bytes changes, and where a byte has to run through all of its values."""
    for last in _LAST_OF_LENGTH:
        if low <= last < high:
            yield from _spelled(low, last)
            low = last + 1
    first, last_bytes = chr(low).encode(), chr(high).encode()
    for i in range(1, len(first)):
        mask = (1 << (6 * i)) - 1
        if low & ~mask != high & ~mask:
            if low & mask:
                yield from _spelled(low, low | mask)
                yield from _spelled((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from _spelled(low, (high & ~mask) - 1)
                yield from _spelled(high & ~mask, high)
                return
    yield tuple(zip(first, last_bytes, strict=True))


def determinize(nfa: NFA, max_states: int) -> tuple[np.ndarray, np.ndarray]:
    """transitions [N, 256] int32, -1 illegal; final [N] bool; state 0 is the start. Raises LimitError."""
    class_of_byte, num_classes = _byte_classes(nfa)
    reach = _Reach(nfa, _MEMBERS * max_states)
    number = {reach.of((nfa.start,)): 0}
    by_targets: dict[tuple[int, ...], int] = {}
    queue, rows = list(number), []
    for subset in queue:
        row = [-1] * num_classes
        for byte_class, targets in _moves(nfa, subset, class_of_byte):
            state = by_targets.get(targets)
            if state is None:
                after = reach.of(targets)
                state = by_targets[targets] = number.setdefault(after, len(number))
                if state == len(queue):
                    queue.append(after)
                    if len(queue) > max_states:
                        raise LimitError(f"the automaton has more than {max_states} states")
            row[byte_class] = state
        rows.append(row)
    final = np.array([0 in subset for subset in queue])
    return np.array(rows, np.int32).reshape(len(rows), num_classes)[:, class_of_byte], final


def _byte_classes(nfa: NFA) -> tuple[list[int], int]:
    """The class of every byte: no edge tells two bytes of one class apart."""
    cuts = np.zeros(NUM_BYTES + 1, bool)
    for edges in nfa.edges:
        for low, high, _ in edges:
            cuts[low] = cuts[high + 1] = True
    cuts[0] = True
    classes = (np.cumsum(cuts[:NUM_BYTES]) - 1).tolist()
    return classes, classes[-1] + 1


def _moves(nfa: NFA, subset: frozenset[int], class_of_byte: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(class, states that it leads to), without what follows them by empty edges."""
    found: dict[int, set[int]] = {}
    for state in subset:
        for low, high, target in nfa.edges[state]:
            for byte_class in range(class_of_byte[low], class_of_byte[high] + 1):
                found.setdefault(byte_class, set()).add(target)
    for byte_class, targets in found.items():
        yield byte_class, tuple(sorted(targets))


class _Reach:
    """States behind empty edges; of these only those that read a byte or accept. Raises LimitError when all that it was
    asked for is more than max_members together, which bounds the time of the whole construction."""

    def __init__(self, nfa: NFA, max_members: int) -> None:
        self._nfa, self._left, self._max = nfa, max_members, max_members
        self._known: dict[int, frozenset[int]] = {}

    def of(self, states: tuple[int, ...]) -> frozenset[int]:
        if len(states) == 1:
            return self._of_one(states[0])
        parts = [self._of_one(state) for state in states]
        self._spend(sum(map(len, parts)))
        return frozenset().union(*parts)

    def _of_one(self, start: int) -> frozenset[int]:
        known = self._known.get(start)
        if known is None:
            seen, stack = {start}, [start]
            while stack:
                fresh = [s for s in self._nfa.empty[stack.pop()] if s not in seen]
                seen.update(fresh)
                stack += fresh
            self._spend(len(seen))
            known = frozenset(s for s in seen if s == 0 or self._nfa.edges[s])
            self._known[start] = known
        return known

    def _spend(self, members: int) -> None:
        self._left -= members
        if self._left < 0:
            raise LimitError(f"the automaton's states hold more than {self._max} of the expression's")
