"""The sampler without an engine around it: rows of requests whose prompts, outputs and drafts a test chooses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxserve import ProcessorConfig, SamplingParams
from jaxserve.batch import empty_row
from jaxserve.request import Request
from jaxserve.sampling.penalties import TokenUse, count_history, empty_use
from jaxserve.sampling.registry import make_processors, rows_of
from jaxserve.sampling.sampler import Sampler, Window
from jaxserve.sampling.thinking import Markers, section_start
from jaxserve.slot_row import slot_row
from pallas_kernels import top_k_top_p_sample

HISTORY = 32
ROWS = 6  # of a slot: the longest window that a test samples


class SpelledTokenizer:
    """Token i is the i-th letter; spaces are nothing. All that bad_words needs of a tokenizer."""

    def __len__(self) -> int:
        return 26

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) - ord("a") for c in text if c != " "]

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


@dataclass(frozen=True)
class Asked:
    """A request in the middle of its life, with drafts for what may come next."""

    params: SamplingParams
    prompt: Sequence[int] = (0,)
    output: Sequence[int] = ()
    drafts: Sequence[int] = ()
    seed: int = 0


@pytest.fixture(scope="session")
def asked() -> type[Asked]:
    return Asked


@pytest.fixture(scope="session")
def spelled() -> SpelledTokenizer:
    return SpelledTokenizer()


@pytest.fixture(scope="session")
def make_sampler(spelled: SpelledTokenizer) -> Callable[..., Sampler]:
    """A sampler with all built-in processors and those of `named`. The same one for the same arguments: it is part of
    the compiled program."""

    @functools.cache
    def make(vocab: int, named: tuple[Any, ...] = (), stop_ids: tuple[int, ...] = (), **fields: Any) -> Sampler:
        config = ProcessorConfig(
            vocab_size=vocab, max_model_len=HISTORY, max_num_seqs=8, tokenizer=spelled, stop_token_ids=stop_ids
        )
        defaults = {"vocab_limit": vocab, "max_logprobs": vocab, "logprobs_mode": "processed_logprobs"}
        return Sampler(processors=make_processors(named, config), **(defaults | fields))

    return make


def slot_of(sampler: Sampler, asked: Asked) -> tuple[Any, np.ndarray]:
    """(SlotRow, history [HISTORY]) as the engine would make them."""
    rows = rows_of(sampler.processors, asked.params)
    request = Request(
        request_id="r",
        prompt_token_ids=list(asked.prompt),
        sampling_params=asked.params,
        max_model_len=HISTORY,
        seed=asked.seed if asked.params.seed is None else asked.params.seed,
    )
    for token in asked.output:
        request.append_token(token)
    history = np.zeros(HISTORY, np.int32)
    history[: request.num_tokens] = request.token_ids
    slot = replace(
        slot_row(request, sampler.max_listed),
        uses=np.array([row is not None for row in rows], bool),
        processors=tuple(p.empty_row() if r is None else r for p, r in zip(sampler.processors, rows, strict=True)),
    )
    assert jax.tree.structure(slot) == jax.tree.structure(empty_row(sampler.processors, sampler.max_listed))
    return slot, history


@jax.jit
def _uses(use: TokenUse, history: jax.Array, num: jax.Array, prompt_len: jax.Array) -> TokenUse:
    def count(use: TokenUse, row: Any) -> tuple[TokenUse, None]:
        return count_history(use, *row), None

    return jax.lax.scan(count, use, (jnp.arange(len(num)), history, num, prompt_len))[0]


@jax.jit
def _sections(markers: Markers, history: jax.Array, num: jax.Array) -> jax.Array:
    return jax.vmap(lambda h, n: section_start(markers, h, n))(history, num)


@pytest.fixture(scope="session")
def make_window() -> Callable[..., tuple[Window, TokenUse]]:
    """The rows of some requests, 1 + `width` of each; rows after the last draft of a request do not count."""

    def make(sampler: Sampler, requests: Sequence[Asked], width: int, vocab: int) -> tuple[Window, TokenUse]:
        slots, histories = zip(*(slot_of(sampler, request) for request in requests), strict=True)
        rows = jax.tree.map(lambda *x: np.stack(x), *slots)
        history = np.stack(histories)
        drafts = np.array([[*r.drafts, *[-1] * (width - len(r.drafts))] for r in requests], np.int32)
        drafts = drafts.reshape(len(requests), width)
        used = np.arange(1 + width) <= np.array([[len(r.drafts)] for r in requests])
        section = np.full(len(requests), -1, np.int32)
        if sampler.markers is not None:
            section = np.asarray(_sections(sampler.markers, history, rows.num_tokens))
        use = _uses(empty_use(len(requests), vocab, HISTORY), history, rows.num_tokens, rows.prompt_len)
        return Window(rows, history, drafts, used, section), use

    return make


@struct.dataclass
class Sampled:
    """Of every row [b, 1+K] by itself, whatever became of the drafts before it."""

    token: Any
    finite: Any
    logprobs: Any


def sample_each_row(sampler: Sampler, logits: jax.Array, window: Window, use: TokenUse) -> Sampled:
    rows = sampler.prepare(logits, window, use, shaped=True)
    drawn = top_k_top_p_sample(rows.final, rows.filters, rows.words, window.used.reshape(-1))
    sampled = Sampled(drawn.token, drawn.finite, sampler.logprobs(rows, drawn.token, window))
    return jax.tree.map(lambda x: x.reshape(*window.used.shape, *x.shape[1:]), sampled)


@pytest.fixture(scope="session")
def each_row() -> Callable[..., Sampled]:
    """`sample_each_row`, to be compiled into a test's own function."""
    return sample_each_row


@pytest.fixture(scope="session")
def sample(make_window: Callable[..., Any]) -> Callable[..., Any]:
    """Samples [b, 1+K] as NumPy, of logits [b, 1+K, V] and as many requests. Padded to few shapes: few programs."""
    compiled = jax.jit(sample_each_row, static_argnums=0)

    def run(sampler: Sampler, logits: np.ndarray, requests: Sequence[Asked]) -> Any:
        b, width, vocab = logits.shape
        assert len(requests) == b
        more = -b % 4
        window, use = make_window(sampler, [*requests, *requests[:1] * more], ROWS - 1, vocab)
        padded = np.pad(logits, ((0, more), (0, ROWS - width), (0, 0)))
        return jax.tree.map(lambda x: np.asarray(x)[:b, :width], compiled(sampler, padded, window, use))

    return run


@pytest.fixture(scope="session")
def values_by_id() -> Callable[..., np.ndarray]:
    """What a sampler with max_logprobs=V says of every id: [..., V] from its top values and their ids."""

    def values(logprobs: Any) -> np.ndarray:
        result = np.full(logprobs.top.shape, np.nan, np.float32)
        np.put_along_axis(result, logprobs.top_ids, logprobs.top, axis=-1)
        return result

    return values
