"""Medusa heads (Cai et al. 2024): each predicts one position further ahead from the target's last hidden state alone.

Head i is a stack of residual blocks, x + silu(linear(x)), then an lm_head of its own. Checkpoints are read in three
layouts: `medusa_head.{i}.{j}.linear.weight`, the same without the prefix (the authors' medusa_lm_head file), and
`blocks.{i}.layers.{j}.weight` with `lm_heads.{i}.weight`. Files must be safetensors; a .pt file becomes one by
`safetensors.torch.save_file(torch.load("medusa_lm_head.pt"), "model.safetensors")`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models import llama
from models import params as weights
from models.base import Params
from models.checkpoint import Checkpoint, open_checkpoint
from models.heads import Renamed
from models.llama import Llama
from models.params import ParamSpec

_OTHER_LAYOUT = ((r"blocks\.(\d+)\.layers\.(\d+)", r"\1.\2.linear"), (r"lm_heads\.(\d+)", r"\1.{last}"))


@dataclass(frozen=True)
class Medusa:
    """num_heads heads of num_layers blocks each, for the hidden states of `target`.

    bias: whether the blocks' linears have one. source: the checkpoint under canonical names, None for random weights.
    """

    target: Llama
    num_heads: int
    num_layers: int = 1
    bias: bool = True
    source: Checkpoint | None = field(default=None, compare=False)
    seed: int = 0

    def specs(self) -> dict[str, Any]:
        """The abstract weights."""
        return {"heads": [self._head(i) for i in range(self.num_heads)]}

    def _head(self, i: int) -> dict[str, Any]:
        d, v = self.target.config.hidden_size, self.target.vocab_size
        dtype, scale = jnp.dtype(self.target.dtype), d**-0.5

        def block(j: int) -> dict[str, ParamSpec]:
            name = f"medusa_head.{i}.{j}.linear."
            w = ParamSpec((d, d), (None, None), (name + "weight",), ((d, d),), np.transpose, scale, dtype)
            b = ParamSpec((d,), (None,), (name + "bias",), ((d,),), lambda x: x, 0, jnp.float32)
            return {"w": w, "b": b} if self.bias else {"w": w}

        name = f"medusa_head.{i}.{self.num_layers}.weight"
        table = ParamSpec((v, d), ("vocab", None), (name,), ((v, d),), lambda x: x, scale, dtype)
        return {"blocks": [block(j) for j in range(self.num_layers)], "lm_head": table}

    def load_params(self, mesh: Mesh | None) -> Params:
        """Raises ValueError naming a tensor that is missing, misshapen, or has no place."""
        if self.source is None:
            return weights.random_params(self.specs(), self.seed, mesh)
        return weights.load_params(self.specs(), self.source, mesh)

    def logits(self, params: Params, hidden: jax.Array, head: int) -> jax.Array:
        """float32 [B, V] of the token `head + 2` places after the position whose hidden states [B, D] are given."""
        w = params["heads"][head]
        x = hidden[..., : self.target.config.hidden_size].astype(self.target.stream_dtype)
        for block in w["blocks"]:
            y = llama._dot(x, block["w"], self.target)
            if self.bias:
                y = y + block["b"].astype(y.dtype)
            x = x + jax.nn.silu(y.astype(jnp.float32)).astype(x.dtype)
        return llama._dot_t(x.astype(w["lm_head"].dtype), w["lm_head"])


def load_medusa(path: str | Path, target: Llama) -> Medusa:
    """The heads of a directory with config.json and safetensors.

    Raises FileNotFoundError, or ValueError naming what is unsupported.
    """
    source = open_checkpoint(path)
    config = source.config
    heads = _count(config, "medusa_num_heads", "num_heads")
    layers = _count(config, "medusa_num_layers", "num_hidden_layers", default=1)
    for name, ours in (("hidden_size", target.config.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(name, ours) != ours:
            raise ValueError(f"{name}={config[name]!r} of the draft heads must be the target's, {ours}")
    renamed = Renamed(source, lambda name: _canonical(name, layers))
    return Medusa(target, heads, layers, any(n.endswith("linear.bias") for n in renamed.names()), renamed)


def _canonical(name: str, num_layers: int) -> str:
    for pattern, replacement in _OTHER_LAYOUT:
        name = re.sub(pattern, replacement.replace("{last}", str(num_layers)), name)
    return "medusa_head." + re.sub(r"^medusa_heads?\.", "", name)


def _count(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    value = next((config[name] for name in names if name in config), default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{names[0]}={value!r} must be an integer >= 1")
    return value
