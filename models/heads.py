"""What the draft heads that read a target's hidden states (EAGLE, EAGLE-3, MTP) have in common.

Such a head is one decoder layer over entries made of a token and the target's hidden state one position earlier. The
entry of (hidden state of position p - 1, token p) is stored at position p. It depends on tokens up to p alone, so a
page of the head's KV is valid for whoever shares the target's page, also at the page's end. Position 0 has no entry and
is hidden from attention. Rotary positions are p - 1, the published numbering; only differences matter.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models import llama
from models import params as weights
from models.attention import PagedKV, store_and_attend
from models.base import ForwardInputs, Params
from models.checkpoint import Checkpoint, missing_tensor
from models.config import ModelConfig
from models.llama import Llama
from models.params import ParamSpec
from models.rope import apply_rope
from models.sharding import constrain
from pallas_kernels.paged_attention import EVERYTHING

_SAMPLED_ROWS = 64  # of a table, compared to tell a copy of the target's from a head's own


class Renamed:
    """A checkpoint whose tensors go by other names; those that `rename` maps to None are not there."""

    def __init__(self, source: Checkpoint, rename: Any) -> None:
        self.path: Path = source.path
        self.config: Mapping[str, Any] = source.config
        self.generation_config: Mapping[str, Any] | None = source.generation_config
        self._source = source
        self._names = {new: old for old in source.names() if (new := rename(old)) is not None}

    def names(self) -> Collection[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._actual(name))

    def get(self, name: str) -> np.ndarray:
        return self._source.get(self._actual(name))

    def _actual(self, name: str) -> str:
        if name not in self._names:
            raise missing_tensor(name, self.path)
        return self._names[name]


@dataclass(frozen=True)
class HiddenStateHead(ABC):
    """One decoder layer behind a mixture of token and hidden state. Subclasses say what is mixed, and how it is read.

    layer: the architecture of the layer and how it is computed; its config has num_layers = 1.
    target: the model whose hidden states are read and whose embedding (and lm_head) are used.
    source: the head's checkpoint under canonical names, None for random weights from `seed`.
    """

    layer: Llama
    target: Llama
    source: Checkpoint | None = field(default=None, compare=False)
    seed: int = 0

    @abstractmethod
    def specs(self) -> dict[str, Any]:
        """The abstract weights of its own."""

    @abstractmethod
    def features(self, params: Params, hidden: jax.Array) -> jax.Array:
        """The target's hidden states [..., D_target] as `forward` takes them, [..., D]."""

    @abstractmethod
    def mix(self, params: Params, embedded: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(input of attention [N, Q, I], residual stream [N, Q, D]) of embedded tokens and features, each [N, Q, D]."""

    @abstractmethod
    def logits(self, params: Params, state: jax.Array) -> jax.Array:
        """States [R, D] of `forward` -> float32 [R, W] over the head's own vocabulary (see `target_ids`)."""

    def target_ids(self, params: Params) -> jax.Array | None:
        """[W] int32, the target's id of each entry of the logits; None where they are the same."""
        return None

    def load_params(self, target_params: Params, mesh: Mesh | None) -> Params:
        """Its weights, and the target's tables: embed and lm_head, the target's own arrays, which cost nothing.

        Raises ValueError naming a tensor that is missing, misshapen, or has no place.
        """
        embed = target_params["embed"]
        shared = {"embed": embed, "lm_head": target_params.get("lm_head", embed)}
        return shared | self._own_tables(shared, mesh) | self._own_params(mesh)

    def _own_params(self, mesh: Mesh | None) -> dict[str, Any]:
        if self.source is None:
            return weights.random_params(self.specs(), self.seed, mesh)
        return weights.load_params(self.specs(), self.source, mesh, unused=self._unused())

    def _unused(self) -> str:
        return r"(embed_tokens|lm_head)\.weight|.*rotary_emb\.inv_freq"

    def _own_tables(self, shared: Mapping[str, jax.Array], mesh: Mesh | None) -> dict[str, jax.Array]:
        """Embedding and lm_head of the checkpoint where they are not copies of the target's."""
        if self.source is None:
            return {}
        specs = {
            name: self._table_spec(name, tensor)
            for name, tensor in (("embed", "embed_tokens.weight"), ("lm_head", "lm_head.weight"))
            if tensor in self.source.names()
            and name not in self.specs()
            and not _is_copy(self.source, tensor, shared[name])
        }
        return weights.load_params(specs, self.source, mesh, unused=".*")

    def _table_spec(self, name: str, tensor: str) -> ParamSpec:
        c = self.layer.config
        shape = (c.vocab_size, c.hidden_size)
        return ParamSpec(shape, ("vocab", None), (tensor,), (shape,), lambda x: x, None, jnp.dtype(self.layer.dtype))

    def init_kv(self, num_blocks: int, block_size: int, mesh: Mesh | None) -> PagedKV:
        return self.layer.init_kv(num_blocks, block_size, mesh)[0]

    def forward(
        self, params: Params, kv: PagedKV, inputs: ForwardInputs, hidden: jax.Array, mesh: Mesh | None
    ) -> tuple[jax.Array, PagedKV]:
        """Store the entries of (hidden, token) pairs and return their states [N, Q, D]: the next step's features.

        inputs.positions: [N, Q], that of the token, >= 1, or -1 for padding. hidden: [N, Q, D] features of the position
        before, whatever at padding.
        """
        model, w = self.layer, params["layers"][0]
        hidden = jnp.where(inputs.positions[..., None] >= 0, hidden, 0).astype(model.stream_dtype)
        with jax.named_scope("mix"):
            embedded = params["embed"][inputs.tokens].astype(model.stream_dtype)
            y, x = self.mix(params, embedded, hidden)
        with jax.named_scope("attention"):
            out, kv = attend(model, w, y, kv, inputs, mesh)
            x = constrain(x + out.astype(x.dtype), (None, None, None), mesh)
        with jax.named_scope("mlp"):
            return llama._mlp(model, w, x, mesh), kv

    def table_logits(self, params: Params, state: jax.Array) -> jax.Array:
        """[R, D] -> float32 [R, V] by the lm_head, the target's unless the head has one."""
        table = params["lm_head"]
        return llama._dot_t(state.astype(table.dtype), table)


def attend(
    model: Llama, w: Mapping[str, jax.Array], y: jax.Array, kv: PagedKV, inputs: ForwardInputs, mesh: Mesh | None
) -> tuple[jax.Array, PagedKV]:
    """Self-attention of a head's only layer: y [N, Q, I] -> [N, Q, D], and the cache with the entries stored."""
    c = model.config
    n, q_len, _ = y.shape
    g = c.num_heads // c.num_kv_heads
    y = llama._dot(y, w["wqkv"], model)  # [N, Q, H, G+2, E]
    if "bqkv" in w:
        y = y + w["bqkv"].astype(y.dtype)
    y = constrain(y, (None, None, "kv_heads", None, None), mesh)
    q, k, v = y[..., :g, :], y[..., g, :], y[..., g + 1, :]
    if "q_norm" in w:
        q, k = (llama.rms_norm(x, w[name], c.rms_norm_eps) for x, name in ((q, "q_norm"), (k, "k_norm")))
    rope = llama.rope_tables(model, inputs.positions - 1)
    q = apply_rope(q.reshape(n, q_len, c.num_heads, c.head_dim), *rope).reshape(q.shape)
    k = apply_rope(k, *rope)
    out, kv = store_and_attend(
        q, k, v, kv, inputs.positions, inputs.block_tables, EVERYTHING, jnp.dtype(model.dtype), model.platform,
        mesh, written=inputs.written, first_key=1,
        implementation=model.attention_implementation,
    )  # fmt: skip
    out = llama._dot(out.reshape(n, q_len, -1), w["wo"].reshape(-1, c.hidden_size), model)
    return out + w["bo"].astype(out.dtype) if "bo" in w else out, kv


def layer_specs(layer: Llama, input_width: int | None = None) -> dict[str, ParamSpec]:
    """Abstract weights of the layer under Llama's names; input_width: of attention, where it is not D."""
    specs = dict(llama.declare(layer.config, jnp.dtype(layer.dtype))["layers"][0])
    if input_width is not None:
        wide = specs["wqkv"]
        parts = tuple((rows, input_width) for rows, _ in wide.parts)
        specs["wqkv"] = replace(wide, shape=(input_width, *wide.shape[1:]), parts=parts, scale=input_width**-0.5)
    return specs


def linear_spec(name: str, rows: int, columns: int, dtype: Any) -> ParamSpec:
    """A Linear of the checkpoint, [out, in] there and [in, out] here, whole on every device."""
    return ParamSpec((columns, rows), (None, None), (name,), ((rows, columns),), np.transpose, columns**-0.5, dtype)


def vector_spec(name: str, size: int, scale: float | None = None) -> ParamSpec:
    """A norm's weight (ones when random) or a bias, float32."""
    return ParamSpec((size,), (None,), (name,), ((size,),), lambda x: x, scale, jnp.float32)


def head_layer(config: Mapping[str, Any], target: Llama) -> Llama:
    """The layer that a head's config.json describes, computed as the target is.

    Raises ValueError when a field is missing or unsupported, or the head is of another width or vocabulary.
    """
    c = ModelConfig.from_hf(config)
    if c.num_layers != 1:
        raise ValueError(f"num_hidden_layers={c.num_layers} of a draft head is not supported; supported: 1")
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(c, name), getattr(target.config, name)
        if ours != theirs:
            raise ValueError(f"{name}={ours} of the draft head must be the target's, {theirs}")
    return Llama(c, dtype=target.dtype, platform=target.platform).attending_as(target)


def llama_names(name: str) -> str:
    """Names of EAGLE checkpoints, in which `model.` may be missing and the layer is called `midlayer`, as Llama's."""
    name = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
    return f"model.{name}" if name.startswith("layers.") else name


def _is_copy(source: Checkpoint, name: str, table: jax.Array) -> bool:
    """Whether a table of the checkpoint is the target's, by rows spread over it."""
    if source.shape(name) != table.shape:
        return False
    rows = np.linspace(0, table.shape[0] - 1, _SAMPLED_ROWS).astype(int)
    ours = np.asarray(source.get(name)[rows], np.float32)
    return bool(np.allclose(ours, np.asarray(table[rows], np.float32), rtol=2**-7, atol=1e-6))
