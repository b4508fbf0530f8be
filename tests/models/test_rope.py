"""Rotary embeddings against transformers, number by number."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import ModelConfig, RopeConfig
from models.rope import apply_rope, rope_cos_sin, rope_inv_freq

torch = pytest.importorskip("torch")

CASES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama-3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama-3.2": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, no truncation": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn, betas": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 64.0,
        "beta_slow": 2.0,
    },
    "yarn, stated attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    "yarn, mscale alone": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.5,
    },
    "yarn, factor 1": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096},
}


def configs(rope, theta, head_dim):
    """The same model for transformers and for us."""
    from transformers import LlamaConfig

    hf = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        num_hidden_layers=1,
        intermediate_size=8,
        max_position_embeddings=8192,
        rope_parameters={**rope, "rope_theta": theta},
    )
    return hf, ModelConfig.from_hf(hf.to_dict() | {"architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("case", CASES)
def test_frequencies(case, theta, head_dim):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf, config = configs(CASES[case], theta, head_dim)
    max_model_len = 20000
    reference = LlamaRotaryEmbedding(hf)
    reference(torch.zeros(1), torch.tensor([[max_model_len - 1]]))  # "dynamic" adapts to the longest position seen
    inv_freq, factor = rope_inv_freq(config.rope, head_dim, max_model_len)
    assert inv_freq.dtype == np.float32
    assert inv_freq.shape == (head_dim // 2,)
    np.testing.assert_allclose(inv_freq, reference.inv_freq.numpy(), rtol=3e-6)
    assert math.isclose(factor, reference.attention_scaling, rel_tol=1e-12)


def test_dynamic_does_not_stretch_short_contexts():
    rope = RopeConfig(kind="dynamic", factor=2.0, original_max_position_embeddings=8192)
    plain, _ = rope_inv_freq(RopeConfig(), 64, 8192)
    np.testing.assert_array_equal(rope_inv_freq(rope, 64, 100)[0], plain)
    assert rope_inv_freq(rope, 64, 16384)[0][-1] < plain[-1]


def test_frequency_divisors_can_state_llama3_scaling():
    """GGUF files give the divisors that llama3 scaling amounts to."""
    _, config = configs(CASES["llama-3.1"], 500000.0, 128)
    expected, _ = rope_inv_freq(config.rope, 128, 8192)
    plain, _ = rope_inv_freq(RopeConfig(theta=500000.0), 128, 8192)
    rope = RopeConfig(theta=500000.0, freq_divisors=tuple((plain / expected).tolist()))
    np.testing.assert_allclose(rope_inv_freq(rope, 128, 8192)[0], expected, rtol=1e-6)


def test_application_matches_transformers():
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    hf, config = configs(CASES["yarn"], 10000.0, 64)
    x = np.random.default_rng(0).standard_normal((5, 3, 64), dtype=np.float32)  # [T, heads, head_dim]
    positions = np.array([0, 1, 77, 4000, 8191])
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), torch.from_numpy(positions)[None])
    expected, _ = apply_rotary_pos_emb(*[torch.from_numpy(x)[None].transpose(1, 2)] * 2, cos, sin)
    inv_freq, factor = rope_inv_freq(config.rope, 64, 8192)
    actual = apply_rope(jnp.asarray(x), *rope_cos_sin(jnp.asarray(positions), inv_freq, factor))
    np.testing.assert_allclose(actual, expected[0].transpose(0, 1).numpy(), rtol=1e-3, atol=2e-3)


def test_scores_depend_on_distance_only():
    inv_freq, factor = rope_inv_freq(RopeConfig(), 32, 128)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 32))

    def score(i, j):
        rotated = [apply_rope(x, *rope_cos_sin(jnp.array(p), inv_freq, factor)) for x, p in ((q, i), (k, j))]
        return float(jnp.vdot(*rotated))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-3)
    assert score(3, 3) == pytest.approx(float(jnp.vdot(q, k)), abs=1e-4)


def test_dtype_is_kept():
    x = jnp.ones((2, 1, 8), jnp.bfloat16)
    cos_sin = rope_cos_sin(jnp.arange(2), jnp.ones(4), 1.0)
    assert cos_sin[0].dtype == jnp.float32
    assert apply_rope(x, *cos_sin).dtype == jnp.bfloat16
