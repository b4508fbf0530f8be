"""From a model and a configuration to the parts of an engine: sizes, buckets, processors, proposer, sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

import models
from jaxserve.config import Buckets, EngineConfig, ReasoningConfig, make_buckets
from jaxserve.sampling.processor import ProcessorConfig
from jaxserve.sampling.registry import make_processors
from jaxserve.sampling.sampler import Sampler
from jaxserve.sampling.thinking import Markers
from jaxserve.scheduler_config import SchedulerConfig
from jaxserve.speculative import SuffixProposer, Target, make_proposer, make_suffix_proposer
from jaxserve.speculative.build import required_feature_layers
from jaxserve.speculative.config import SpeculativeConfig
from jaxserve.speculative.proposer import Proposer
from jaxserve.step import Parts
from jaxserve.structured.config import StructuredOutputsConfig
from models.base import Model
from models.sharding import make_mesh

_DEFAULT_MAX_MODEL_LEN = 4096
_TILE = {"cpu": 8, "gpu": 128}  # prefill tokens that share one gather of their context
_BUDGET = {"cpu": 512, "gpu": 8192}  # prefill tokens beside the decode rows


@dataclass(frozen=True, eq=False)
class Assembly:
    """Everything that is decided before anything is put on a device.

    draft_counts: every K that a step may have. suffix: drafts made on the host; those of the device are of
    parts.proposer. structured: None where no request may have a grammar.
    """

    parts: Parts
    scheduler: SchedulerConfig
    buckets: Buckets
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    draft_counts: tuple[int, ...]
    suffix: SuffixProposer | None
    keep_boundary_hidden: bool
    structured: StructuredOutputsConfig | None

    @property
    def max_model_len(self) -> int:
        return self.scheduler.max_model_len


def assemble(model: Model, tokenizer: Any | None, config: EngineConfig) -> Assembly:
    """Raises ValueError naming what does not fit together."""
    max_model_len = _max_model_len(config, model)
    if hasattr(model, "with_max_model_len"):
        model = model.with_max_model_len(max_model_len)
    if config.attention_implementation is not None:
        model = _with_attention(model, config)
    speculation = config.speculation
    suffix = proposer = None
    if speculation is not None:
        if layers := required_feature_layers(speculation, model):
            model = model.with_feature_layers(layers)  # type: ignore[attr-defined]
        target = Target(model, config.block_size, max_model_len, config.tensor_parallel_size, tokenizer)
        suffix = make_suffix_proposer(speculation) if speculation.method == "suffix" else None
        proposer = make_proposer(speculation, target) if suffix is None else None
    vocab_size = model.vocab_size if tokenizer is None else min(model.vocab_size, _num_ids(tokenizer))
    eos_token_ids = _eos_token_ids(model, tokenizer)
    on_cpu = models.default_platform() == "cpu"
    parts = Parts(
        model=model,
        sampler=_sampler(model, tokenizer, config, max_model_len, vocab_size, eos_token_ids),
        mesh=_mesh(config.tensor_parallel_size),
        proposer=proposer,
        # On a GPU the host would wait for the device to say which; there rows are free until arithmetic takes longer
        # than reading the weights.
        skips_empty_drafts=on_cpu,
        always_masks=on_cpu,  # no time beside the draw, and half the programs
    )
    structured = None if tokenizer is None else config.structured_outputs
    if structured is not None and parts.sampler.markers is not None and not structured.enable_in_reasoning:
        parts = replace(parts, grammar_marker=parts.sampler.markers.end)
    draft_counts = _draft_counts(speculation, proposer, structured)
    drafts = draft_counts[-1]
    has_draft_kv = proposer is not None and proposer.stores_kv
    scheduler = _scheduler_config(config, max_model_len, drafts, drafts if has_draft_kv else 0)
    tile = scheduler.prefill_tile
    if scheduler.max_num_batched_tokens < config.max_num_seqs * (1 + drafts) + tile:
        draft_counts = tuple(sorted({0, *draft_counts}))  # a step may have no room for drafts
    return Assembly(
        parts=parts,
        scheduler=scheduler,
        buckets=make_buckets(
            config.max_num_seqs,
            max_model_len,
            scheduler.max_num_batched_tokens,
            config.block_size,
            tile,
            config.tensor_parallel_size,
            1 + drafts,
            whole_context=on_cpu,  # see pallas_kernels.paged_attention
        ),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        draft_counts=draft_counts,
        suffix=suffix,
        keep_boundary_hidden=config.keep_boundary_hidden or (proposer is not None and proposer.needs_hidden),
        structured=structured,
    )


def _num_ids(tokenizer: Any) -> int:
    """1 + the largest id that a tokenizer knows; it may have fewer tokens than that."""
    known = getattr(tokenizer, "get_vocab", None)
    return len(tokenizer) if known is None else max(known().values(), default=-1) + 1


def _eos_token_ids(model: Model, tokenizer: Any | None) -> tuple[int, ...]:
    """The model's, and the tokenizer's own: of some chat models only the one or the other ends a turn."""
    own = getattr(tokenizer, "eos_token_id", None)
    if own is None or own in model.eos_token_ids or own >= model.vocab_size:
        return tuple(model.eos_token_ids)
    return (*model.eos_token_ids, int(own))


def _with_attention(model: Model, config: EngineConfig) -> Model:
    if not hasattr(model, "with_attention_implementation"):
        raise ValueError(
            f"attention_implementation is {config.attention_implementation!r}; a {type(model).__name__} has no choice"
        )
    return model.with_attention_implementation(config.attention_implementation, config.block_size)


def _draft_counts(
    speculation: SpeculativeConfig | None, proposer: Proposer | None, structured: StructuredOutputsConfig | None
) -> tuple[int, ...]:
    """Every K that a step may have: without speculation, drafts are what a grammar forces."""
    if speculation is not None:
        most = speculation.max_drafts if proposer is None else proposer.num_speculative_tokens
        return tuple(sorted({min(k, most) for k in speculation.draft_counts}))
    return (0,) if structured is None or not structured.num_forced_tokens else (0, structured.num_forced_tokens)


def _sampler(
    model: Model,
    tokenizer: Any | None,
    config: EngineConfig,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> Sampler:
    vocab = model.vocab_size
    for_processors = ProcessorConfig(
        vocab_size=vocab,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        tokenizer=tokenizer,
        stop_token_ids=eos_token_ids,
    )
    markers = None
    if isinstance(config.reasoning_config, ReasoningConfig):
        markers = Markers(*config.reasoning_config.token_ids(tokenizer, vocab_size))
    speculation = config.speculation
    return Sampler(
        vocab_limit=vocab_size,
        processors=make_processors(config.logits_processors, for_processors),
        markers=markers,
        max_logprobs=vocab if config.max_logprobs < 0 else min(config.max_logprobs, vocab),
        logprobs_mode=config.logprobs_mode,
        implementation=config.sampling_implementation,
        method="coupled" if speculation is None else str(speculation.rejection_sample_method),
        rates=None if speculation is None else speculation.conditional_acceptance_rates,
    )


def _scheduler_config(config: EngineConfig, max_model_len: int, drafts: int, lookahead: int) -> SchedulerConfig:
    platform = models.default_platform()
    tile = _TILE[platform]
    room = 0 if config.enable_chunked_prefill else max_model_len + tile
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens
        or max(_BUDGET[platform] + config.max_num_seqs * (1 + drafts), room),
        max_model_len=max_model_len,
        block_size=config.block_size,
        policy=config.scheduling_policy,
        enable_chunked_prefill=config.enable_chunked_prefill,
        num_speculative_tokens=drafts,
        num_lookahead_tokens=lookahead,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        prefill_tile=tile,
    )


def _max_model_len(config: EngineConfig, model: Model) -> int:
    if config.max_model_len is None:
        return min(model.max_model_len, _DEFAULT_MAX_MODEL_LEN)
    if not 2 <= config.max_model_len <= model.max_model_len:
        raise ValueError(f"max_model_len is {config.max_model_len}; this model takes [2, {model.max_model_len}]")
    return config.max_model_len


def _mesh(tensor_parallel_size: int) -> Mesh | None:
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ValueError(f"tensor_parallel_size is {tensor_parallel_size}; this host has {len(devices)} device(s)")
    return None if tensor_parallel_size == 1 else make_mesh(devices[:tensor_parallel_size])
