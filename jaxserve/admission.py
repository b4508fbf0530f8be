"""The door of the engine: what a user asks for becomes requests, or a ValueError that names field, value and range."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from jaxserve.prompt_scores import PromptScores
from jaxserve.request import Request
from jaxserve.sampling.registry import rows_of
from jaxserve.sampling.sampler import Sampler
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.manager import StructuredOutputs

Prompt = str | list[int] | dict[str, Any]


@dataclass(frozen=True, eq=False)
class Admission:
    """What requests are checked against. num_logits: V. seed: the engine's, for requests without one."""

    tokenizer: Any | None
    sampler: Sampler
    num_logits: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    seed: int
    structured: StructuredOutputs

    def validate(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int]]:
        """The prompt as (text or None, token ids). Raises ValueError naming field, value and range."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is a {type(params).__name__}; it must be a SamplingParams")
        text, token_ids = self.encode(prompt)
        if not token_ids:
            raise ValueError("prompt is empty; it must have at least one token")
        for token in token_ids:
            if not isinstance(token, int | np.integer) or isinstance(token, bool):
                raise ValueError(f"prompt_token_ids holds {token!r}; every token id must be an integer")
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"prompt_token_ids holds {token}; token ids must be in [0, {self.vocab_size})")
        params.verify(self.vocab_size, self.max_model_len, len(token_ids), self.eos_token_ids)
        self._check_features(params)
        rows_of(self.sampler.processors, params)
        if params.structured_outputs is not None:
            self.structured.validate(params.structured_outputs)
        return text, [int(token) for token in token_ids]

    def requests(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        number: int,
        *,
        priority: int,
        cache_salt: str | None,
        arrival_time: float,
    ) -> list[Request]:
        """The n sequences of a validated prompt, the number-th that the engine took."""
        _check_request(request_id, priority, cache_salt)
        seed = params.seed if params.seed is not None else _derive(self.seed, number)
        requests = [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_token_ids=token_ids,
                sampling_params=params,
                max_model_len=self.max_model_len,
                eos_token_ids=frozenset(self.eos_token_ids),
                priority=priority,
                arrival_time=arrival_time,
                cache_salt=cache_salt,
                seed=seed if index == 0 else _derive(seed, index),
                processor_rows=rows_of(self.sampler.processors, params),
                scores=self._prompt_scores(params, token_ids) if index == 0 else None,
            )
            for index in range(params.n)
        ]
        if params.structured_outputs is not None:
            for request in requests:
                request.constraint = self.structured.constraint(request, params.structured_outputs)
        return requests

    def _check_features(self, params: SamplingParams) -> None:
        """What depends on how the engine was made."""
        most = self.sampler.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and (value > most or (value == -1 and most < self.num_logits)):
                raise ValueError(f"{name} is {value}; it must be in [0, {most}], the engine's max_logprobs")
        if len(params.logprob_token_ids or ()) > self.sampler.max_listed:
            raise ValueError(
                f"logprob_token_ids has {len(params.logprob_token_ids or ())} ids; it must have at most "
                f"{self.sampler.max_listed} (the engine's max_logprobs is {most})"
            )
        if params.thinking_token_budget is not None and self.sampler.markers is None:
            raise ValueError(
                f"thinking_token_budget is {params.thinking_token_budget}, and this engine has no reasoning_config"
            )

    def _prompt_scores(self, params: SamplingParams, token_ids: list[int]) -> PromptScores | None:
        number = params.prompt_logprobs
        if number is None:
            return None
        return PromptScores(len(token_ids), self.sampler.max_logprobs if number < 0 else number)

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt as (text or None, token ids), which are not checked. Raises ValueError."""
        if isinstance(prompt, dict):
            if len(prompt.keys() & {"prompt", "prompt_token_ids"}) != 1 or len(prompt) != 1:
                raise ValueError(f"prompt has the keys {list(prompt)}; it must have one: prompt or prompt_token_ids")
            (prompt,) = prompt.values()
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt is a string, and this engine has no tokenizer: pass token ids")
            try:
                return prompt, self.tokenizer(prompt)["input_ids"]
            except (TypeError, UnicodeError) as error:  # a lone surrogate, for one
                raise ValueError(f"prompt is not valid text: {error}") from error
        if isinstance(prompt, list | tuple):
            return None, list(prompt)
        raise ValueError(f"prompt is a {type(prompt).__name__}; it must be a string or a list of token ids")


def _check_request(request_id: str, priority: int, cache_salt: str | None) -> None:
    """What is not seen until the request is scheduled, when it is too late to refuse it."""
    if not isinstance(request_id, str):
        raise ValueError(f"request_id is {request_id!r}; it must be a string")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ValueError(f"priority is {priority!r}; it must be an integer")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise ValueError(f"cache_salt is {cache_salt!r}; it must be a string or None")


def _derive(seed: int, index: int) -> int:
    """A 64-bit seed from a seed and a number: of the n-th sequence of a request, or of a request without a seed."""
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")
