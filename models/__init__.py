"""Functional models and their checkpoints. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from models.base import ForwardInputs, Model
from models.checkpoint import open_checkpoint
from models.config import ModelConfig
from models.llama import Llama
from models.markov import MarkovLM

__all__ = ["ForwardInputs", "Llama", "MarkovLM", "Model", "ModelConfig", "from_config", "load_model"]


def load_model(path: str | Path, dtype: str = "auto", platform: str | None = None) -> Llama:
    """A model from a Hugging Face directory or a .gguf file. Weights are read by `load_params`, not here.

    dtype: "float32", "bfloat16" or "auto" (`default_dtype`). platform: "cpu" or "gpu"; None is JAX's default backend.
    Raises FileNotFoundError, or ValueError naming what is unsupported, missing or broken.
    """
    source = open_checkpoint(path)
    config = ModelConfig.from_hf(source.config, source.generation_config)
    return _llama(config, dtype, platform, source=source)


def from_config(
    config: ModelConfig | Mapping[str, Any], dtype: str = "auto", platform: str | None = None, seed: int = 0
) -> Llama:
    """A model with random weights, for tests and benchmarks. config: a ModelConfig or the content of a config.json."""
    if not isinstance(config, ModelConfig):
        config = ModelConfig.from_hf(config)
    return _llama(config, dtype, platform, seed=seed)


def default_platform() -> str:
    """Where JAX runs by default: "cpu" or "gpu"."""
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def default_dtype(platform: str) -> str:
    """bfloat16 on a GPU and on CPUs that multiply it in hardware, else float32."""
    if platform == "gpu":
        return "bfloat16"
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "float32"
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def _llama(config: ModelConfig, dtype: str, platform: str | None, **kwargs: Any) -> Llama:
    platform = platform or default_platform()
    return Llama(config, dtype=default_dtype(platform) if dtype == "auto" else dtype, platform=platform, **kwargs)
