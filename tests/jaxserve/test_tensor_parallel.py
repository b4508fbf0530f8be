"""The same tokens on one device and on several, whether or not the heads can be dealt out evenly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxserve import EngineCore, SamplingParams

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

EVEN = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1}
ODD = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 1, "vocab_size": 250}
CONFIG = {"max_num_seqs": 3, "max_model_len": 64, "max_num_batched_tokens": 100}  # all three prompts in one step
PROMPTS = {"greedy": [1, 2, 3], "top_p": list(range(10, 40)), "mixed": [7] * 5}
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    "top_p": SamplingParams(seed=3, top_p=0.9, max_tokens=12, ignore_eos=True, logprobs=0),
    "mixed": SamplingParams(seed=4, top_k=20, min_p=0.01, temperature=1.5, max_tokens=12, ignore_eos=True),
}


def serve(engine: EngineCore, drive: Callable[..., Any]) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, PARAMS[name])
    outputs = drive(engine)
    assert engine.kv.pool.num_free == engine.kv.pool.num_usable
    return {name: outputs[name].outputs[0].token_ids for name in PROMPTS}


@pytest.mark.parametrize("heads", [EVEN, ODD], ids=["8 KV heads", "3 KV heads"])
def test_any_number_of_devices_gives_the_same_tokens(
    make_engine: Callable[..., EngineCore], make_llama: Any, drive: Any, heads: dict[str, int]
) -> None:
    """Three rows are not a multiple of the devices either."""
    served = {
        size: serve(make_engine(make_llama(**heads), tensor_parallel_size=size, **CONFIG), drive) for size in (1, 2, 8)
    }
    assert served[2] == served[1]
    assert served[8] == served[1]
    assert len({tuple(tokens) for tokens in served[1].values()}) == 3


def test_weights_and_pages_are_split(make_engine: Callable[..., EngineCore], make_llama: Any) -> None:
    engine = make_engine(make_llama(**EVEN), tensor_parallel_size=8, max_num_seqs=2, max_model_len=64)
    kv = engine.runner.cache.kv[0].k
    assert kv.addressable_shards[0].data.shape[2] == 1
    embedding = engine.runner.params["embed"]
    assert embedding.addressable_shards[0].data.shape[0] == embedding.shape[0] // 8


def test_a_toy_model_on_several_devices(make_engine: Callable[..., EngineCore], random_markov: Any, drive: Any) -> None:
    model = random_markov(64)
    one, four = (serve(make_engine(model, tensor_parallel_size=size, **CONFIG), drive) for size in (1, 4))
    assert one == four
