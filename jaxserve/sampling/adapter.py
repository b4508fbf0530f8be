"""Legacy processors: a Python function for each request, called on the host in the middle of the step.

Slow by nature: the device stops, sends the batch's logits to the host, waits for Python and takes them back. It is
there so that existing code runs; `LogitsProcessor.apply` is the way to write new code.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxserve.sampling.processor import LogitsProcessor, ProcessorConfig, Row
from jaxserve.sampling_params import SamplingParams

RequestProcessor = Callable[..., Any]  # (output_ids, logits) or (prompt_ids, output_ids, logits) -> logits

_logger = logging.getLogger(__name__)


class AdapterLogitsProcessor(LogitsProcessor):
    """Subclass it and implement `new_request`; declare in `arguments` what that reads of extra_args.

    The functions get lists of int and logits [V] as float32 NumPy, which they may change in place; what they return is
    used. They are called once for every row, in any order, and must not remember anything between calls. One that
    raises ends its own request, with finish_reason "error".
    """

    def __init__(self, config: ProcessorConfig) -> None:
        super().__init__(config)
        # The device knows a function by number, not by slot: a step in flight may ask for a request that left its slot.
        self._numbers = itertools.count(1)
        self._functions: dict[int, tuple[RequestProcessor, int]] = {}
        self._failures: dict[int, str] = {}

    def new_request(self, params: SamplingParams) -> RequestProcessor | None:
        """The function of a request; None where it wants none."""
        raise NotImplementedError

    def row(self, params: SamplingParams) -> Any | None:
        function = self.new_request(params)
        if function is None:
            return None
        number = next(self._numbers)
        self._functions[number] = function, _num_arguments(function)
        row = np.array(number, np.int32)
        weakref.finalize(row, self._forget, number)  # the engine holds the row as long as the request
        return row

    def empty_row(self) -> Any:
        return np.array(0, np.int32)

    def apply_rows(self, logits: jax.Array, rows: Row) -> jax.Array:
        result = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
        return jax.pure_callback(
            self._call, result, logits, rows.params, rows.history, rows.num_tokens, rows.prompt_len
        )

    def failure(self, row: Any) -> str | None:
        return self._failures.get(int(row))

    def _call(self, logits: Any, numbers: Any, histories: Any, num_tokens: Any, prompt_lens: Any) -> np.ndarray:
        logits = np.array(logits, np.float32)  # a copy, to be changed
        histories, num_tokens, prompt_lens = (np.asarray(x) for x in (histories, num_tokens, prompt_lens))
        for slot, number in enumerate(np.asarray(numbers).tolist()):
            if number not in self._functions:
                continue
            for j, count in enumerate(num_tokens[slot].tolist()):
                prompt, output = np.split(histories[slot, :count], [prompt_lens[slot]])
                logits[slot, j] = self._call_one(number, prompt.tolist(), output.tolist(), logits[slot, j])
        return logits

    def _call_one(self, number: int, prompt: list[int], output: list[int], logits: np.ndarray) -> Any:
        function, arguments = self._functions[number]
        try:
            result = function(output, logits) if arguments == 2 else function(prompt, output, logits)
            return np.broadcast_to(np.asarray(result, np.float32), logits.shape)
        except Exception as error:  # of one request: no other must suffer
            _logger.exception("a logits processor of %s failed", type(self).__name__)
            self._failures[number] = f"logits processor {type(self).__name__}: {type(error).__name__}: {error}"
            return np.nan

    def _forget(self, number: int) -> None:
        self._functions.pop(number, None)
        self._failures.pop(number, None)


def _num_arguments(function: RequestProcessor) -> int:
    """2 or 3. Raises ValueError for a function of other signatures."""
    parameters = inspect.signature(function).parameters.values()
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)
    if count not in (2, 3):
        raise ValueError(f"{function!r} must take (output_ids, logits) or (prompt_ids, output_ids, logits)")
    return count
