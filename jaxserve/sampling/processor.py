"""Logits processors: pure functions of a row of logits, compiled into the step, with parameters for every request.

A processor is made once, when the engine starts. For a request it turns SamplingParams into a small pytree of NumPy
arrays of fixed shapes (`row`); the engine keeps these arrays on the device, one for each slot, and `apply` sees those
of the row it is applied to. Rows are the 1+K positions of a request's draft window: a row's history is what was
committed and the drafts before it, so a processor that is right for one token at a time is right under speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxserve.sampling_params import SamplingParams
from models.base import Array


@struct.dataclass
class Row:
    """What a processor knows of the row it is applied to."""

    params: Any  # what `row` returned for this request, or `empty_row`
    history: Array  # [H] int32: prompt, output, drafts; only the first num_tokens lie before this row
    num_tokens: Array  # int32
    prompt_len: Array  # int32

    @property
    def output_len(self) -> jax.Array:
        """Position of this row's token in the output."""
        return self.num_tokens - self.prompt_len

    def last(self, count: int) -> jax.Array:
        """[count] int32, the tokens before this row, newest last; -1 where there are none."""
        return self._newest(count, jnp.int32(0))

    def last_output(self, count: int) -> jax.Array:
        """As `last`, without the prompt."""
        return self._newest(count, self.prompt_len)

    def _newest(self, count: int, first: jax.Array) -> jax.Array:
        index = self.num_tokens - count + jnp.arange(count, dtype=jnp.int32)
        return jnp.where(index >= first, self.history[jnp.maximum(index, 0)], -1)


@dataclass(frozen=True)
class ProcessorConfig:
    """What a processor is made for. vocab_size: V, the width of the logits. tokenizer: None where there is none.

    stop_token_ids: those that the model ends with.
    """

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    tokenizer: Any | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class AddedRequest:
    """A request that took a slot. output_token_ids is the engine's own list: it grows as tokens are collected."""

    index: int
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]


@dataclass(frozen=True)
class BatchUpdate:
    """What became of the slots before a step, to be applied in this order: removed, added, moved (source, target).

    A slot that is freed and filled again at once is in `added` alone. batch_size: slots in use afterwards. Semantics
    of vLLM's BatchUpdate.
    """

    batch_size: int
    removed: Sequence[int] = field(default_factory=list)
    added: Sequence[AddedRequest] = field(default_factory=list)
    moved: Sequence[tuple[int, int]] = field(default_factory=list)


class LogitsProcessor:
    """Base of all processors. Subclass it and give the class to the engine: `LLM(..., logits_processors=[Mine])`.

    argmax_invariant: True promises that `apply` never changes which logit is the largest; it then runs after
        temperature and min_p, only for rows that sample. False: it runs after logit_bias, before the penalties.
    arguments: the keys of SamplingParams.extra_args that the processor reads. A key that no processor reads is refused.
    neutral_when_empty: True promises that `apply` leaves the logits as they are for `empty_row()`, which spares the
        engine a pass over them.
    """

    argmax_invariant: bool = False
    arguments: tuple[str, ...] = ()
    neutral_when_empty: bool = False

    def __init__(self, config: ProcessorConfig) -> None:
        self.config = config

    def validate(self, params: SamplingParams) -> None:
        """Raises ValueError, naming field, value and range, when `params` cannot be served."""

    def row(self, params: SamplingParams) -> Any | None:
        """The parameters of a request that uses this processor, shaped as `empty_row`; None for others. Kept for the
        life of the request."""
        raise NotImplementedError

    def empty_row(self) -> Any:
        """A pytree of NumPy arrays: what the slots of other requests hold. Its shapes and dtypes are fixed."""
        raise NotImplementedError

    def apply(self, logits: jax.Array, row: Row) -> jax.Array:
        """[V] float32 -> [V] float32. Pure and traceable; vmapped over all rows."""
        raise NotImplementedError

    def apply_rows(self, logits: jax.Array, rows: Row) -> jax.Array:
        """[B, 1+K, V] -> the same. rows: fields with a leading [B], num_tokens [B, 1+K].

        A processor may replace this where it knows better than `vmap`.
        """
        return over_rows(self.apply)(logits, rows)

    def failure(self, row: Any) -> str | None:
        """Why the logits of a request with this `row` were made NaN by the processor; None where it did not."""
        return None

    def update_state(self, update: BatchUpdate | None) -> None:
        """Told of every change of the slots, before the step that sees it; None when there was none. Host only."""


def over_rows(apply: Any) -> Any:
    """A function of (logits [V], Row) over [B, 1+K, V]: the rows of a slot share all but their num_tokens."""
    window = jax.vmap(apply, in_axes=(0, Row(params=None, history=None, num_tokens=0, prompt_len=None)))
    return jax.vmap(window)


def check_traceable(processor: LogitsProcessor, history: int) -> None:
    """Trace `apply` as the step will. Raises ValueError with the processor's name and what went wrong."""
    name = type(processor).__name__
    i32 = jax.ShapeDtypeStruct((1,), jnp.int32)
    logits = jax.ShapeDtypeStruct((1, 1, processor.config.vocab_size), jnp.float32)
    try:
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *jnp.shape(x)), x.dtype), processor.empty_row())
        rows = Row(
            params=params,
            history=jax.ShapeDtypeStruct((1, history), jnp.int32),
            num_tokens=jax.ShapeDtypeStruct((1, 1), jnp.int32),
            prompt_len=i32,
        )
        result = jax.eval_shape(processor.apply_rows, logits, rows)
    except Exception as error:
        raise ValueError(f"logits processor {name} cannot be compiled: {type(error).__name__}: {error}") from error
    if getattr(result, "shape", None) != logits.shape or result.dtype != logits.dtype:
        raise ValueError(
            f"logits processor {name} must return logits as it got them, [V] float32; "
            f"it returns {jax.tree.map(lambda x: f'{x.dtype}{list(x.shape[2:])}', result)}"
        )


def checked_row(processor: LogitsProcessor, params: SamplingParams) -> Any | None:
    """`row`. Raises ValueError where it does not fit `empty_row`."""
    empty, row = processor.empty_row(), processor.row(params)
    if row is None:
        return None
    expected, got = (jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree) for tree in (empty, row))
    if expected != got:
        raise ValueError(f"row() of logits processor {type(processor).__name__} gave {got}; empty_row() has {expected}")
    return row
