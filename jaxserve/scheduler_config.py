"""Limits and policy of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy. Raises ValueError for values that cannot work together."""

    max_num_seqs: int
    max_num_batched_tokens: int  # positions per step: decode rows and padded prefill tokens
    max_model_len: int
    block_size: int
    policy: str = "fcfs"  # or "priority": lower Request.priority first, then earlier arrival
    enable_chunked_prefill: bool = True
    num_speculative_tokens: int = 0  # K, at most
    num_lookahead_tokens: int = 0  # further KV positions that a proposer writes ahead of a step
    long_prefill_token_threshold: int = 0  # most prefill tokens of one request in one step; 0 is no limit
    prefill_tile: int = 1  # a chunk is padded to a multiple of this

    def __post_init__(self) -> None:
        minima = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 2, "block_size": 1}
        minima |= {
            "num_speculative_tokens": 0,
            "num_lookahead_tokens": 0,
            "long_prefill_token_threshold": 0,
            "prefill_tile": 1,
        }
        for name, minimum in minima.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy must be 'fcfs' or 'priority', got {self.policy!r}")
        # Room for one row of every running request and one tile of prefill: neither can starve the other.
        self._check_budget("max_num_seqs + prefill_tile", self.max_num_seqs + self.prefill_tile)
        if not self.enable_chunked_prefill:
            self._check_budget("max_model_len (padded) without chunked prefill", self.padded(self.max_model_len))
            if self.long_prefill_token_threshold:
                raise ValueError(
                    "long_prefill_token_threshold must be 0 without chunked prefill, "
                    f"got {self.long_prefill_token_threshold}"
                )

    def _check_budget(self, what: str, minimum: int) -> None:
        if self.max_num_batched_tokens < minimum:
            raise ValueError(
                f"max_num_batched_tokens must be at least {what} = {minimum}, got {self.max_num_batched_tokens}"
            )

    def padded(self, count: int) -> int:
        """Positions that a prefill chunk of `count` tokens occupies."""
        return -(-count // self.prefill_tile) * self.prefill_tile
