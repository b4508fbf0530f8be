"""A vocabulary that spells, for tests of structured output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import models

SPELLED = [
    *'abcdefghijklmnopqrstuvwxyz0123456789 {}[]",:.-+\\/_()<>=',
    *("foo", "bar", "foobar", "true", "false", "null", '"name"', '": ', '{"', '"}', "12", "ab", "abc", "},", ', "'),
    *("<think>", "</think>"),
]
EOS, EOT = len(SPELLED), len(SPELLED) + 1  # both end a text
PADDED = 88  # width of the logits
THINK, END = SPELLED.index("<think>"), SPELLED.index("</think>")


class SpelledTokenizer:
    """Greedy longest matches over the tokens `spelled`; the two ids behind them end a text."""

    def __init__(self, spelled: Sequence[str] = SPELLED) -> None:
        self._spelled = list(spelled)
        markers = [i for i, token in enumerate(self._spelled) if token in ("<think>", "</think>")]
        self.all_special_ids = (*markers, len(self._spelled), len(self._spelled) + 1)

    def __len__(self) -> int:
        return len(self._spelled) + 2

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            token = max((t for t in self._spelled if text.startswith(t)), key=len)
            ids.append(self._spelled.index(token))
            text = text[len(token) :]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join("" if i >= len(self._spelled) else self._spelled[i] for i in ids)


def spelled_model() -> models.MarkovLM:
    """Random logits, also for the padding behind the vocabulary, which is often the most likely."""
    table = 1.5 * np.random.default_rng(5).standard_normal((PADDED, PADDED)).astype(np.float32)
    return models.MarkovLM(table, eos_token_ids=(EOS, EOT))
