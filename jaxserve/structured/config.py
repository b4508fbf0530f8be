"""Limits and habits of structured output, for a whole engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.structured.dfa import GrammarLimits
from jaxserve.structured.params import BACKENDS

_MAX_FORCED = 128  # drafts that a step can verify


@dataclass(frozen=True, kw_only=True)
class MatcherLimits:
    """What llguidance may spend on one grammar; its own names and defaults. Which one is over ends that request alone.

    initial_lexer_fuel, max_grammar_size: when a grammar compiles. step_lexer_fuel, step_max_items, max_items_in_row:
    for one mask. max_lexer_states: of one matcher, 1 to 2 kB each.
    """

    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 200_000
    step_max_items: int = 50_000
    max_items_in_row: int = 2000
    max_lexer_states: int = 250_000
    max_grammar_size: int = 500_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _integer(f"matcher_limits.{name}", value, 1)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsConfig:
    """Raises ValueError naming the field.

    backend: of requests that say "auto".
    limits: what one table may take, and its compilation. matcher_limits: what one matcher may spend.
    num_workers: processes that compile tables, and threads that compile matchers.
    cache_size, cache_bytes: compiled grammars that are kept, and the memory of their tables.
    compile_timeout: seconds that a request waits for its grammar.
    pool_bytes: device memory for the tables of the requests that run.
    enable_in_reasoning: hold thinking sections to the grammar too.
    num_forced_tokens: drafts that are taken from what a grammar forces, where no speculation is configured; 0: none.
    """

    backend: str = "auto"
    limits: GrammarLimits = field(default_factory=GrammarLimits)
    matcher_limits: MatcherLimits = field(default_factory=MatcherLimits)
    num_workers: int = 1
    cache_size: int = 256
    cache_bytes: int = 1 << 30
    compile_timeout: float = 30.0
    pool_bytes: int = 64 << 20
    enable_in_reasoning: bool = False
    num_forced_tokens: int = 4

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> StructuredOutputsConfig:
        _only_known("structured_outputs_config", cls, fields)
        values = dict(fields)
        for name, kind in (("limits", GrammarLimits), ("matcher_limits", MatcherLimits)):
            if isinstance(values.get(name), Mapping):
                values[name] = _of_fields(name, kind, values[name])
        return cls(**values)

    def __post_init__(self) -> None:
        if not isinstance(self.limits, GrammarLimits) or not isinstance(self.matcher_limits, MatcherLimits):
            raise ValueError(
                "structured_outputs_config: limits and matcher_limits must be GrammarLimits, MatcherLimits"
            )
        if not (isinstance(self.compile_timeout, int | float) and self.compile_timeout > 0):
            raise ValueError(f"structured_outputs_config.compile_timeout={self.compile_timeout!r} must be positive")
        if self.backend not in BACKENDS:
            raise ValueError(f"structured_outputs_config.backend={self.backend!r} must be one of {', '.join(BACKENDS)}")
        for name, low in (("num_workers", 1), ("cache_size", 1), ("cache_bytes", 1), ("pool_bytes", 1)):
            _integer(name, getattr(self, name), low)
        _integer("num_forced_tokens", self.num_forced_tokens, 0, _MAX_FORCED)


def _of_fields(name: str, kind: type, fields: Mapping[str, Any]) -> Any:
    _only_known(f"structured_outputs_config.{name}", kind, fields)
    return kind(**fields)


def _only_known(name: str, kind: Any, fields: Mapping[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(kind)]
    if unknown := sorted(set(fields) - set(known)):
        raise ValueError(f"{name} has the keys {unknown}; it must have only {', '.join(known)}")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        expected = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
        raise ValueError(f"structured_outputs_config.{name} is {value!r}; it must be {expected}")
