"""Speculative decoding: what drafts the tokens that a step verifies, how many of them, and what came of it."""

from __future__ import annotations

from jaxserve.speculative.auto import AutoK
from jaxserve.speculative.build import Target, make_proposer, make_suffix_proposer, required_feature_layers
from jaxserve.speculative.config import SpeculativeConfig
from jaxserve.speculative.continuation import Continuation, drafts_of_continuation, empty_continuation
from jaxserve.speculative.proposer import PrefillContext, Proposal, ProposeContext, Proposer, Stateless, cut
from jaxserve.speculative.stats import (
    SpecDecodingCollector,
    SpecDecodingLog,
    SpecDecodingLogger,
    SpecDecodingStats,
    metrics_text,
    register_metrics,
)
from jaxserve.speculative.suffix import SuffixProposer

__all__ = [
    "AutoK",
    "Continuation",
    "PrefillContext",
    "Proposal",
    "ProposeContext",
    "Proposer",
    "SpecDecodingCollector",
    "SpecDecodingLog",
    "SpecDecodingLogger",
    "SpecDecodingStats",
    "SpeculativeConfig",
    "Stateless",
    "SuffixProposer",
    "Target",
    "cut",
    "drafts_of_continuation",
    "empty_continuation",
    "make_proposer",
    "make_suffix_proposer",
    "metrics_text",
    "register_metrics",
    "required_feature_layers",
]
