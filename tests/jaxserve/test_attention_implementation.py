"""The attention kernel in an engine: chosen by name, refused where it does not fit, and the same model with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import models
from jaxserve import EngineConfig, EngineCore
from models.markov import MarkovLM

ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "max_position_embeddings": 128,
}  # fmt: skip
SCRIPT = """
import json
import jax
import models
from jaxserve import LLM, SamplingParams

speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
tokens = {}
for name in ("xla", "mosaic"):
    llm = LLM(
        models.from_config(%s, "bfloat16"), max_model_len=128, max_num_seqs=2, structured_outputs_config=None,
        attention_implementation=name, speculative_config=speculation, compilation_cache_dir="",
    )
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    outputs = llm.generate([[5] * 70, list(range(20))], params, use_tqdm=False)
    tokens[name] = [o.outputs[0].token_ids for o in outputs]
    assert llm.stats().speculation.num_drafts > 0
print(json.dumps(tokens))
"""


def test_the_same_tokens() -> None:
    """Chunks of prompts, decodes and windows of drafts. In a process of its own: where kernels are interpreted inside
    of other programs, JAX must not run these asynchronously."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0", "PYTHONPATH": str(ROOT)}
    env.pop("XLA_FLAGS", None)
    command = [sys.executable, "-c", SCRIPT % TINY]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    tokens = json.loads(done.stdout.splitlines()[-1])
    assert tokens["mosaic"] == tokens["xla"]
    assert len(set(tokens["xla"][0] + tokens["xla"][1])) > 1


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (models.from_config(TINY, "float32"), {}, "bfloat16 and float16, not float32"),
        (models.from_config(TINY | {"head_dim": 32}, "bfloat16"), {}, "heads of width 64 and 128, not 32"),
        (models.from_config(TINY, "bfloat16"), {"block_size": 24}, "not 24"),
        (
            MarkovLM(np.zeros((4, 4), np.float32), max_model_len=64),
            {},
            "a MarkovLM has no choice",
        ),
    ],
    ids=["dtype", "width", "page", "model"],
)
def test_what_it_does_not_serve(model: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineCore(model, None, EngineConfig(max_model_len=64, attention_implementation="mosaic", **config))
