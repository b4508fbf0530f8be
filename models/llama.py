"""The Llama family as functions: Llama 2/3, Mistral, Qwen2, Qwen3, SmolLM2.

Axes: N query groups, Q positions in a group, D model width, F feed-forward width, H KV heads, G query heads to
a KV head, E head width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models import params as weights
from models.attention import KV_AXES, PagedKV, storage_dtype, store_and_attend
from models.base import ForwardInputs, Params
from models.checkpoint import Checkpoint
from models.config import ModelConfig
from models.params import ParamSpec
from models.rope import apply_rope, rope_cos_sin, rope_inv_freq
from models.sharding import constrain, sharding
from pallas_kernels.paged_attention import EVERYTHING, check_attention


@dataclass(frozen=True)
class Llama:
    """A Llama-family model bound to where its weights come from.

    config:   architecture.
    dtype:    of weights, activations and KV ("float32" or "bfloat16"); norms, softmax and logits are float32.
    platform: "cpu" or "gpu", chooses between programs that give the same result: on CPU dots return float32.
    source:   a checkpoint, or None for random weights from `seed`.
    rope_length: positions that "dynamic" rope scaling is evaluated for (models.rope).
    feature_layers: layers whose inputs stand behind the last hidden state in what `forward` returns.
    attention_implementation: of pallas_kernels.paged_attention, for the few positions of a decode.
    """

    config: ModelConfig
    dtype: str = "float32"
    platform: str = "cpu"
    source: Checkpoint | None = field(default=None, compare=False)
    seed: int = 0
    rope_length: int | None = None
    feature_layers: tuple[int, ...] = ()
    attention_implementation: str | None = None

    def with_attention_implementation(self, implementation: str, block_size: int) -> Llama:
        """The same model, whose decode attends with this implementation of pallas_kernels.paged_attention to pages of
        `block_size` positions. Raises ValueError where it cannot."""
        check_attention(implementation, jnp.dtype(self.dtype), self.config.head_dim, block_size)
        return replace(self, attention_implementation=implementation)

    def attending_as(self, target: Llama) -> Llama:
        """The same model, with the target's attention_implementation if its heads are as wide as those."""
        same = self.config.head_dim == target.config.head_dim
        return replace(self, attention_implementation=target.attention_implementation if same else None)

    def with_max_model_len(self, length: int) -> Llama:
        """The same model serving at most `length` positions."""
        return replace(self, rope_length=length)

    def with_feature_layers(self, layers: Sequence[int]) -> Llama:
        """The same model, with hidden states [..., (1 + F) D]: behind the last one the residual streams that F layers
        read, for heads such as EAGLE-3. Raises ValueError for a layer that it does not have."""
        if not all(0 <= layer < self.config.num_layers for layer in layers):
            raise ValueError(f"feature_layers={tuple(layers)} must be in [0, {self.config.num_layers - 1}]")
        return replace(self, feature_layers=tuple(layers))

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.config.context_length

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The content of the checkpoint's generation_config.json; nothing where it has none."""
        return (None if self.source is None else self.source.generation_config) or {}

    @property
    def stream_dtype(self) -> str:
        """Of the residual stream: CPU widens bfloat16 arithmetic anyway, so there it stays float32."""
        return "float32" if self.platform == "cpu" else self.dtype

    def specs(self) -> dict[str, Any]:
        """The abstract weights."""
        return declare(self.config, jnp.dtype(self.dtype))

    def load_params(self, mesh: Mesh | None) -> Params:
        if self.source is None:
            return weights.random_params(self.specs(), self.seed, mesh)
        unused = r".*rotary_emb\.inv_freq|lm_head\.weight"
        if self.source.config.get("num_nextn_predict_layers"):  # modules for speculation (models.mtp)
            unused += rf"|model\.layers\.{self.config.num_layers}\..*"
        return weights.load_params(self.specs(), self.source, mesh, unused=unused)

    def kv_spec(self, num_blocks: int, block_size: int, mesh: Mesh | None) -> tuple[PagedKV, ...]:
        """Abstract page pools, one for each layer."""
        c = self.config
        shape = (num_blocks, block_size, c.num_kv_heads, c.head_dim)
        spec = jax.ShapeDtypeStruct(
            shape, storage_dtype(jnp.dtype(self.dtype), self.platform),
            sharding=sharding(KV_AXES, shape, mesh),
        )  # fmt: skip
        return (PagedKV(k=spec, v=spec),) * c.num_layers

    def init_kv(self, num_blocks: int, block_size: int, mesh: Mesh | None) -> tuple[PagedKV, ...]:
        spec = self.kv_spec(num_blocks, block_size, mesh)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), spec)

    def forward(
        self, params: Params, kv: tuple[PagedKV, ...], inputs: ForwardInputs, mesh: Mesh | None
    ) -> tuple[jax.Array, tuple[PagedKV, ...]]:
        return forward(self, params, kv, inputs, mesh)

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        with jax.named_scope("lm_head"):
            table = params["embed"] if self.config.tie_word_embeddings else params["lm_head"]  # [V, D]
            return _dot_t(hidden[..., : self.config.hidden_size].astype(table.dtype), table)


