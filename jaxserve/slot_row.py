"""What the device is told of a request when it takes a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxserve.batch import SlotRow, empty_row
from jaxserve.request import Request
from jaxserve.sampling.penalties import Penalties
from jaxserve.sampling_params import MAX_STOP_IDS, SamplingParams
from pallas_kernels import Filters

_INT32_MAX = 2**31 - 1


def slot_row(request: Request, listed: int) -> SlotRow:
    """A request's parameters as device values (NumPy: nothing is compiled to make them). Processors are left out."""
    p = request.sampling_params
    seed = request.seed & (2**64 - 1)
    return replace(
        empty_row((), listed),
        num_tokens=np.int32(request.num_tokens),
        prompt_len=np.int32(len(request.prompt_token_ids)),
        max_tokens_total=np.int32(request.max_total_tokens),
        stop_ids=_padded(sorted(request.stop_ids), MAX_STOP_IDS),
        seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        filters=Filters(
            temperature=_temperature(p.temperature),
            min_p=np.float32(p.min_p),
            top_k=np.int32(max(p.top_k, 0)),
            top_p=np.float32(p.top_p),
        ),
        penalties=Penalties(
            repetition=np.float32(p.repetition_penalty),
            frequency=np.float32(p.frequency_penalty),
            presence=np.float32(p.presence_penalty),
        ),
        thinking_budget=np.int32(-1 if p.thinking_token_budget is None else p.thinking_token_budget),
        num_logprobs=np.int32(_num_logprobs(p)),
        logprob_ids=_padded(p.logprob_token_ids or (), listed),
    )


def _num_logprobs(params: SamplingParams) -> int:
    if not params.wants_logprobs:
        return -1
    return _INT32_MAX if params.logprobs == -1 else params.logprobs or 0


def _padded(ids: Sequence[int], size: int) -> np.ndarray:
    return np.array([*ids, *[-1] * (size - len(ids))], np.int32)


def _temperature(value: float) -> np.float32:
    """In float32, where neither the smallest becomes 0 (greedy) nor the largest infinite."""
    limits = np.finfo(np.float32)
    return np.float32(np.clip(value, limits.tiny, limits.max) if value > 0 else 0)
