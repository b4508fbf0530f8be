"""Multi-token prediction modules in the manner of DeepSeek-V3 (2024), as draft heads.

The module is stored as one more layer of the target, `model.layers.{num_hidden_layers}.`: norms of token and hidden
state (enorm, hnorm), their projection (eh_proj), a decoder layer, and a norm (shared_head.norm) before the lm_head.
Embedding and lm_head are the target's; checkpoints usually repeat them. One module serves all K drafts, fed with its
own states. The decoder layer is a dense one of the target's family; latent attention and experts are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from models import llama
from models.base import Params
from models.checkpoint import open_checkpoint
from models.heads import HiddenStateHead, Renamed, head_layer, layer_specs, linear_spec, vector_spec
from models.llama import Llama

_TABLES = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


@dataclass(frozen=True)
class MTP(HiddenStateHead):
    """h' = layer(eh_proj [enorm(embedding); hnorm(h)]), logits = lm_head(shared_head.norm(h'))."""

    def specs(self) -> dict[str, Any]:
        d, dtype = self.layer.config.hidden_size, jnp.dtype(self.layer.dtype)
        pre = "model.layers.0."
        return {
            "enorm": vector_spec(pre + "enorm.weight", d),
            "hnorm": vector_spec(pre + "hnorm.weight", d),
            "eh_proj": linear_spec(pre + "eh_proj.weight", d, 2 * d, dtype),
            "layers": [layer_specs(self.layer)],
            "norm": vector_spec(pre + "shared_head.norm.weight", d),
        }

    def features(self, params: Params, hidden: jax.Array) -> jax.Array:
        return hidden[..., : self.layer.config.hidden_size]

    def mix(self, params: Params, embedded: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        eps = self.layer.config.rms_norm_eps
        both = [llama.rms_norm(embedded, params["enorm"], eps), llama.rms_norm(hidden, params["hnorm"], eps)]
        x = llama._dot(jnp.concatenate(both, axis=-1), params["eh_proj"], self.layer).astype(self.layer.stream_dtype)
        return llama.rms_norm(x, params["layers"][0]["attn_norm"], eps), x

    def logits(self, params: Params, state: jax.Array) -> jax.Array:
        return self.table_logits(params, llama.rms_norm(state, params["norm"], self.layer.config.rms_norm_eps))


def load_mtp(path: str | Path, target: Llama) -> MTP:
    """The module of a checkpoint that holds it behind the target's layers, or alone.

    Raises FileNotFoundError, or ValueError naming what is unsupported or missing.
    """
    source = open_checkpoint(path)
    config = source.config
    modules = config.get("num_nextn_predict_layers", 1)
    if modules != 1:
        raise ValueError(f"num_nextn_predict_layers={modules!r} is not supported; supported: 1")
    prefix = f"model.layers.{target.config.num_layers}."
    renamed = Renamed(source, lambda name: _canonical(name, prefix))
    layer = head_layer(_llama_config(config, target), target)
    return MTP(layer, target, renamed)


def _canonical(name: str, prefix: str) -> str | None:
    if not name.startswith(prefix):
        return None
    rest = name.removeprefix(prefix)
    return _TABLES.get(rest, f"model.layers.0.{rest}")


def _llama_config(config: Mapping[str, Any], target: Llama) -> dict[str, Any]:
    """The module's layer as a one-layer model of the target's family. Per-layer lists describe the target's layers."""
    kept = {k: v for k, v in config.items() if k not in ("layer_types", "num_nextn_predict_layers")}
    return kept | {"num_hidden_layers": 1, "architectures": [target.config.architecture], "use_sliding_window": False}