def declare(c: ModelConfig, dtype: Any) -> dict[str, Any]:
    """Abstract weights of a configuration. Projections that read the same input are one array, grouped by KV
    head so that a shard holds whole heads: wqkv [D, H, G+2, E], gate_up [D, 2, F]."""
    d, f, v = c.hidden_size, c.intermediate_size, c.vocab_size
    h, e, g = c.num_kv_heads, c.head_dim, c.num_heads // c.num_kv_heads
    pre = "model.layers.{i}."
    std = 1 / math.sqrt(d)

    def spec(shape, axes, names, parts, assemble, scale=std, kind=dtype):
        return ParamSpec(shape, axes, tuple(names), tuple(parts), assemble, scale, kind)

    def vector(name, size):  # norms and their like: kept in float32, read once, cheap
        return spec((size,), (None,), [name], [(size,)], lambda x: x, None, jnp.float32)

    def join_qkv(q, k, v):
        rest = q.shape[1:]
        parts = (q.reshape(h, g, e, *rest), k.reshape(h, 1, e, *rest), v.reshape(h, 1, e, *rest))
        return np.concatenate(parts, axis=1)  # [H, G+2, E, ...]

    qkv = [pre + f"self_attn.{x}_proj." for x in "qkv"]
    widths = (h * g * e, h * e, h * e)
    layer: dict[str, ParamSpec] = {
        "attn_norm": vector(pre + "input_layernorm.weight", d),
        "wqkv": spec((d, h, g + 2, e), (None, "kv_heads", None, None), [n + "weight" for n in qkv],
                     [(w, d) for w in widths], lambda q, k, v: np.moveaxis(join_qkv(q, k, v), -1, 0)),
        "wo": spec((h, g, e, d), ("kv_heads", None, None, None), [pre + "self_attn.o_proj.weight"],
                   [(d, h * g * e)], lambda o: o.T.reshape(h, g, e, d)),
        "mlp_norm": vector(pre + "post_attention_layernorm.weight", d),
        "gate_up": spec((d, 2, f), (None, None, "mlp"), [pre + "mlp.gate_proj.weight", pre + "mlp.up_proj.weight"],
                        [(f, d), (f, d)], lambda gate, up: np.stack([gate.T, up.T], axis=1)),
        "down": spec((f, d), ("mlp", None), [pre + "mlp.down_proj.weight"], [(d, f)], lambda x: x.T,
                     1 / math.sqrt(f)),
    }  # fmt: skip
    if c.qkv_bias:
        layer["bqkv"] = spec((h, g + 2, e), ("kv_heads", None, None), [n + "bias" for n in qkv],
                             [(w,) for w in widths], join_qkv, std, jnp.float32)  # fmt: skip
    if c.o_bias:
        layer["bo"] = spec((d,), (None,), [pre + "self_attn.o_proj.bias"], [(d,)], lambda x: x, std, jnp.float32)
    if c.qk_norm:
        layer["q_norm"] = vector(pre + "self_attn.q_norm.weight", e)
        layer["k_norm"] = vector(pre + "self_attn.k_norm.weight", e)
    tree: dict[str, Any] = {
        "embed": spec((v, d), ("vocab", None), ["model.embed_tokens.weight"], [(v, d)], lambda x: x),
        "layers": [layer] * c.num_layers,
        "final_norm": vector("model.norm.weight", d),
    }
    if not c.tie_word_embeddings:
        tree["lm_head"] = spec((v, d), ("vocab", None), ["lm_head.weight"], [(v, d)], lambda x: x)
    return tree


def forward(
    model: Llama, params: Params, kv: tuple[PagedKV, ...], inputs: ForwardInputs, mesh: Mesh | None
) -> tuple[jax.Array, tuple[PagedKV, ...]]:
    """[N, Q] tokens -> normalised hidden states [N, Q, D] (and features behind them, [N, Q, (1 + F) D]), and the cache
    with their keys and values."""
    c = model.config
    with jax.named_scope("embed"):
        x = params["embed"][inputs.tokens].astype(model.stream_dtype)  # [N, Q, D]
    rope = rope_tables(model, inputs.positions)
    if model.platform == "cpu":
        rope = jax.tree.map(_computed_once, rope)
    windows = [c.sliding_window if on and c.sliding_window else EVERYTHING for on in c.window_layers]

    @partial(jax.jit, static_argnames="window")  # so that it is traced once, not for every layer
    def block(x, kv, w, window):
        with jax.named_scope("attention"):
            x, kv = _attention(model, w, x, kv, window, rope, inputs, mesh)
        with jax.named_scope("mlp"):
            return _mlp(model, w, x, mesh), kv

    x, kv, features = _run_layers(model, block, params["layers"], x, kv, windows)
    x = rms_norm(x, params["final_norm"], c.rms_norm_eps)
    return (jnp.concatenate([x, *features], axis=-1) if features else x), kv


