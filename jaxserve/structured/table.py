"""A byte DFA and a vocabulary become tables that the device reads: a mask per state, a state after each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.structured.dfa import ByteDFA, GrammarLimits, group_rows
from jaxserve.structured.errors import GrammarError, LimitError
from jaxserve.structured.vocabulary import Vocabulary, pack_bits

START = 0
MAX_FORCED_BYTES = 256  # looked ahead to find the first token of a forced text


@dataclass(frozen=True, eq=False)
class TokenTable:
    """A grammar over token ids. States 0..N-3 are live, N-2 is `done` (a stop id came after a whole text), N-1 is
    `dead` (an illegal token came). State 0 is the start.

    transitions: [N, C] int16 or int32, the state after a token of a class.
    class_of_token: [V] uint8 or uint16. Class 0 is illegal everywhere, class C-1 holds the stop ids.
    masks: [M, W] uint32, W = ceil(V / 32); bit t % 32 of word t // 32 is set iff token t is legal.
    mask_of_state: [N] int32. The dead state allows everything: the row before it has rejected the draft already, and
        no row may be empty. So does, for a request without stop ids, a state whose text is over.
    final: [N] bool, whether a stop id is legal. exhausted: [N] bool, whether nothing else is: the request may finish.
    forced: [N] int32, the token by which the tokenizer goes on where the grammar leaves one continuation in bytes,
        else -1.
    """

    transitions: np.ndarray
    class_of_token: np.ndarray
    masks: np.ndarray
    mask_of_state: np.ndarray
    final: np.ndarray
    exhausted: np.ndarray
    forced: np.ndarray

    @property
    def num_states(self) -> int:
        return self.transitions.shape[0]

    @property
    def done(self) -> int:
        return self.num_states - 2

    @property
    def dead(self) -> int:
        return self.num_states - 1

    @property
    def vocab_size(self) -> int:
        return len(self.class_of_token)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values())

    def advance(self, state: int, tokens: Sequence[int]) -> int:
        """The state after `tokens`; `dead` once one of them is illegal or outside the vocabulary."""
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                return self.dead
            state = int(self.transitions[state, self.class_of_token[token]])
        return state

    def mask(self, state: int) -> np.ndarray:
        """[W] uint32: the tokens that are legal in `state`."""
        return self.masks[self.mask_of_state[state]]


def forced_tokens(table: TokenTable, state: int, max_k: int) -> list[int]:
    """Up to max_k tokens that continue a text in `state` where the grammar leaves no choice of bytes.

    The model could still spell the same bytes with other tokens, so they are drafts to verify, not output.
    """
    tokens: list[int] = []
    while len(tokens) < max_k and table.forced[state] >= 0:
        tokens.append(int(table.forced[state]))
        state = table.advance(state, tokens[-1:])
    return tokens


def compile_table(
    dfa: ByteDFA, vocabulary: Vocabulary, stop_ids: Sequence[int], limits: GrammarLimits | None = None
) -> TokenTable:
    """The table of the token sequences that spell a text of `dfa` and end in one of `stop_ids`.

    Stop ids spell nothing: they are legal iff the text is whole. Raises GrammarError when the vocabulary cannot spell
    any text, LimitError, and ValueError for a stop id outside the vocabulary.
    """
    limits = limits or GrammarLimits()
    for token in stop_ids:
        if not 0 <= token < len(vocabulary):
            raise ValueError(f"stop id {token} must be in [0, {len(vocabulary)})")
    columns, class_of_token = _walk(dfa, vocabulary, stop_ids, limits)
    live = _live_states(columns, dfa.final)
    columns, merged = _restrict(columns, live, limits)
    class_of_token = merged[class_of_token]
    final = dfa.final[live]
    num_live, stop_class = len(live), columns.shape[1]
    done, dead = num_live, num_live + 1
    transitions = np.full((num_live + 2, stop_class + 1), dead, np.int16 if num_live < 32_000 else np.int32)
    transitions[:num_live, :stop_class] = np.where(columns < 0, dead, columns)
    transitions[:num_live, stop_class][final] = done
    transitions[done, stop_class] = done
    class_of_token[list(stop_ids)] = stop_class
    final_all = np.append(final, [True, False])
    legal = transitions != dead
    goes_on = legal[:, :stop_class].any(axis=1)
    if not len(stop_ids):
        legal[~goes_on] = True
    first, mask_of_state = group_rows(legal)
    if len(first) > limits.max_masks:
        raise LimitError(f"the table has {len(first)} masks, over the limit of {limits.max_masks}")
    return TokenTable(
        transitions=transitions,
        class_of_token=class_of_token.astype(np.uint8 if stop_class < 256 else np.uint16),
        masks=_token_masks(legal[first], class_of_token),
        mask_of_state=mask_of_state.astype(np.int32),
        final=final_all,
        exhausted=final_all & ~goes_on,
        forced=np.append(_forced(dfa, live, vocabulary, transitions, class_of_token), [-1, -1]).astype(np.int32),
    )


def _token_masks(legal: np.ndarray, class_of_token: np.ndarray) -> np.ndarray:
    """[M, W] uint32 of legal [M, C]. The dead state's row is all ones, padding past the vocabulary included."""
    masks = pack_bits(legal[:, class_of_token])
    masks[legal.all(axis=1)] = 0xFFFFFFFF
    return masks


