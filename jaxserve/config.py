"""Engine configuration, and the bucket lists that make every shape static."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.structured.config import StructuredOutputsConfig
from pallas_kernels.paged_attention import context_buckets

if TYPE_CHECKING:
    from jaxserve.speculative.config import SpeculativeConfig

STRUCTURED_OUTPUTS = StructuredOutputsConfig()  # as it is unless the engine is told otherwise
_POLICIES = ("fcfs", "priority")
_DTYPES = ("auto", "float32", "bfloat16")
IMPLEMENTATIONS = ("xla", "mosaic")
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits", "model_logprobs")


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig:
    """How a thinking section begins and ends: texts, which need a tokenizer, or token ids.

    The default is that of DeepSeek-R1, Qwen3 and those that follow them; REASONING_PARSERS has others by name.
    """

    start: str | Sequence[int] = "<think>"
    end: str | Sequence[int] = "</think>"

    @classmethod
    def by_name(cls, name: str) -> ReasoningConfig:
        """name: a reasoning parser of vLLM's. Raises ValueError for others."""
        if name not in REASONING_PARSERS:
            raise ValueError(f"reasoning_config is {name!r}; a name must be one of {', '.join(REASONING_PARSERS)}")
        return REASONING_PARSERS[name]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ReasoningConfig:
        if unknown := sorted(set(fields) - {"start", "end"}):
            raise ValueError(f"reasoning_config has the keys {unknown}; it must have only start and end")
        return cls(**fields)

    def token_ids(self, tokenizer: Any | None, vocab_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(start, end) as token ids. Raises ValueError naming the field."""
        start, end = (self._token_ids(name, tokenizer, vocab_size) for name in ("start", "end"))
        if start == end:
            raise ValueError(f"reasoning_config.start and .end are both {start}; they must differ")
        return start, end

    def _token_ids(self, name: str, tokenizer: Any | None, vocab_size: int) -> tuple[int, ...]:
        marker = getattr(self, name)
        if isinstance(marker, str):
            if tokenizer is None:
                raise ValueError(f"reasoning_config.{name} is {marker!r}, and this engine has no tokenizer: give ids")
            marker = tokenizer.encode(marker, add_special_tokens=False)
        ids = tuple(marker) if isinstance(marker, Sequence) else ()
        if not ids or not all(isinstance(i, int) and 0 <= i < vocab_size for i in ids):
            raise ValueError(
                f"reasoning_config.{name} is {marker!r}; it must be a text or ids in [0, {vocab_size - 1}]"
            )
        return ids


REASONING_PARSERS = {
    **dict.fromkeys(("deepseek_r1", "qwen3", "glm45"), ReasoningConfig()),
    "mistral": ReasoningConfig(start="[THINK]", end="[/THINK]"),
    "seed_oss": ReasoningConfig(start="<seed:think>", end="</seed:think>"),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything the engine needs besides the model. Raises ValueError naming the field, the value and the range.

    dtype: of weights, activations and KV. "auto" is bfloat16 on a GPU and on CPUs with bfloat16 instructions, else
        float32.
    max_model_len: most positions (prompt and output) of a request; None takes the model's own limit, at most 4096.
    max_num_seqs: most requests running at once, i.e. S.
    max_num_batched_tokens: token budget of a step (decode rows plus padded prefill tokens); None: a row for everyone
        and 512 prefill tokens on CPU, 8192 on GPU.
    block_size: positions in a KV page.
    num_blocks: pages in the pool; None: what max_num_seqs requests of max_model_len can use at most, within
        kv_cache_memory_fraction of the device's memory (of free host memory on CPU).
    tensor_parallel_size: devices the model is split over.
    enable_prefix_caching: reuse pages of a prompt's prefix that are computed already.
    enable_chunked_prefill: prompts may be computed in several steps beside running requests.
    long_prefill_token_threshold: most prefill tokens one request gets in a step; 0 = no limit of its own.
    scheduling_policy: "fcfs", or "priority" (smaller goes first).
    watermark: share of the pool kept free when new requests are admitted, so that running ones can grow.
    seed: randomness of requests that give no seed is a function of this and their number in line.
    keep_boundary_hidden: also keep the hidden state at the end of every page (for proposers that read them).
    logits_processors: of your own, classes or "module:Class" (jaxserve.sampling.processor.LogitsProcessor).
    max_logprobs: most log-probabilities a request may ask for per token; -1: the whole vocabulary, which the device
        then sorts and sends for every token of a batch in which a request asks for any.
    logprobs_mode: what log-probabilities are of. "raw_logprobs": the model's distribution, under the request's grammar
        where it has one; "model_logprobs": without the grammar; "processed_logprobs": what is drawn from, after all
        processors and filters; "raw_logits", "processed_logits": the same before normalisation (processed ones of a
        sampling request are relative to the largest). Prompts have only the raw kinds.
    sampling_implementation: of drawing and verification: "xla", or "mosaic", GPU kernels for Hopper (interpreted, very
        slowly, on a CPU). The tokens are the same. None leaves the choice to pallas_kernels.
    attention_implementation: of a decode's attention, the same names: "mosaic" reads the pages where they are (for
        bfloat16, heads of width 64 or 128). Draft models and heads take it where it serves them.
    speculative_config: how drafts are made and verified, a SpeculativeConfig or a dict of its fields
        (jaxserve.speculative.config). None: one token a step.
    reasoning_config: the marker sequences of thinking sections, a ReasoningConfig, a dict of its fields, or a name
        ("deepseek_r1", "qwen3", ...: REASONING_PARSERS). The grammar of a request begins after such a section, unless
        structured_outputs_config says otherwise.
    structured_outputs_config: limits and habits of structured output, a StructuredOutputsConfig or a dict of its fields
        (jaxserve.structured.config). None: there is none, and its programs are not compiled; so it is without a
        tokenizer.
    compilation_cache_dir: JAX's persistent compilation cache; None: ~/.cache/jaxserve, "" = off; a directory already
        set in JAX's own configuration wins.
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_fraction: float = 0.5
    tensor_parallel_size: int = 1
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    watermark: float = 0.01
    seed: int = 0
    keep_boundary_hidden: bool = False
    logits_processors: Sequence[Any] = ()
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    sampling_implementation: str | None = None
    attention_implementation: str | None = None
    reasoning_config: ReasoningConfig | Mapping[str, Any] | str | None = None
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None
    structured_outputs_config: StructuredOutputsConfig | Mapping[str, Any] | None = STRUCTURED_OUTPUTS
    compilation_cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, _DTYPES)
        _one_of("scheduling_policy", self.scheduling_policy, _POLICIES)
        for name in ("max_num_seqs", "block_size", "tensor_parallel_size"):
            _integer(name, getattr(self, name), 1)
        for name in ("max_model_len", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 1)
        if self.num_blocks is not None:
            _integer("num_blocks", self.num_blocks, 2)
        _integer("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _integer("seed", self.seed, -(2**63))
        _one_of("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        if self.sampling_implementation is not None:
            _one_of("sampling_implementation", self.sampling_implementation, IMPLEMENTATIONS)
        if self.attention_implementation is not None:
            _one_of("attention_implementation", self.attention_implementation, IMPLEMENTATIONS)
        _integer("max_logprobs", self.max_logprobs, -1)
        if isinstance(self.logits_processors, str) or not isinstance(self.logits_processors, Sequence):
            raise ValueError(f"logits_processors is {self.logits_processors!r}; it must be a list of classes or names")
        if isinstance(self.reasoning_config, Mapping):
            object.__setattr__(self, "reasoning_config", ReasoningConfig.from_dict(self.reasoning_config))
        elif isinstance(self.reasoning_config, str):
            object.__setattr__(self, "reasoning_config", ReasoningConfig.by_name(self.reasoning_config))
        if not isinstance(self.reasoning_config, ReasoningConfig | None):
            raise ValueError(
                f"reasoning_config is {self.reasoning_config!r}; it must be a ReasoningConfig, a dict, a name or None"
            )
        self.speculation  # noqa: B018  (checked)
        self.structured_outputs  # noqa: B018  (checked)
        if not isinstance(self.compilation_cache_dir, str | Path | None):
            raise ValueError(f"compilation_cache_dir is {self.compilation_cache_dir!r}; it must be a path, '' or None")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "keep_boundary_hidden"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        for name, low, high in (("kv_cache_memory_fraction", 0.0, 1.0), ("watermark", 0.0, 0.5)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"{name} is {value!r}; it must be a number in [{low}, {high}]")

    @cached_property
    def speculation(self) -> SpeculativeConfig | None:
        """speculative_config, checked."""
        from jaxserve.speculative.config import SpeculativeConfig  # which imports this module

        if isinstance(self.speculative_config, Mapping):
            return SpeculativeConfig.from_dict(self.speculative_config)
        if not isinstance(self.speculative_config, SpeculativeConfig | None):
            raise ValueError(
                f"speculative_config is {self.speculative_config!r}; it must be a SpeculativeConfig, a dict or None"
            )
        return self.speculative_config

    @cached_property
    def structured_outputs(self) -> StructuredOutputsConfig | None:
        """structured_outputs_config, checked."""
        value = self.structured_outputs_config
        if isinstance(value, Mapping):
            return StructuredOutputsConfig.from_dict(value)
        if not isinstance(value, StructuredOutputsConfig | None):
            raise ValueError(
                f"structured_outputs_config is {value!r}; it must be a StructuredOutputsConfig, a dict or None"
            )
        return value


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def _integer(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} is {value!r}; it must be an integer >= {low}")


@dataclass(frozen=True)
class Buckets:
    """The static shapes of an engine: what warm-up compiles is exactly what can be asked for.

    slots: leading slots a decode runs over. pages: context, in pages, that a decode's attention is given.
    prefill_tiles, prefill_pages: the same of a prefill of tiles of `tile` tokens; score_tiles: where the prompt's own
    log-probabilities are wanted.
    history: lengths a slot's history is uploaded in. table_rows: block-table rows changed at once. mask_rows: masks
    made on the host that are sent at once.
    """

    slots: tuple[int, ...]
    pages: tuple[int, ...]
    prefill_tiles: tuple[int, ...]
    score_tiles: tuple[int, ...]
    prefill_pages: tuple[int, ...]
    history: tuple[int, ...]
    table_rows: tuple[int, ...]
    mask_rows: tuple[int, ...]
    tile: int


def make_buckets(
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    block_size: int,
    tile: int,
    devices: int = 1,
    positions: int = 1,
    whole_context: bool = False,
) -> Buckets:
    """Small lists: a factor of two between neighbours where a too large bucket costs time, four where it does not; less
    for prefill, where arithmetic is all of the time.

    Slots come in multiples of `devices`, which share the last step. positions: 1 + K, at most. whole_context: attention
    is given all of a request's pages, and finds out itself how many there are to read.
    """
    pages = -(-max_model_len // block_size)
    return Buckets(
        slots=_ladder(devices, -(-max_num_seqs // devices) * devices, 2, skip=(2,)),
        pages=(pages,) if whole_context else context_buckets(pages, block_size),
        prefill_tiles=_halfway(_ladder(max(1, 16 // tile), max(1, max_num_batched_tokens // tile), 2)),
        score_tiles=_ladder(4, max(1, max_num_batched_tokens // tile), 4),
        prefill_pages=(pages,) if whole_context else _ladder(max(1, 128 // block_size), pages, 4),
        history=_ladder(64, max_model_len, 4),
        table_rows=_ladder(8, max_num_seqs, 4),
        mask_rows=_ladder(4, max_num_seqs * positions, 4),
        tile=tile,
    )


def _ladder(first: int, last: int, factor: int, skip: tuple[int, ...] = ()) -> tuple[int, ...]:
    steps = []
    while first < last:
        if first not in skip:
            steps.append(first)
        first *= factor
    return (*steps, last)


def _halfway(steps: tuple[int, ...]) -> tuple[int, ...]:
    """With a step between neighbours that are a factor of two apart."""
    return tuple(sorted({*steps, *(3 * a // 2 for a, b in pairwise(steps) if b == 2 * a and a > 1)}))


def bucket(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds `size`."""
    for b in buckets:
        if size <= b:
            return b
    raise ValueError(f"{size} exceeds the largest bucket {buckets[-1]}")
