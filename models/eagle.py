"""EAGLE and EAGLE-3 draft heads (Li et al. 2024, 2025), with checkpoints in the layouts their authors published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import llama
from models.base import Params
from models.checkpoint import open_checkpoint
from models.heads import HiddenStateHead, Renamed, head_layer, layer_specs, linear_spec, llama_names, vector_spec
from models.llama import Llama
from models.params import ParamSpec


@dataclass(frozen=True)
class Eagle(HiddenStateHead):
    """EAGLE: a linear mixture of token and hidden state, then a decoder layer that predicts the next hidden state.

    The layer has no norm before attention; states are read by the target's lm_head as they are. fc_bias: whether the
    mixture has one.
    """

    fc_bias: bool = False

    def specs(self) -> dict[str, Any]:
        d, dtype = self.layer.config.hidden_size, jnp.dtype(self.layer.dtype)
        layer = layer_specs(self.layer)
        del layer["attn_norm"]
        specs: dict[str, Any] = {"fc": linear_spec("fc.weight", d, 2 * d, dtype), "layers": [layer]}
        if self.fc_bias:
            specs["fc_bias"] = vector_spec("fc.bias", d, scale=0.02)
        return specs

    def features(self, params: Params, hidden: jax.Array) -> jax.Array:
        return hidden[..., : self.layer.config.hidden_size]

    def mix(self, params: Params, embedded: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = llama._dot(jnp.concatenate([embedded, hidden], axis=-1), params["fc"], self.layer)
        if self.fc_bias:
            x = x + params["fc_bias"].astype(x.dtype)
        x = x.astype(self.layer.stream_dtype)
        return x, x

    def logits(self, params: Params, state: jax.Array) -> jax.Array:
        return self.table_logits(params, state)


@dataclass(frozen=True)
class Eagle3(HiddenStateHead):
    """EAGLE-3: hidden states of three of the target's layers, attention over token and state side by side, and an
    lm_head of its own over a reduced vocabulary.

    The target must return its features behind its last hidden state: [..., D + 3 D'] (see `feature_layers`); only the
    last 3 D' are read. draft_vocab_size: W. norm_before_residual: the residual stream starts from the normalised state
    (a variant of the "speculators" format).
    """

    draft_vocab_size: int = 0
    norm_before_residual: bool = False

    def specs(self) -> dict[str, Any]:
        d, v, dtype = self.layer.config.hidden_size, self.draft_vocab_size, jnp.dtype(self.layer.dtype)
        wide = 3 * self.target.config.hidden_size
        layer = layer_specs(self.layer, input_width=2 * d)
        layer["hidden_norm"] = vector_spec("model.layers.0.hidden_norm.weight", d)
        table = ParamSpec((v, d), ("vocab", None), ("lm_head.weight",), ((v, d),), lambda x: x, d**-0.5, dtype)
        specs: dict[str, Any] = {
            "fc": linear_spec("fc.weight", d, wide, dtype),
            "layers": [layer],
            "norm": vector_spec("norm.weight", d),
            "lm_head": table,
        }
        if v != self.layer.config.vocab_size:
            specs["target_ids"] = ParamSpec((v,), (None,), ("d2t",), ((v,),), _absolute_ids, 0, jnp.int32)
        return specs

    def _unused(self) -> str:
        return r"t2d|d2t|" + super()._unused()

    def features(self, params: Params, hidden: jax.Array) -> jax.Array:
        wide = params["fc"].shape[0]
        if hidden.shape[-1] < wide:
            raise ValueError(
                f"hidden states of the target have width {hidden.shape[-1]}; EAGLE-3 reads features of width {wide}: "
                "set the target's feature_layers"
            )
        return llama._dot(hidden[..., -wide:], params["fc"], self.layer)

    def mix(self, params: Params, embedded: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        w, eps = params["layers"][0], self.layer.config.rms_norm_eps
        normed = llama.rms_norm(hidden, w["hidden_norm"], eps)
        both = jnp.concatenate([llama.rms_norm(embedded, w["attn_norm"], eps), normed], axis=-1)
        return both, normed if self.norm_before_residual else hidden

    def logits(self, params: Params, state: jax.Array) -> jax.Array:
        return self.table_logits(params, llama.rms_norm(state, params["norm"], self.layer.config.rms_norm_eps))

    def target_ids(self, params: Params) -> jax.Array | None:
        return params.get("target_ids")


def feature_layers(num_layers: int, config: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """The target's layers whose inputs (residual streams) EAGLE-3 reads: (2, L // 2, L - 3), or what the head's
    config.json names."""
    config = config or {}
    inner = config.get("eagle_config") or {}
    named = config.get("eagle_aux_hidden_state_layer_ids") or inner.get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(named) if named else (2, num_layers // 2, num_layers - 3)
    if len(layers) != 3 or not all(0 <= i < num_layers for i in layers):
        raise ValueError(f"eagle_aux_hidden_state_layer_ids={layers} must be three layers of a model with {num_layers}")
    return layers


def load_eagle(path: str | Path, target: Llama) -> Eagle:
    """An EAGLE head for `target` from a directory with config.json and safetensors.

    Raises FileNotFoundError, or ValueError naming what is unsupported.
    """
    source = Renamed(open_checkpoint(path), llama_names)
    layer = head_layer(_llama_config(source.config), target)
    return Eagle(layer, target, source, fc_bias="fc.bias" in source.names())


def load_eagle3(path: str | Path, target: Llama) -> Eagle3:
    """An EAGLE-3 head for `target`, in the authors' layout or that of the speculators library.

    Raises FileNotFoundError, or ValueError naming what is unsupported.
    """
    source = Renamed(open_checkpoint(path), llama_names)
    config = _llama_config(source.config)
    layer = head_layer(config, target)
    rows = int(config.get("draft_vocab_size") or layer.config.vocab_size)
    if not 1 <= rows <= layer.config.vocab_size:
        raise ValueError(f"draft_vocab_size={rows} must be in [1, vocab_size = {layer.config.vocab_size}]")
    before = bool(config.get("norm_before_residual", False))
    return Eagle3(layer, target, source, draft_vocab_size=rows, norm_before_residual=before)


def _llama_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A head's config.json as that of a one-layer Llama, whatever it calls itself."""
    inner = config.get("transformer_layer_config") or {}  # the speculators format nests the layer's description
    return {**config, **inner, "architectures": ["LlamaForCausalLM"]}


def _absolute_ids(offsets: np.ndarray) -> np.ndarray:
    """d2t holds, for each draft id, how far the target's id is from it."""
    return np.arange(len(offsets)) + offsets
