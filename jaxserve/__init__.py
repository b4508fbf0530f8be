"""LLM inference in pure JAX, built around the step from logits to tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.config import EngineConfig, ReasoningConfig
    from jaxserve.engine import EngineCore
    from jaxserve.llm import LLM
    from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxserve.sampling.adapter import AdapterLogitsProcessor
    from jaxserve.sampling.processor import BatchUpdate, LogitsProcessor, ProcessorConfig, Row
    from jaxserve.sampling_params import RepetitionDetection, RequestOutputKind, SamplingParams
    from jaxserve.structured.config import StructuredOutputsConfig
    from jaxserve.structured.params import StructuredOutputsParams

_EXPORTS = {
    "LLM": "jaxserve.llm",
    "AdapterLogitsProcessor": "jaxserve.sampling.adapter",
    "AsyncEngine": "jaxserve.async_engine",
    "BatchUpdate": "jaxserve.sampling.processor",
    "CompletionOutput": "jaxserve.outputs",
    "EngineConfig": "jaxserve.config",
    "EngineCore": "jaxserve.engine",
    "LogitsProcessor": "jaxserve.sampling.processor",
    "Logprob": "jaxserve.outputs",
    "ProcessorConfig": "jaxserve.sampling.processor",
    "ReasoningConfig": "jaxserve.config",
    "RepetitionDetection": "jaxserve.sampling_params",
    "RequestOutput": "jaxserve.outputs",
    "RequestOutputKind": "jaxserve.sampling_params",
    "Row": "jaxserve.sampling.processor",
    "SamplingParams": "jaxserve.sampling_params",
    "StructuredOutputsConfig": "jaxserve.structured.config",
    "StructuredOutputsParams": "jaxserve.structured.params",
}
__all__ = [
    "LLM",
    "AdapterLogitsProcessor",
    "AsyncEngine",
    "BatchUpdate",
    "CompletionOutput",
    "EngineConfig",
    "EngineCore",
    "LogitsProcessor",
    "Logprob",
    "ProcessorConfig",
    "ReasoningConfig",
    "RepetitionDetection",
    "RequestOutput",
    "RequestOutputKind",
    "Row",
    "SamplingParams",
    "StructuredOutputsConfig",
    "StructuredOutputsParams",
]


def _check_models_package() -> None:
    """`models` is a common word: say so at once where another package of that name is found first."""
    from importlib.util import find_spec

    spec = find_spec("models")
    where = list(spec.submodule_search_locations or []) if spec else []
    if not any(_is_ours(path) for path in where):
        found = (spec.origin or ", ".join(where)) if spec else "nothing"
        raise ImportError(
            f"jaxserve needs its own package `models`, but Python finds {found} under that name: "
            "rename that module, or put jaxserve's install directory before it on sys.path"
        )


def _is_ours(path: str) -> bool:
    """Whether a `models` package at `path` is jaxserve's."""
    from pathlib import Path

    return (Path(path) / "markov.py").exists() and (Path(path) / "llama.py").exists()


_check_models_package()


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: `jaxserve --help` does not wait for JAX."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_EXPORTS[name]), name)
