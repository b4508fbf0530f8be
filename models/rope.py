"""Rotary position embeddings: frequencies for every supported scaling, and their application."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from models.config import RopeConfig


def rope_inv_freq(rope: RopeConfig, head_dim: int, max_model_len: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies, float32 [head_dim/2], and the factor by which cos and sin are to be multiplied.

    The kind "dynamic" (NTK) is evaluated once, at the longest sequence the engine admits: were it to follow each
    sequence's length, cached keys would depend on the length of whoever wrote them and could not be shared.
    """
    if rope.kind == "linear":
        inv_freq, attention_factor = _plain(rope.theta, head_dim) / np.float32(rope.factor), 1.0
    elif rope.kind == "dynamic":
        inv_freq, attention_factor = _plain(_ntk_theta(rope, head_dim, max_model_len), head_dim), 1.0
    elif rope.kind == "llama3":
        inv_freq, attention_factor = _llama3(rope, head_dim), 1.0
    elif rope.kind == "yarn":
        inv_freq, attention_factor = _yarn(rope, head_dim), _yarn_attention_factor(rope)
    else:
        inv_freq, attention_factor = _plain(rope.theta, head_dim), 1.0
    if rope.freq_divisors:
        inv_freq = inv_freq / np.asarray(rope.freq_divisors, np.float32)
    return inv_freq.astype(np.float32), attention_factor


def rope_cos_sin(positions: jax.Array, inv_freq: ArrayLike, attention_factor: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., head_dim/2], at integer `positions` [...]."""
    angles = positions[..., None].astype(jnp.float32) * inv_freq
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates `x` [..., heads, head_dim]; dimension i is paired with i + head_dim/2 (Hugging Face's `rotate_half`).

    `cos` and `sin` are float32 [..., head_dim/2], without the head axis. Computed in float32, returned in x's dtype.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _plain(theta: float, head_dim: int) -> np.ndarray:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1.0) / np.float32(theta) ** exponents


def _ntk_theta(rope: RopeConfig, head_dim: int, max_model_len: int) -> float:
    original = rope.original_max_position_embeddings
    length = max(max_model_len, original)
    stretch = rope.factor * length / original - (rope.factor - 1)
    return rope.theta * stretch ** (head_dim / (head_dim - 2))


def _llama3(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Long wavelengths are slowed down by `factor`, short ones kept, those between interpolated."""
    inv_freq = _plain(rope.theta, head_dim)
    turns = rope.original_max_position_embeddings * inv_freq / (2 * np.float32(math.pi))
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Dimensions that turn more than beta_fast times in the original context keep their frequency, those that turn less
    than beta_slow times are interpolated, with a linear ramp between them."""
    inv_freq = _plain(rope.theta, head_dim)

    def dimension(turns: float) -> float:
        original = rope.original_max_position_embeddings
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / width, 0.0, 1.0)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
