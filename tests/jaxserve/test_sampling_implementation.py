"""The engine draws and verifies by the kernels too: the same tokens, whoever computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxserve import EngineCore, SamplingParams

SPECULATION = {
    "none": None,
    "coupled": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    "standard": {
        "method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2,
        "rejection_sample_method": "standard",
    },
}  # fmt: skip


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere the kernels' own tests compile them")
@pytest.mark.parametrize("speculation", SPECULATION)
def test_mosaic_in_the_engine(
    random_markov: Callable[..., Any], make_engine: Callable[..., EngineCore], drive: Any, speculation: str
) -> None:
    model = random_markov(20, order=1, spread=2.0)
    said = {}
    for implementation in ("xla", "mosaic"):
        engine = make_engine(
            model,
            max_num_seqs=2,
            max_model_len=32,
            sampling_implementation=implementation,
            speculative_config=SPECULATION[speculation],
        )
        shared = {"max_tokens": 6, "ignore_eos": True}
        engine.add_request("greedy", [1, 2, 1, 2], SamplingParams(temperature=0, logit_bias={3: 2.0}, **shared))
        engine.add_request("drawn", [3, 4, 3], SamplingParams(seed=1, top_k=6, top_p=0.9, logprobs=2, **shared))
        outputs = drive(engine)
        said[implementation] = {name: output.outputs[0].token_ids for name, output in outputs.items()}
        assert all(output.outputs[0].finish_reason == "length" for output in outputs.values())
    assert said["mosaic"] == said["xla"]
