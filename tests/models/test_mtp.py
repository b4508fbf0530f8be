"""A DeepSeek-style module against torch, stored behind a target's layers as one more of them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.base import ForwardInputs
from models.mtp import load_mtp

torch = pytest.importorskip("torch", reason="the reference implementation needs torch (extra: oracle)")

D, VOCAB, LENGTH, PAGE, LAYERS = 32, 89, 21, 4, 2
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": D, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "hidden_act": "silu",
    "num_nextn_predict_layers": 1,
}  # fmt: skip
PREFIX = f"model.layers.{LAYERS}."


@pytest.fixture(scope="module")
def target(make_llama):
    changes = {k: v for k, v in CONFIG.items() if k != "num_nextn_predict_layers"}
    return make_llama(**changes)


@pytest.fixture(scope="module")
def target_params(target):
    return target.load_params(None)


def make_module():
    """enorm, hnorm, eh_proj, a Qwen2 layer and shared_head.norm, with random weights."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2DecoderLayer, Qwen2RMSNorm

    settings = Qwen2Config(**{k: v for k, v in CONFIG.items() if k != "architectures"})
    settings._attn_implementation = "eager"
    module = Qwen2DecoderLayer(settings, 0)
    module.enorm, module.hnorm = Qwen2RMSNorm(D, eps=1e-5), Qwen2RMSNorm(D, eps=1e-5)
    module.eh_proj = torch.nn.Linear(2 * D, D, bias=False)
    module.shared_head = torch.nn.Module()
    module.shared_head.norm = Qwen2RMSNorm(D, eps=1e-5)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            noise *= 1.5 / parameter.shape[1] ** 0.5
        parameter.data.copy_(1 + 0.3 * noise if "norm" in name else noise)
    return module, settings


def reference(module, settings, embedded, hidden):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    length = len(hidden)
    rotary = Qwen2RotaryEmbedding(settings)(hidden[None], torch.arange(length)[None])
    mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
    x = module.eh_proj(torch.cat([module.enorm(embedded), module.hnorm(hidden)], -1))[None]
    return module(x, attention_mask=mask, position_embeddings=rotary)[0]


def save(path, tensors, config=CONFIG):
    from safetensors.torch import save_file

    (path / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, path / "model.safetensors")


def stored(module, target_params):
    """The module under the names of the layer behind the last, among tensors of the target; the tables are repeated."""
    table = torch.from_numpy(np.array(target_params["embed"]))
    return {
        **{PREFIX + name: tensor for name, tensor in module.state_dict().items()},
        PREFIX + "embed_tokens.weight": table,
        PREFIX + "shared_head.head.weight": torch.from_numpy(np.array(target_params["lm_head"])),
        "model.embed_tokens.weight": table,
        "model.layers.0.mlp.up_proj.weight": torch.zeros(48, D),
    }


def test_module(target, target_params, tmp_path):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, VOCAB, LENGTH).astype(np.int32)
    hidden = rng.standard_normal((LENGTH, D)).astype(np.float32)
    module, settings = make_module()
    save(tmp_path, stored(module, target_params))
    head = load_mtp(tmp_path, target)
    params = head.load_params(target_params, None)
    assert params["embed"] is target_params["embed"]
    assert params["lm_head"] is target_params["lm_head"]
    tables = 1 + rng.permutation(-(-LENGTH // PAGE))[None].astype(np.int32)
    positions = jnp.arange(1, LENGTH, dtype=jnp.int32)[None]
    inputs = ForwardInputs(jnp.asarray(tokens[1:])[None], positions, jnp.asarray(tables))
    with jax.default_matmul_precision("highest"):
        features = head.features(params, jnp.asarray(hidden[:-1])[None])
        states, _ = head.forward(params, head.init_kv(len(tables[0]) + 1, PAGE, None), inputs, features, None)
        logits = head.logits(params, states[0])
    with torch.no_grad():
        embedded = torch.from_numpy(np.array(target_params["embed"])[tokens[1:]])
        expected = reference(module, settings, embedded, torch.from_numpy(hidden[:-1]))
        normed = module.shared_head.norm(expected).numpy()
    np.testing.assert_allclose(states[0], expected.numpy(), atol=1e-4)
    np.testing.assert_allclose(logits, normed @ np.asarray(target_params["lm_head"]).T, atol=1e-4)


def test_a_head_that_is_not_the_targets(target, target_params, tmp_path):
    tensors = stored(make_module()[0], target_params)
    other = tensors[PREFIX + "shared_head.head.weight"] * 2
    save(tmp_path, tensors | {PREFIX + "shared_head.head.weight": other})
    params = load_mtp(tmp_path, target).load_params(target_params, None)
    np.testing.assert_array_equal(params["lm_head"], other.numpy())
    assert params["embed"] is target_params["embed"]


def test_bad_checkpoints(target, target_params, tmp_path):
    tensors = stored(make_module()[0], target_params)
    save(tmp_path, {k: v for k, v in tensors.items() if "eh_proj" not in k})
    with pytest.raises(ValueError, match=r"eh_proj.weight' is missing"):
        load_mtp(tmp_path, target).load_params(target_params, None)
    save(tmp_path, tensors | {PREFIX + "mlp.experts.0.up_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"has no place for: model.layers.0.mlp.experts"):
        load_mtp(tmp_path, target).load_params(target_params, None)
    save(tmp_path, tensors, CONFIG | {"num_nextn_predict_layers": 3})
    with pytest.raises(ValueError, match="num_nextn_predict_layers=3 is not supported; supported: 1"):
        load_mtp(tmp_path, target)
    save(tmp_path, {"model.layers.0.mlp.up_proj.weight": torch.zeros(48, D)})
    with pytest.raises(ValueError, match="is missing"):
        load_mtp(tmp_path, target).load_params(target_params, None)
