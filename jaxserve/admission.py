"""The door of the engine: what a user asks for becomes requests, or a ValueError that names field, value and range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class PreparedRequest:
    """A request that was found right. text: of the prompt, where it was given as a text. processor_rows: of each."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None
    params: SamplingParams
    processor_rows: tuple[Any | None, ...]


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

    def prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedRequest:
        """Raises ValueError naming field, value and range."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is a {type(params).__name__}; it must be a SamplingParams")
        given, cache_salt = parse_prompt(prompt)
        text, token_ids = (given, self._encode(given)) if isinstance(given, str) else (None, given)
        if not token_ids:
            raise ValueError("prompt is empty; it must have at least one token")
        for token in token_ids:
            if not isinstance(token, int | np.integer) or isinstance(token, bool):
                raise ValueError(f"prompt_token_ids holds {token!r}; every token id must be an integer")
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"prompt_token_ids holds {token}; token ids must be in [0, {self.vocab_size})")
        params.verify(self.vocab_size, self.max_model_len, len(token_ids), self.eos_token_ids)
        self._check_features(params)
        rows = rows_of(self.sampler.processors, params)
        if params.structured_outputs is not None:
            self.structured.validate(params.structured_outputs)
        return PreparedRequest(text, [int(token) for token in token_ids], cache_salt, params, rows)

    def requests(
        self, request_id: str, prepared: PreparedRequest, number: int, *, priority: int, arrival_time: float
    ) -> list[Request]:
        """The n sequences of a request, the number-th that the engine took."""
        _check_request(request_id, priority)
        params = prepared.params
        seed = params.seed if params.seed is not None else _derive(self.seed, number)
        requests = [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_token_ids=prepared.token_ids,
                sampling_params=params,
                max_model_len=self.max_model_len,
                eos_token_ids=frozenset(self.eos_token_ids),
                priority=priority,
                arrival_time=arrival_time,
                cache_salt=prepared.cache_salt,
                seed=seed if index == 0 else _derive(seed, index),
                processor_rows=prepared.processor_rows,
                scores=self._prompt_scores(params, prepared.token_ids) if index == 0 else None,
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

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("prompt is a string, and this engine has no tokenizer: pass token ids")
        try:
            ids: list[int] = self.tokenizer(text)["input_ids"]
        except (TypeError, UnicodeError) as error:  # a lone surrogate, for one
            raise ValueError(f"prompt is not valid text: {error}") from error
        return ids


def parse_prompt(prompt: Prompt) -> tuple[str | list[int], str | None]:
    """The text or token ids, which are not checked, of a prompt in any of its forms, and its cache salt.

    Raises ValueError for other forms.
    """
    salt = None
    if isinstance(prompt, Mapping):
        keys = set(prompt) - {"cache_salt"}
        if keys not in ({"prompt"}, {"prompt_token_ids"}):
            raise ValueError(
                f"a prompt given as a dict must have either 'prompt' (a text) or 'prompt_token_ids' (a list), and may "
                f"have 'cache_salt'; got the keys {sorted(map(str, prompt))}"
            )
        salt, (name,) = prompt.get("cache_salt"), keys
        if salt is not None and not isinstance(salt, str):
            raise ValueError(f"cache_salt is {salt!r}; it must be a string or None")
        prompt = prompt[name]
        if isinstance(prompt, str) != (name == "prompt"):
            expected = "a text" if name == "prompt" else "a list of token ids"
            raise ValueError(f"{name} is {prompt!r:.80}; it must be {expected}")
    if isinstance(prompt, str):
        return prompt, salt
    if isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes):
        return list(prompt), salt  # type: ignore[arg-type]
    raise ValueError(
        f"a prompt must be a text, a list of token ids or a dict; got {type(prompt).__name__} {prompt!r:.80}"
    )


def _check_request(request_id: str, priority: int) -> None:
    """What is not seen until the request is scheduled, when it is too late to refuse it."""
    if not isinstance(request_id, str):
        raise ValueError(f"request_id is {request_id!r}; it must be a string")
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ValueError(f"priority is {priority!r}; it must be an integer")


def _derive(seed: int, index: int) -> int:
    """A 64-bit seed from a seed and a number: of the n-th sequence of a request, or of a request without a seed."""
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")
