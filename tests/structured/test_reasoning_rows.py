"""Drafts across the end of a thinking section: which rows of the window are held to the grammar, and which drafts are
legal, on the device where a table holds the grammar and on the host where a matcher does."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.structured.constraint import Constraint
from jaxserve.structured.device import GrammarRow, Grammars, allowed_words, legal_prefix, states_of_window
from jaxserve.structured.dfa import GrammarLimits
from jaxserve.structured.errors import GrammarError
from jaxserve.structured.lark import to_lark
from jaxserve.structured.matcher import LLTokens, MatcherGrammar, fill_windows
from jaxserve.structured.params import StructuredOutputsParams
from jaxserve.structured.pool import CHUNK, GrammarPool, uploads
from jaxserve.structured.vocabulary import Vocabulary
from jaxserve.structured.worker import compile_grammar
from tests.structured.conftest import EOS

END = 300  # spells nothing
SPELLED = {' "': b' "', "END": END, "EOS": EOS}
SCHEMAS: dict[str, Any] = {
    "matcher": {"type": "object"},
    "table": {"type": "object", "properties": {"b": {"type": "null"}}, "additionalProperties": False},
}
# Drafts, how many of them are legal, and whether each row is held (C) or free (U); after an illegal draft rows do not
# matter.
WINDOWS: list[tuple[list[str], int, str]] = [
    ([" ", "z", " "], 3, "UUUU"),
    (["END", "{", ' "', "b"], 4, "UCCCC"),
    ([" ", "END", "{", ' "'], 4, "UUCCC"),
    ([" ", " ", "END"], 3, "UUUC"),
    ([" ", "END", "z", "{"], 2, "UUC"),
    ([" ", "END", "{", "z"], 3, "UUCC"),
    ([" ", "END", "{", "}", "EOS", " "], 5, "UUCCCC"),
]


def ids(vocabulary: Vocabulary, drafts: list[str]) -> list[int]:
    spelled = [SPELLED.get(draft, draft.encode()) for draft in drafts]
    return [token if isinstance(token, int) else vocabulary.token_bytes.index(token) for token in spelled]


def on_the_host(vocabulary: Vocabulary, tokens: LLTokens, drafts: list[int]) -> np.ndarray:
    """The window's masks [1+K, W]."""
    grammar: Future[Any] = Future()
    key = StructuredOutputsParams(json=SCHEMAS["matcher"]).key()
    grammar.set_result(MatcherGrammar(tokens, to_lark(key), frozenset({EOS})))
    constraint = Constraint(grammar, (END,))

    class Request:
        token_ids = prompt_token_ids = (0,)

    constraint.follow_on_host(Request())  # type: ignore[arg-type]
    words = np.empty((1 + len(drafts), 10), np.uint32)
    window = constraint.window(drafts, words)
    assert not [r for r in fill_windows([window] if window else []) if isinstance(r, GrammarError)]
    return words


def on_the_device(vocabulary: Vocabulary, drafts: list[int]) -> np.ndarray:
    key = StructuredOutputsParams(json=SCHEMAS["table"]).key()
    pool = GrammarPool(16, 10)
    acquired = pool.acquire(compile_grammar(key, vocabulary, frozenset({EOS}), GrammarLimits()))
    assert acquired is not None
    arena = np.zeros(pool.num_chunks * CHUNK, np.uint32)
    arena[: len(pool.empty())] = pool.empty()
    for address, chunk in uploads(acquired[0]):
        arena[address : address + len(chunk)] = chunk
    row = GrammarRow(jnp.int32(acquired[0].classes), jnp.int32(acquired[0].start))
    history = jnp.array([0, *drafts], jnp.int32)
    words = jnp.array(arena)
    states = states_of_window(words, (END,), row, jnp.int32(0), history, jnp.int32(1), len(drafts))
    masks = jnp.zeros((1, 1 + len(drafts), 10), jnp.uint32)
    return np.asarray(allowed_words(Grammars(words, masks), row.classes[None], states[None])[0])


@pytest.mark.parametrize("backend", ["matcher", "table"])
@pytest.mark.parametrize(("drafts", "legal", "rows"), WINDOWS, ids=["".join(window[0]) for window in WINDOWS])
def test_rows(
    small: Vocabulary, small_tokens: LLTokens, drafts: list[str], legal: int, rows: str, backend: str
) -> None:
    tokens = ids(small, drafts)
    words = on_the_host(small, small_tokens, tokens) if backend == "matcher" else on_the_device(small, tokens)
    prefix = np.asarray(legal_prefix(jnp.array(words)[None], jnp.array([tokens])))[0]
    assert prefix.tolist() == [True] * (1 + legal) + [False] * (len(tokens) - legal)
    free = (words == 0xFFFFFFFF).all(axis=1)
    assert "".join("U" if is_free else "C" for is_free in free[: len(rows)]) == rows
