"""From what the user asked for to the proposer: loads heads and draft models, finds custom classes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import models
from jaxserve.speculative.config import SpeculativeConfig
from jaxserve.speculative.draft_model import DraftModelProposer, check_vocabularies
from jaxserve.speculative.hidden_state import HiddenStateProposer
from jaxserve.speculative.medusa import MedusaProposer
from jaxserve.speculative.ngram import NgramProposer
from jaxserve.speculative.proposer import Proposer
from jaxserve.speculative.suffix import SuffixProposer
from models import Llama, Model
from models.checkpoint import open_checkpoint
from models.eagle import feature_layers, load_eagle, load_eagle3
from models.medusa import load_medusa
from models.mtp import load_mtp

ENTRY_POINTS = "jaxserve.proposers"


@dataclass(frozen=True)
class Target:
    """What proposers are made for. max_model_len: of the engine. tokenizer: None where there is none."""

    model: Model
    block_size: int
    max_model_len: int
    tensor_parallel_size: int = 1
    tokenizer: Any | None = None


def make_proposer(config: SpeculativeConfig, target: Target) -> Proposer:
    """The proposer of every method but suffix, with K = config.max_drafts ("auto": as far as Medusa has heads). Weights
    are read by its `load_params`.

    Raises FileNotFoundError, or ValueError naming what does not fit the target or is unsupported.
    """
    config.check_tensor_parallel(target.tensor_parallel_size)
    k = config.max_drafts
    if config.method == "ngram":
        assert config.prompt_lookup_min is not None
        assert config.prompt_lookup_max is not None
        return NgramProposer(k, config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        raise ValueError("method is 'suffix'; its proposer runs on the host: use make_suffix_proposer")
    if config.method == "custom":
        return _custom(config, target)
    replicated = config.draft_tensor_parallel_size == 1 and target.tensor_parallel_size > 1
    if config.method == "draft_model":
        return _draft_model(config, target, replicated)
    model = _llama(config, target)
    if config.method == "medusa":
        heads = load_medusa(_path(config), model)
        k = min(k, heads.num_heads) if config.num_speculative_tokens == "auto" else k
        return MedusaProposer(heads, k, config.probabilistic, replicated)
    assert config.method is not None
    head = _HEADS[config.method](_path(config, model), model)
    return HiddenStateProposer(
        head, k, model.vocab_size, target.block_size, probabilistic=config.probabilistic, replicated=replicated
    )


_HEADS: dict[str, Any] = {"eagle": load_eagle, "eagle3": load_eagle3, "mtp": load_mtp}


def make_suffix_proposer(config: SpeculativeConfig) -> SuffixProposer:
    """What finds the drafts of method suffix, on the host."""
    return SuffixProposer(
        config.max_drafts,
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
    )


def required_feature_layers(config: SpeculativeConfig, target: Model) -> tuple[int, ...]:
    """The target's layers whose inputs the proposer reads beside its last hidden states; () but for EAGLE-3."""
    if config.method != "eagle3":
        return ()
    model = _as_llama(config, target)
    return feature_layers(model.config.num_layers, open_checkpoint(_path(config)).config)


def _path(config: SpeculativeConfig, target: Llama | None = None) -> str:
    """Of the weights; those of an MTP module lie with the target's unless said otherwise."""
    if config.model is not None:
        return config.model
    if target is None or target.source is None:
        raise ValueError(f"model is None; method {config.method} needs the path of its weights")
    return str(target.source.path)


def _llama(config: SpeculativeConfig, target: Target) -> Llama:
    return _as_llama(config, target.model)


def _as_llama(config: SpeculativeConfig, model: Model) -> Llama:
    if not isinstance(model, Llama):
        raise ValueError(
            f"method is {config.method!r}; it needs a target of the Llama family, not {type(model).__name__}"
        )
    return model


def _draft_model(config: SpeculativeConfig, target: Target, replicated: bool) -> DraftModelProposer:
    path = _path(config)
    computed_as = target.model if isinstance(target.model, Llama) else None
    draft = models.load_model(
        path, computed_as.dtype if computed_as else "auto", computed_as.platform if computed_as else None
    )
    if draft.max_model_len < target.max_model_len:
        raise ValueError(
            f"model of speculative_config has max_model_len {draft.max_model_len}; "
            f"it must be at least the engine's, {target.max_model_len}"
        )
    tokenizer = None
    if target.tokenizer is not None:
        from models.tokenizer import load_tokenizer  # transformers takes seconds to import

        tokenizer = load_tokenizer(path)
    if computed_as:
        draft = draft.attending_as(computed_as)
    check_vocabularies(target.model, draft, target.tokenizer, tokenizer)
    return DraftModelProposer(
        draft.with_max_model_len(target.max_model_len), config.max_drafts, target.model.vocab_size,
        probabilistic=config.probabilistic, replicated=replicated,
    )  # fmt: skip


def _custom(config: SpeculativeConfig, target: Target) -> Proposer:
    """The user's class, called with the configuration and the target."""
    factory = _find(config.proposer) if isinstance(config.proposer, str) else config.proposer
    proposer = factory(config, target)
    if not isinstance(proposer, Proposer):
        missing = [name for name in _members() if not hasattr(proposer, name)]
        raise ValueError(
            f"proposer is {config.proposer!r}; what it makes is no Proposer, it lacks {', '.join(missing)}"
        )
    return proposer


def _members() -> list[str]:
    return [name for name in (*vars(Proposer), *Proposer.__annotations__) if not name.startswith("_")]


def _find(name: str) -> Any:
    """A class by "package.module:Name", or by the name of an entry point."""
    module, _, attribute = name.partition(":")
    if attribute:
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"proposer is {name!r}, which cannot be imported: {error}") from error
    found = entry_points(group=ENTRY_POINTS)
    if name not in found.names:
        raise ValueError(
            f"proposer is {name!r}; it must be a class, 'package.module:Name', or an entry point of the group "
            f"{ENTRY_POINTS!r}: {', '.join(sorted(found.names)) or 'there are none'}"
        )
    return found[name].load()
