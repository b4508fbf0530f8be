"""Shared by all tests: virtual devices, a compilation cache that makes reruns quick, tiny models and their engines."""

# ruff: noqa: E402 (the environment comes before JAX)

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_PLATFORMS = os.environ.get("JAX_PLATFORMS", "")
if _PLATFORMS == "cpu" or (not _PLATFORMS and not Path("/dev/nvidia0").exists()):
    # Read once, when JAX makes its CPU client: so before anything imports JAX.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np
import pytest

import models
from jaxserve import EngineConfig, EngineCore, RequestOutput, SamplingParams

if jax.config.jax_compilation_cache_dir is None:
    jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "jaxserve-tests"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto` on a CPU: a worker for every core, up to four. On GPUs none: a process takes a whole GPU's memory."""
    return min(os.cpu_count() or 1, 4) if jax.default_backend() == "cpu" else 0


@pytest.fixture(autouse=True, scope="module")
def _forget_programs() -> Iterator[None]:
    """A CPU executable maps memory some ten times, and Linux ends a process (in the compiler, by a segmentation fault)
    that maps more than 65530 areas: so what a module compiled goes with the module."""
    yield
    jax.clear_caches()
    gc.collect()


class LetterTokenizer:
    """Token i is the i-th letter of the alphabet."""

    def __len__(self) -> int:
        return 26

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - ord("a") for c in text]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self(text.replace(" ", ""))["input_ids"]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


@pytest.fixture(scope="session")
def letters() -> LetterTokenizer:
    return LetterTokenizer()


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., models.Llama]:
    """A small Llama in float32 with random weights; keywords change its config.json."""

    def make(**changes: Any) -> models.Llama:
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 256,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "eos_token_id": 0,
        }
        return models.from_config(config | changes, dtype="float32", seed=1)

    return make


@pytest.fixture(scope="session")
def random_markov() -> Callable[..., models.MarkovLM]:
    """A MarkovLM with a random table. Order 2 reads its "KV": a wrong page shows in its output."""

    def make(vocab: int, order: int = 2, spread: float = 1.5, seed: int = 0, **kwargs: Any) -> models.MarkovLM:
        shape = (vocab + 1, vocab, vocab) if order == 2 else (vocab, vocab)
        table = spread * np.random.default_rng(seed).standard_normal(shape)
        return models.MarkovLM(table.astype(np.float32), **kwargs)

    return make


@pytest.fixture(scope="session")
def alphabet() -> models.MarkovLM:
    """Goes through the alphabet: after token i comes i + 1, after the last one the first, greedy and almost surely."""
    return models.MarkovLM((30 * np.roll(np.eye(26), 1, axis=1)).astype(np.float32), eos_token_ids=(25,))


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., EngineCore]:
    """An engine with few and small buckets; keywords are those of EngineConfig."""

    def make(model: Any, tokenizer: Any = None, **config: Any) -> EngineCore:
        return EngineCore.from_model(
            model, tokenizer, EngineConfig(**({"max_model_len": 128, "max_num_seqs": 8, "dtype": "float32"} | config))
        )

    return make


@pytest.fixture(scope="session")
def drive() -> Callable[..., dict[str, RequestOutput]]:
    """Step an engine until nothing is left to do; the last output of every request."""

    def run(engine: EngineCore, max_steps: int = 20_000) -> dict[str, RequestOutput]:
        last: dict[str, RequestOutput] = {}
        for _ in range(max_steps):
            if not engine.has_unfinished():
                return last
            last |= {output.request_id: output for output in engine.step()}
        raise AssertionError(f"unfinished after {max_steps} steps")

    return run


@pytest.fixture(scope="session")
def generate(drive: Callable[..., dict[str, RequestOutput]]) -> Callable[..., RequestOutput]:
    """The output of one request, alone in the engine."""

    def one(engine: EngineCore, prompt: Any, params: SamplingParams | None = None, **keywords: Any) -> RequestOutput:
        engine.add_request("solo", prompt, params or SamplingParams(**keywords))
        return drive(engine)["solo"]

    return one


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """What JAX compiles during the test, as it says itself."""
    events: list[str] = []

    def listen(event: str, duration: float, **kwargs: Any) -> None:
        if event == COMPILE_EVENT:
            events.append(str(kwargs.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="session")
def exact_distribution() -> Callable[..., np.ndarray]:
    """Probabilities [V], float64, of the token after `logits` [V], straight from the definitions of the filters."""

    def distribution(
        logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
    ) -> np.ndarray:
        x = np.asarray(logits, np.float64)
        order = np.argsort(-x, kind="stable")  # descending, equal ones by id
        if temperature == 0:
            return np.eye(len(x))[order[0]]
        z = x / temperature
        p = np.exp(z - z.max())[order]
        p[p < min_p] = 0  # p is relative to the most probable token here
        if 0 < top_k < len(p):
            p[top_k:] = 0
        if top_p < 1:
            before = np.concatenate([[0], np.cumsum(p)[:-1]]) / p.sum()
            p[(before >= top_p) & (np.arange(len(p)) > 0)] = 0
        result = np.zeros_like(p)
        result[order] = p / p.sum()
        return result

    return distribution
