"""What cannot be served is refused by name, value and range; nobody else notices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from jaxserve import LLM, EngineConfig, EngineCore, SamplingParams

OK = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., EngineCore], alphabet: Any) -> EngineCore:
    return make_engine(alphabet, max_model_len=64, num_blocks=4, block_size=8)


@pytest.fixture
def serves_on(engine: EngineCore, generate: Callable[..., Any], drive: Any) -> Any:
    """After each test the next request works, and no page or request is left behind."""
    yield
    drive(engine, max_steps=200)
    assert generate(engine, [1, 2], OK).outputs[0].token_ids == [3, 4, 5]
    assert not engine.has_unfinished()
    assert engine.kv.pool.num_free == engine.kv.pool.num_usable


PROMPTS: list[tuple[Any, str]] = [
    ([], "prompt is empty"),
    ([1] * 64, "64 tokens.*max_model_len=64.*63"),
    ([1] * 1000, "1000 tokens.*63"),
    ([26], r"26.*\[0, 26\)"),
    ([3, -1], r"-1.*\[0, 26\)"),
    ([1, 2**40], r"1099511627776.*\[0, 26\)"),
    ([True], "True.*integer"),
    ([1.0], "1.0.*integer"),
    (["a"], "'a'.*integer"),
    ([None], "None.*integer"),
    ("text", "tokenizer"),
    (None, "NoneType"),
    (5, "int"),
    (b"bytes", "bytes"),
    ({}, "prompt"),
    ({"prompt_token_ids": [1], "prompt": "a"}, "prompt_token_ids"),
    ({"prompt_token_ids": None}, "NoneType"),
    ({"tokens": [1], 3: 4}, "prompt"),
    ([1] * 20 + [5] * 20, "num_blocks"),  # 24 positions are all there is
]


@pytest.mark.usefixtures("serves_on")
@pytest.mark.parametrize(("prompt", "message"), PROMPTS, ids=lambda x: f"{x!r:.30}")
def test_prompts(engine: EngineCore, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", prompt, OK)
    assert not engine.has_unfinished()


PARAMETERS: list[tuple[str, Any]] = [
    *[("temperature", x) for x in (float("nan"), float("inf"), -0.1, "1", None, True, 1j, [1.0])],
    *[("top_p", x) for x in (float("nan"), 0.0, -0.5, 1.0001, "0.9", None, True)],
    *[("top_k", x) for x in (-2, 1.0, 2**31, "5", None, True, float("nan"))],
    *[("min_p", x) for x in (float("nan"), -0.01, 1.01, "0", None, False)],
    *[("seed", x) for x in (1.5, 2**63, -(2**63) - 1, "1", True)],
    *[("max_tokens", x) for x in (0, -1, 1.5, "16", True)],
    *[("n", x) for x in (0, -1, 1.0, None, True, 10**6)],
    *[("stop", x) for x in ("", [""], 5, [5], ["a", None])],
    *[("stop_token_ids", x) for x in ([-1], [1.0], ["a"], [True], 5, "12")],
    *[("logprobs", x) for x in (True, -2, "0", 0.5)],
    *[(name, x) for name in ("ignore_eos", "detokenize", "skip_special_tokens") for x in (0, 1, None, "yes")],
    *[("include_stop_str_in_output", x) for x in (0, None)],
    *[("spaces_between_special_tokens", x) for x in (1, "no")],
    *[("output_kind", x) for x in (0, "DELTA", None)],
]


@pytest.mark.parametrize(("name", "value"), PARAMETERS)
def test_sampling_parameters(name: str, value: Any) -> None:
    shown = repr(value[0] if name == "stop_token_ids" and isinstance(value, list) else value)
    with pytest.raises(ValueError, match=f"^{name} is {re.escape(shown)}; it must be "):
        SamplingParams(**{name: value})


def test_unknown_sampling_parameters() -> None:
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", x) for x in (3, np.float32(0.5), 1e-30)],
        *[("top_p", x) for x in (1, 1e-30)],
        *[("top_k", x) for x in (-1, np.int64(4), 2**31 - 1)],
        *[("max_tokens", x) for x in (None, 10**9)],
        *[("stop", x) for x in (None, "a")],
        *[("seed", -5), ("min_p", 1), ("stop_token_ids", (1, 2))],
    ],
)
def test_unusual_but_right_values(name: str, value: Any) -> None:
    SamplingParams(**{name: value})


def test_minus_one_is_none_where_vllm_has_it_so() -> None:
    params = SamplingParams(seed=-1, thinking_token_budget=-1)
    assert (params.seed, params.thinking_token_budget) == (None, None)


def test_a_bad_word_that_is_no_token(make_engine: Any, alphabet: Any, letters: Any) -> None:
    """Nothing could be masked for it."""
    engine = make_engine(alphabet, letters)
    with pytest.raises(ValueError, match=r"bad_words=.*no token"):
        engine.add_request("x", [1], SamplingParams(bad_words=["a", " "]))


def test_top_p_of_zero_is_accepted_where_it_means_nothing() -> None:
    SamplingParams(temperature=0, top_p=0)


@pytest.mark.usefixtures("serves_on")
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"params": {"temperature": 1}}, "SamplingParams"),
        ({"params": None}, "SamplingParams"),
        ({"params": SamplingParams(stop_token_ids=[26])}, r"stop_token_ids.*26.*\[0, 25\]"),
        ({"params": SamplingParams(stop="x")}, "stop.*tokenizer"),
        ({"params": SamplingParams(max_tokens=30)}, "32 KV positions.*24.*num_blocks"),
        ({"params": SamplingParams(max_tokens=30, n=3)}, "32 KV positions.*24.*num_blocks"),
        ({"priority": 1}, "priority.*1"),
        ({"priority": 1.5}, "priority.*1.5"),
        ({"priority": "high"}, "priority.*high"),
        ({"priority": True}, "priority.*True"),
        ({"prompt": {"prompt_token_ids": [1], "cache_salt": 5}}, "cache_salt.*5"),
        ({"prompt": {"prompt_token_ids": [1], "cache_salt": b"x"}}, "cache_salt"),
        ({"request_id": 5}, "request_id.*5"),
        ({"request_id": None}, "request_id.*None"),
    ],
    ids=lambda x: f"{x!r:.40}",
)
def test_requests(engine: EngineCore, keywords: dict[str, Any], message: str) -> None:
    arguments = {"request_id": "bad", "prompt": [1, 2, 3], "params": OK} | keywords
    with pytest.raises(ValueError, match=message):
        engine.add_request(**arguments)
    assert not engine.has_unfinished()


@pytest.mark.parametrize("priority", ["high", None, float("nan"), 1.5, True])
def test_priorities_that_are_none(make_engine: Any, alphabet: Any, priority: Any) -> None:
    engine = make_engine(alphabet, scheduling_policy="priority")
    with pytest.raises(ValueError, match=f"priority.*{priority}"):
        engine.add_request("bad", [1, 2], OK, priority=priority)
    assert not engine.has_unfinished()


@pytest.mark.usefixtures("serves_on")
def test_duplicate_ids(engine: EngineCore, drive: Any) -> None:
    """Also of one of n sequences, in either order. The one in use goes on, and nothing of the refused one runs."""
    engine.add_request("a", [1, 2], OK)
    engine.add_request("b#1", [1, 2], OK)
    engine.add_request("c", [1, 2], SamplingParams(temperature=0, max_tokens=3, n=2))
    for name, n in [("a", 1), ("a", 2), ("b", 2), ("c", 1), ("c", 3), ("c#0", 1)]:
        before = engine.scheduler.num_waiting
        with pytest.raises(ValueError, match="in use"):
            engine.add_request(name, [1, 2], SamplingParams(max_tokens=3, n=n))
        assert engine.scheduler.num_waiting == before
    outputs = drive(engine)
    assert {name: len(output.outputs) for name, output in outputs.items()} == {"a": 1, "b#1": 1, "c": 2}
    assert all(c.token_ids == [3, 4, 5] for output in outputs.values() for c in output.outputs)
    engine.add_request("a", [1, 2], OK)  # free again


def test_one_bad_prompt_among_good_ones(alphabet: Any) -> None:
    """Nothing of the call runs, and the next call is served."""
    llm = LLM(alphabet, max_model_len=64, max_num_seqs=8)
    for bad in ([], [26], "text", {"tokens": [1]}, None):
        with pytest.raises(ValueError, match="prompt"):
            llm.generate([[1], bad, [2]], OK, use_tqdm=False)
        assert not llm.engine.has_unfinished()
    with pytest.raises(ValueError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate([[1], [2]], [OK], use_tqdm=False)
    assert [o.outputs[0].token_ids for o in llm.generate([[1], [2]], OK, use_tqdm=False)] == [[2, 3, 4], [3, 4, 5]]


# ---- models and configurations


CONFIGS: list[tuple[str, Any]] = [
    ("dtype", "float16"),
    ("dtype", 32),
    ("scheduling_policy", "lifo"),
    *[("max_num_seqs", x) for x in (0, -1, 1.5, "8", True, None)],
    *[("block_size", x) for x in (0, 16.0, True)],
    *[("max_model_len", x) for x in (0, "64", True, 64.0)],
    *[("tensor_parallel_size", x) for x in (0, True, "2")],
    *[("num_blocks", x) for x in (1, 0, 10.0)],
    *[("max_num_batched_tokens", x) for x in (0, "1")],
    *[("long_prefill_token_threshold", x) for x in (-1, True)],
    *[("watermark", x) for x in (-0.1, 0.6, float("nan"), "0")],
    *[("kv_cache_memory_fraction", x) for x in (-0.1, 1.1, float("nan"), "0.5", True)],
    ("seed", 1.5),
    *[(name, x) for name in ("enable_prefix_caching", "enable_chunked_prefill") for x in ("no", None, 1)],
    ("keep_boundary_hidden", "yes"),
    *[("reasoning_config", x) for x in ("o1", 5)],
    *[(name, x) for name in ("sampling_implementation", "attention_implementation") for x in ("cuda", True)],
]


@pytest.mark.parametrize(("name", "value"), CONFIGS)
def test_engine_configurations(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is {value!r}.*must be"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_model_len": 5000}, r"max_model_len is 5000.*\[2, 4096\]"),
        ({"max_model_len": 1}, r"max_model_len is 1.*\[2, 4096\]"),
        ({"tensor_parallel_size": 99}, f"tensor_parallel_size is 99.*{jax.device_count()} device"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens.*at least.*4"),
        ({"max_num_batched_tokens": 50, "enable_chunked_prefill": False}, "max_num_batched_tokens.*at least.*50"),
        (
            {"long_prefill_token_threshold": 8, "enable_chunked_prefill": False},
            "long_prefill_token_threshold.*chunked prefill.*8",
        ),
    ],
)
def test_configurations_that_do_not_fit(make_engine: Any, alphabet: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(alphabet, **config)


def test_too_little_memory(make_engine: Any, make_llama: Any) -> None:
    with pytest.raises(ValueError, match=r"max_model_len 128 needs .* KV pages .*kv_cache_memory_fraction"):
        make_engine(make_llama(), kv_cache_memory_fraction=0.0)


def test_missing_paths(tmp_path: Path) -> None:
    for path in ("no/such/model", tmp_path / "nothing.gguf", tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError, match="no"):
            LLM(path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        LLM(tmp_path)  # a directory with nothing in it


def test_unknown_architectures(tmp_path: Path) -> None:
    config = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 10, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        models.from_config(config)
    with pytest.raises((ValueError, FileNotFoundError)):  # it has no weights either
        LLM(tmp_path)


@pytest.mark.parametrize("model", [object(), 5, None, dict, {"vocab_size": 3}], ids=lambda model: type(model).__name__)
def test_objects_that_are_no_models(model: Any) -> None:
    with pytest.raises(ValueError, match=r"model is a .*lacks .*forward.*logits.*vocab_size"):
        LLM(model)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 3, 3), (4, 3, 3, 3)])
def test_markov_tables(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"table has shape .*expected"):
        models.MarkovLM(np.zeros(shape, np.float32))


# ---- logits that are no distribution


@pytest.mark.parametrize("row", [np.nan, -np.inf], ids=["NaN", "-inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_ends_its_request_alone(
    make_engine: Any, alphabet: Any, drive: Any, row: float, temperature: float
) -> None:
    table = alphabet.table.copy()
    table[10] = row
    engine = make_engine(models.MarkovLM(table), max_num_seqs=4)
    params = SamplingParams(temperature=temperature, seed=0, max_tokens=8, ignore_eos=True, top_k=3)
    for name, first in {"a": 0, "reaches it": 6, "b": 12, "starts with it": 10, "c": 14}.items():
        engine.add_request(name, [first], params)
    served = {name: output.outputs[0] for name, output in drive(engine).items()}
    assert {name: c.finish_reason for name, c in served.items()} == {
        "a": "length", "reaches it": "error", "b": "length", "starts with it": "error", "c": "length",
    }  # fmt: skip
    assert served["reaches it"].token_ids == [7, 8, 9, 10], "what came before is kept"
    assert served["starts with it"].token_ids == []
    assert "NaN" in (served["starts with it"].error or "")
    assert served["c"].token_ids == [15, 16, 17, 18, 19, 20, 21, 22]
    assert engine.kv.pool.num_free == engine.kv.pool.num_usable


def test_all_n_sequences_can_fail(make_engine: Any, alphabet: Any, generate: Any) -> None:
    engine = make_engine(models.MarkovLM(np.full_like(alphabet.table, np.nan)))
    output = generate(engine, [3], n=3)
    assert [c.finish_reason for c in output.outputs] == ["error"] * 3


@pytest.mark.parametrize("poison", [np.nan, np.inf], ids=str)
def test_keys_and_values_that_are_no_numbers_hurt_nobody_else(
    make_engine: Any, make_llama: Any, generate: Any, drive: Any, poison: float
) -> None:
    """A token whose embedding is broken leaves NaN in its pages. Neighbours, and whoever gets those pages
    next, must not notice: masking scores is not enough where 0 * NaN is NaN."""
    engine = make_engine(make_llama(), max_num_seqs=4, max_model_len=64, num_blocks=9, max_num_batched_tokens=68)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = generate(engine, [1, 2, 3], params).outputs[0].token_ids
    weights = engine.runner.params
    broken = weights | {"embed": jnp.asarray(weights["embed"]).at[7].set(poison)}
    engine.runner.weights = replace(engine.runner.weights, model=broken)
    for _ in range(2):
        engine.add_request("long", [7] * 40, params)
        for name in ("a", "b"):
            engine.add_request(name, [1, 2, 3], params)
        engine.add_request("short", [7], params)
        served = {name: output.outputs[0] for name, output in drive(engine).items()}
        assert served["a"].token_ids == served["b"].token_ids == expected
        assert served["long"].finish_reason == served["short"].finish_reason == "error"
    for _ in range(4):  # all the pages are used again
        engine.add_request("x", [9] * 50, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert drive(engine)["x"].outputs[0].finish_reason == "length"
    assert generate(engine, [1, 2, 3], params).outputs[0].token_ids == expected