def _walk(
    dfa: ByteDFA, vocabulary: Vocabulary, stop_ids: Sequence[int], limits: GrammarLimits
) -> tuple[np.ndarray, np.ndarray]:
    """columns [N, G]: the state after a token of group g, -1 illegal (group 0 is illegal everywhere); [V] the groups.

    All tokens advance by one byte at a time. What counts of a beginning is the function from states to states that it
    is: beginnings of the same function are one node, so the nodes are few however many tokens there are.
    """
    first, byte_class = group_rows(dfa.transitions.T)
    step = np.vstack([dfa.transitions[:, first], np.full(len(first), -1, np.int32)])  # row -1 is the dead state
    spelled = ~np.isin(vocabulary.spelled_ids, list(stop_ids))
    tokens, ends = vocabulary.spelled_ids[spelled], np.cumsum(vocabulary.lengths)[spelled]
    offsets = ends - vocabulary.lengths[spelled]
    node = np.zeros(len(tokens), np.int64)
    current = np.arange(dfa.num_states, dtype=np.int32)[:, None]  # [N, nodes]
    illegal = np.full((dfa.num_states, 1), -1, np.int32)
    groups, class_of_token = [illegal], np.zeros(len(vocabulary), np.int64)
    while len(tokens):
        edge = node * len(first) + byte_class[vocabulary.flat[offsets]]
        used, edge = _numbered(edge, current.shape[1] * len(first))
        if len(used) * dfa.num_states > limits.max_walk_cells:
            raise LimitError(f"{len(used)} spellings x {dfa.num_states} states are over {limits.max_walk_cells}")
        after = step[current[:, used // len(first)], used % len(first)]
        distinct, node_of = group_rows(after.T)
        current, node = after[:, distinct], node_of[edge]
        ended, alive = offsets + 1 == ends, (current >= 0).any(axis=0)[node]
        class_of_token[tokens[ended & alive]] = node[ended & alive] + sum(g.shape[1] for g in groups)
        groups.append(current)
        keep = alive & ~ended
        tokens, node, ends, offsets = tokens[keep], node[keep], ends[keep], offsets[keep] + 1
    columns = np.concatenate(groups, axis=1)
    distinct, group = group_rows(columns.T)
    return columns[:, distinct], group[class_of_token]


def _numbered(values: np.ndarray, bound: int) -> tuple[np.ndarray, np.ndarray]:
    """np.unique with its inverse for `values` below `bound`, without sorting."""
    seen = np.zeros(bound, bool)
    seen[values] = True
    used = np.flatnonzero(seen)
    rank = np.empty(bound, np.int32)
    rank[used] = np.arange(len(used), dtype=np.int32)
    return used, rank[values]


def _live_states(columns: np.ndarray, final: np.ndarray) -> np.ndarray:
    """[L] the states that tokens reach from the start and from which tokens reach a final state, the start first."""
    alive = final.copy()
    while True:
        grown = alive | np.append(alive, False)[columns].any(axis=1)
        if (grown == alive).all():
            break
        alive = grown
    if not alive[START]:
        raise GrammarError("the tokens of this vocabulary cannot spell any text of the grammar")
    reached, frontier = np.zeros(len(final), bool), np.array([START])
    while len(frontier):
        reached[frontier] = True
        targets = np.unique(columns[frontier])
        targets = targets[targets >= 0]
        frontier = targets[alive[targets] & ~reached[targets]]
    return np.flatnonzero(reached)


def _restrict(columns: np.ndarray, live: np.ndarray, limits: GrammarLimits) -> tuple[np.ndarray, np.ndarray]:
    """columns [L, C] over live states only, equal ones merged with the illegal one first; [G] the new class."""
    rename = np.full(len(columns) + 1, -1, np.int32)
    rename[live] = np.arange(len(live))
    renamed = rename[columns[live]]
    distinct, merged = group_rows(renamed.T)  # column 0 is the illegal one, so its group is 0
    if (len(live) + 2) * (len(distinct) + 1) > limits.max_cells:
        raise LimitError(f"the table has {len(live)} states x {len(distinct)} classes, over {limits.max_cells} cells")
    return renamed[:, distinct], merged


def _forced(
    dfa: ByteDFA, live: np.ndarray, vocabulary: Vocabulary, transitions: np.ndarray, class_of_token: np.ndarray
) -> np.ndarray:
    """[L] int64. The last token of a forced text could go on past it, so it counts only when it is the whole text."""
    text_of = _forced_texts(dfa)
    dead = len(live) + 1
    first_of: dict[bytes, int] = {}
    forced = np.full(len(live), -1, np.int64)
    for row, state in enumerate(live):
        text = text_of(int(state))
        if text and text not in first_of:
            tokens = vocabulary.tokenize(text)
            first_of[text] = tokens[0] if tokens else -1
        token = first_of.get(text, -1)
        if token >= 0 and transitions[row, class_of_token[token]] != dead:
            forced[row] = token
    return forced


def _forced_texts(dfa: ByteDFA) -> Callable[[int], bytes]:
    """A function from a state to the bytes that must follow it."""
    legal = dfa.transitions >= 0
    single = (legal.sum(axis=1) == 1) & ~dfa.final
    byte = legal.argmax(axis=1)

    def text_of(state: int) -> bytes:
        text = bytearray()
        while single[state] and len(text) < MAX_FORCED_BYTES:
            text.append(int(byte[state]))
            state = int(dfa.transitions[state, byte[state]])
        return bytes(text)

    return text_of
