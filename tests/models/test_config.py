"""ModelConfig.from_hf: both spellings of config.json, every feature's flag, and refusals that name what is wrong."""

import re

import pytest
import transformers

from models.config import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(base=LLAMA, generation=None, **changes):
    return ModelConfig.from_hf({**base, **changes}, generation)


def of(architecture, **changes):
    return read(architectures=[architecture], **changes)


def test_llama():
    config = read()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 2, 16)
    assert (config.qkv_bias, config.o_bias, config.qk_norm, config.tie_word_embeddings) == (False,) * 4
    assert config.sliding_window is None
    assert config.window_layers == (False,) * 4
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)
    assert config.rope.theta == 500000.0
    assert config.rope.kind == "default"
    assert config == read()
    assert hash(config) == hash(read())


def test_both_rope_spellings_agree():
    old = read(rope_scaling=LLAMA3_ROPE, max_position_embeddings=131072)
    older = read(rope_scaling={**LLAMA3_ROPE, "type": "llama3"}, max_position_embeddings=131072)
    without = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    new = read(without, rope_parameters={**LLAMA3_ROPE, "rope_theta": 500000.0}, max_position_embeddings=131072)
    assert old == older == new
    assert (new.rope.kind, new.rope.factor, new.rope.original_max_position_embeddings) == ("llama3", 8.0, 8192)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_transformers_writes(name):
    """A config saved by transformers reads back with the same numbers."""
    hf = getattr(transformers, f"{name}Config")(vocab_size=99, num_hidden_layers=3)
    config = ModelConfig.from_hf(hf.to_dict() | {"architectures": [f"{name}ForCausalLM"]})
    assert (config.vocab_size, config.num_layers, config.hidden_size) == (99, 3, hf.hidden_size)
    assert (config.num_heads, config.num_kv_heads) == (hf.num_attention_heads, hf.num_key_value_heads)
    assert config.head_dim == getattr(hf, "head_dim", hf.hidden_size // hf.num_attention_heads)
    assert config.rope.theta == hf.rope_parameters["rope_theta"]


def test_model_type_stands_in_for_architectures():
    assert read(architectures=None, model_type="qwen3").architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "attention_bias", "qkv_bias", "o_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", True, True, True, False),
        ("MistralForCausalLM", False, False, False, False),
        ("Qwen2ForCausalLM", False, True, False, False),
        ("Qwen3ForCausalLM", False, False, False, True),
        ("Qwen3ForCausalLM", True, True, True, True),
    ],
)
def test_biases_and_norms(architecture, attention_bias, qkv_bias, o_bias, qk_norm):
    config = of(architecture, attention_bias=attention_bias)
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (qkv_bias, o_bias, qk_norm)


def test_head_dim():
    assert read(head_dim=128).head_dim == 128
    assert read(head_dim=None).head_dim == 16
    assert of("Qwen3ForCausalLM").head_dim == 128


@pytest.mark.parametrize(
    ("architecture", "fields", "window", "layers"),
    [
        ("MistralForCausalLM", {"sliding_window": 4096}, 4096, "1111"),
        ("MistralForCausalLM", {"sliding_window": None}, None, "0000"),
        ("MistralForCausalLM", {}, 4096, "1111"),
        ("LlamaForCausalLM", {"sliding_window": 4096}, None, "0000"),
        ("Qwen2ForCausalLM", {"sliding_window": 32768, "max_window_layers": 2}, None, "0000"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 2}, 512, "0011"),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 4}, None, "0000"),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 512,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            512,
            "1010",
        ),
    ],
)
def test_windows(architecture, fields, window, layers):
    config = of(architecture, **fields)
    assert config.sliding_window == window
    assert config.window_layers == tuple(c == "1" for c in layers)


@pytest.mark.parametrize("use", [True, False])
@pytest.mark.parametrize("first", [0, 1, 3, 4, 28])
def test_qwen_windows_are_those_of_transformers(use, first):
    fields = {"use_sliding_window": use, "sliding_window": 512, "max_window_layers": first}
    hf = transformers.Qwen2Config(num_hidden_layers=4, **fields)
    expected = tuple(kind == "sliding_attention" for kind in hf.layer_types)
    assert of("Qwen2ForCausalLM", **fields).window_layers == expected


def test_eos_ids_are_merged_in_order():
    config = read(eos_token_id=[7, 5], generation={"eos_token_id": [9, 7]})
    assert config.eos_token_ids == (7, 5, 9)
    assert read(eos_token_id=None, generation={"eos_token_id": 3}).eos_token_ids == (3,)
    assert read(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 8192),
        ({"rope_type": "linear", "factor": 2.0}, 16384),
        ({"type": "dynamic", "factor": 4.0}, 32768),
        ({**LLAMA3_ROPE, "original_max_position_embeddings": 4096}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
    ],
)
def test_context_length(rope, length):
    assert read(rope_scaling=rope).context_length == length


def test_yarn_factor_defaults_to_the_ratio():
    rope = read(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 2048}).rope
    assert rope.factor == 4.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": None, "model_type": "mamba"}, ["model_type", "mamba", "llama"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"mlp_bias": True}, ["mlp_bias", "True"]),
        ({"num_local_experts": 8}, ["num_local_experts", "8", "dense"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ["rope_type", "longrope", "yarn"]),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, ["mrope_section"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["llama3", "low_freq_factor"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, ["factor", "0.5", ">= 1"]),
        ({"rope_theta": -1.0}, ["rope_theta", "-1.0"]),
        ({"rope_scaling": {"rope_type": "default", "freq_divisors": [1.0]}}, ["freq_divisors", "8"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'", ">= 1"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0", ">= 1"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4"]),
        ({"head_dim": 15}, ["head_dim=15", "even"]),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["chunked_attention"]},
            ["layer_types", "chunked_attention"],
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            ["layer_types", "1", "4"],
        ),
    ],
)
def test_refusals_name_field_and_value(changes, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        read(**changes)
    for word in words[1:]:
        assert word in str(error.value)
