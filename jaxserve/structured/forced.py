"""How many drafts a step gets for what grammars force, where nothing else makes drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxserve.speculative.auto import AutoK


class ForcedTokens:
    """Drafts while some request is held to a grammar, as many as were measured to pay.

    What a grammar forces is accepted almost always, but most states force nothing. So what counts here, unlike for
    other drafts, is how often the whole window was of use.
    """

    def __init__(self, draft_counts: Sequence[int], slots: Sequence[int]) -> None:
        """draft_counts: every K that may be asked for; (0,) is none. slots: bucket sizes of the batch."""
        self._auto = AutoK(draft_counts, slots) if len(draft_counts) > 1 else None

    def drafts_for(self, num_running: int, structured: bool) -> int:
        """K for a step of so many requests. structured: whether any of them is held to a grammar."""
        return 0 if self._auto is None or not structured else self._auto.choose(num_running)

    def observe(self, emitted: Iterable[int], num_drafts: int, seconds: float | None) -> None:
        """A collected step: the tokens of each of its requests, and its K; `seconds` as for Speculation."""
        windows = [(num_drafts, count) for count in emitted if count]
        if self._auto is not None and windows and seconds is not None:
            self._auto.observe(windows, len(windows), num_drafts, seconds)