def _run_layers(model, block, layers, x, kv, windows):
    """x through all layers; and the streams that model.feature_layers read. Unrolled: a scan over stacked weights would
    copy those of each layer before it multiplies by them, on CPUs and on GPUs: three times the bytes of a decode."""
    streams, stored = [x], []
    for w, pool, window in zip(layers, kv, windows, strict=True):
        x, pool = block(x, pool, w, window=window)
        streams.append(x)
        stored.append(pool)
    return x, tuple(stored), [streams[i] for i in model.feature_layers]


def _attention(model, w, x, kv, window, rope, inputs, mesh):
    c = model.config
    n, q_len, _ = x.shape
    g = c.num_heads // c.num_kv_heads
    y = _dot(rms_norm(x, w["attn_norm"], c.rms_norm_eps), w["wqkv"], model)  # [N, Q, H, G+2, E]
    if "bqkv" in w:
        y = y + w["bqkv"].astype(y.dtype)
    y = constrain(y, (None, None, "kv_heads", None, None), mesh)
    q, k, v = y[..., :g, :], y[..., g, :], y[..., g + 1, :]
    if "q_norm" in w:
        q, k = rms_norm(q, w["q_norm"], c.rms_norm_eps), rms_norm(k, w["k_norm"], c.rms_norm_eps)
    q = apply_rope(q.reshape(n, q_len, c.num_heads, c.head_dim), *rope).reshape(q.shape)
    k = apply_rope(k, *rope)
    out, kv = store_and_attend(
        q,
        k,
        v,
        kv,
        inputs.positions,
        inputs.block_tables,
        window,
        jnp.dtype(model.dtype),
        model.platform,
        mesh,
        written=inputs.written,
        implementation=model.attention_implementation,
    )
    out = _dot(out.reshape(n, q_len, -1), w["wo"].reshape(-1, w["wo"].shape[-1]), model)
    if "bo" in w:
        out = out + w["bo"].astype(out.dtype)
    return constrain(x + out.astype(x.dtype), (None, None, None), mesh), kv


def _mlp(model, w, x, mesh):
    y = _dot(rms_norm(x, w["mlp_norm"], model.config.rms_norm_eps), w["gate_up"], model)  # [N, Q, 2, F]
    y = constrain(y, (None, None, None, "mlp"), mesh)
    y = _dot((jax.nn.silu(y[..., 0, :].astype(jnp.float32)) * y[..., 1, :]).astype(model.dtype), w["down"], model)
    return constrain(x + y.astype(x.dtype), (None, None, None), mesh)


def rope_tables(model: Llama, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [N, Q, E/2]."""
    c = model.config
    inv_freq, factor = rope_inv_freq(c.rope, c.head_dim, model.rope_length or c.max_position_embeddings)
    return rope_cos_sin(jnp.maximum(positions, 0), inv_freq, factor)


def _computed_once(x: jax.Array) -> jax.Array:
    """x, as its product with the identity, which is exact. XLA:CPU fuses anything else into every reader, and so would
    compute the sines in every layer, where they take as long as the attention."""
    return jnp.dot(x, jnp.eye(x.shape[-1], dtype=x.dtype), precision=jax.lax.Precision.HIGHEST)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight).astype(x.dtype)


def _dot(x: jax.Array, w: jax.Array, model: Llama) -> jax.Array:
    """x [N, Q, I] @ w [I, ...] as one matrix product.

    On CPU the product is returned in float32: a bfloat16 result costs ten times the time there, and fewer than
    four rows miss the bfloat16 kernel, so they are padded. On GPU it is in the model's dtype, which is also
    what the all-reduce behind a row-parallel product then moves.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = jnp.float32 if model.platform == "cpu" else jnp.dtype(model.dtype)
    y = _matmul(rows.astype(w.dtype), w.reshape(w.shape[0], -1) if w.ndim > 2 and model.platform == "cpu" else w, out)
    return y.reshape(*x.shape[:-1], *w.shape[1:])


def _matmul(x: jax.Array, w: jax.Array, out: Any) -> jax.Array:
    pad = -x.shape[0] % 4 if x.dtype == jnp.bfloat16 and x.shape[0] < 4 else 0
    y = jnp.tensordot(jnp.pad(x, ((0, pad), (0, 0))), w, axes=1, preferred_element_type=out)
    return y[: x.shape[0]]


def _dot_t(x: jax.Array, table: jax.Array) -> jax.Array:
    """x [R, D] @ table [V, D].T -> [R, V] float32."""
    pad = -x.shape[0] % 4 if x.dtype == jnp.bfloat16 and x.shape[0] < 4 else 0
    y = jax.lax.dot_general(
        jnp.pad(x, ((0, pad), (0, 0))), table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return y[: x.shape[0]]
