"""LLM inference in pure JAX, built around the step from logits to tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.config import EngineConfig
    from jaxserve.engine import EngineCore
    from jaxserve.llm import LLM
    from jaxserve.outputs import CompletionOutput, RequestOutput
    from jaxserve.sampling_params import RequestOutputKind, SamplingParams

_EXPORTS = {
    "LLM": "jaxserve.llm",
    "AsyncEngine": "jaxserve.async_engine",
    "CompletionOutput": "jaxserve.outputs",
    "EngineConfig": "jaxserve.config",
    "EngineCore": "jaxserve.engine",
    "RequestOutput": "jaxserve.outputs",
    "RequestOutputKind": "jaxserve.sampling_params",
    "SamplingParams": "jaxserve.sampling_params",
}
__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "EngineCore",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
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
