"""Speculation as the engine's loop sees it: how many drafts the next step gets, and what became of those before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxserve.speculative.auto import AutoK
from jaxserve.speculative.config import SpeculativeConfig
from jaxserve.speculative.stats import SpecDecodingStats


@dataclass
class Speculation:
    """config: None is none. draft_counts: every K that may be asked for. slots: bucket sizes of the batch."""

    config: SpeculativeConfig | None
    draft_counts: Sequence[int]
    slots: Sequence[int]
    stats: SpecDecodingStats = field(init=False)

    def __post_init__(self) -> None:
        self.stats = SpecDecodingStats(self.draft_counts[-1])
        automatic = self.config is not None and self.config.num_speculative_tokens == "auto"
        self._auto = AutoK(self.draft_counts, self.slots) if automatic else None

    def drafts_for(self, num_running: int) -> int:
        """K for a step of so many requests."""
        if self.config is None:
            return 0
        if self._auto is None or self.config.drafts_for(num_running) == 0:
            return self.config.drafts_for(num_running)
        return self._auto.choose(num_running)

    def observe(self, windows: Iterable[tuple[int, int]], num_drafts: int, seconds: float | None) -> None:
        """A collected step: (drafts verified, tokens emitted) of each of its requests, and its K.

        seconds: what it took; None where something else ran, too.
        """
        if self.config is None:
            return
        counted = [(drafts, emitted) for drafts, emitted in windows if emitted]
        for drafts, emitted in counted:
            self.stats.observe(drafts, emitted)
        if self._auto is not None and counted and seconds is not None:
            self._auto.observe(counted, len(counted), num_drafts, seconds)
