"""The engine draws and verifies by the kernels too: the same tokens, whoever computes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve import EngineConfig, EngineCore, SamplingParams
from models import MarkovLM

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
SPECULATION = {"none": None, "coupled": NGRAM, "standard": NGRAM | {"rejection_sample_method": "standard"}}


def answers(implementation: str) -> dict[str, list[int]]:
    """Token ids of a greedy and a drawn request under each way to speculate."""
    model = MarkovLM((2.0 * np.random.default_rng(0).standard_normal((20, 20))).astype(np.float32))
    said = {}
    for name, speculation in SPECULATION.items():
        config = EngineConfig(
            max_num_seqs=2, max_model_len=32, sampling_implementation=implementation, speculative_config=speculation
        )
        engine = EngineCore.from_model(model, None, config)
        shared = {"max_tokens": 6, "ignore_eos": True}
        engine.add_request("greedy", [1, 2, 1, 2], SamplingParams(temperature=0, logit_bias={3: 2.0}, **shared))
        engine.add_request("drawn", [3, 4, 3], SamplingParams(seed=1, top_k=6, top_p=0.9, logprobs=2, **shared))
        while engine.has_unfinished():
            for output in engine.step():
                said[f"{name} {output.request_id}"] = output.outputs[0].token_ids
        engine.shutdown()
    return said


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere the kernels' own tests compile them")
def test_mosaic_in_the_engine() -> None:
    """In a process of its own: interpreted kernels may wait for ever where JAX starts another program meanwhile."""
    root = Path(__file__).parents[2]
    program = f"import json; from {__name__} import answers; print(json.dumps(answers('mosaic')))"
    env = os.environ | {"JAX_CPU_ENABLE_ASYNC_DISPATCH": "0", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.strip().split("\n")[-1])
    assert said == answers("xla")
    assert all(len(tokens) == 6 for tokens in said.values())
    assert len(said) == 2 * len(SPECULATION)
