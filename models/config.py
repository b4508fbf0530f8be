"""Static, hashable description of a model, read from a Hugging Face `config.json` (or its GGUF equivalent)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Everything a rope dictionary may hold. A key outside this set would change the frequencies in a way we do not know.
_ROPE_KEYS = (
    *("type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    *("truncate", "finetuned", "freq_divisors"),
)
_ROPE_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters, under the names `transformers` gives them.

    `original_max_position_embeddings` is the length the frequencies were trained for. `freq_divisors`, if not empty,
    has head_dim/2 entries that divide the frequencies: GGUF files store llama3 scaling in this form.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """What the forward pass must know at trace time. `architecture` is the Hugging Face class name.

    `window_layers[i]` says whether layer i attends to the last `sliding_window` positions only; it has `num_layers`
    entries, all False when `sliding_window` is None.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    sliding_window: int | None
    window_layers: tuple[bool, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def context_length(self) -> int:
        """Longest sequence the model supports: the configured maximum, extended by the rope scaling where that scales
        a shorter one. (Llama 3.1 and later already state the extended maximum.)"""
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind == "yarn":
            extended = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, extended)
        return self.max_position_embeddings

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Reads the content of `config.json`, as transformers 4 or 5 writes it.

        The EOS ids of `generation_config` are merged into those of `config`.

        Raises ValueError when a field is missing or has an impossible value, and when the architecture or one of its
        features is not supported; the message names the field, its value and what is supported.
        """
        architecture = _architecture(config)
        _refuse_unsupported(config)
        num_heads = _positive(config, "num_attention_heads")
        num_kv_heads = _positive(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_key_value_heads={num_kv_heads} does not divide num_attention_heads={num_heads}")
        hidden_size = _positive(config, "hidden_size")
        default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
        head_dim = _positive(config, "head_dim", default_head_dim)
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} must be even: rotary embeddings act on pairs")
        num_layers = _positive(config, "num_hidden_layers")
        max_position_embeddings = _positive(config, "max_position_embeddings")
        sliding_window, window_layers = _windows(config, architecture, num_layers)
        # Llama and Qwen3 put the bias flag on all four projections, Qwen2 always has one on q, k and v only.
        attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bool(config.get("attention_bias"))
        bos = config.get("bos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=_positive(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config, max_position_embeddings, head_dim),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            o_bias=attention_bias,
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=sliding_window,
            window_layers=window_layers,
            eos_token_ids=_eos_token_ids(config, generation_config or {}),
            bos_token_id=None if bos is None else int(bos),
        )


def _architecture(config: Mapping[str, Any]) -> str:
    supported = tuple(ARCHITECTURES.values())
    named = config.get("architectures")
    if not named:
        model_type = config.get("model_type")
        if model_type not in ARCHITECTURES:
            raise ValueError(f"model_type={model_type!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
        return ARCHITECTURES[model_type]
    for name in named:
        if name in supported:
            return name
    raise ValueError(f"architectures={list(named)!r} is not supported; supported: {', '.join(supported)}")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raises for every feature that changes the forward pass and is not implemented."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"hidden_act={activation!r} is not supported; supported: silu")
    for field in ("mlp_bias", "use_mrope"):
        if config.get(field):
            raise ValueError(f"{field}={config[field]!r} is not supported; supported: false")
    for field in ("num_local_experts", "num_experts", "n_routed_experts"):
        if config.get(field):
            raise ValueError(f"{field}={config[field]!r} is not supported; supported: none (dense models)")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"quantization_config with quant_method={method!r} is not supported; "
            "supported: unquantised safetensors, or GGUF files (dequantised when loaded)"
        )


def _positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """The positive integer in `field`; absent and null both mean `default` (required when that is None)."""
    value = config.get(field)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"config has no {field}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}={value!r} must be an integer >= 1")
    return value


def _windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The window size (None: no layer is windowed) and which layers it applies to."""
    none = (None, (False,) * num_layers)
    if architecture == "LlamaForCausalLM":
        return none
    window = config.get("sliding_window", 4096)
    if architecture == "MistralForCausalLM":
        layers = (True,) * num_layers
    else:
        if not config.get("use_sliding_window", False):
            return none
        layers = _qwen_window_layers(config, num_layers)
    if window is None or not any(layers):
        return none
    return _positive({"sliding_window": window}, "sliding_window"), layers


def _qwen_window_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)  # layers below it attend to everything, despite the name
        return tuple(i >= first for i in range(num_layers))
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types contains {sorted(unknown)!r}, not supported; supported: full_attention, sliding_attention"
        )
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries, expected num_hidden_layers={num_layers}")
    return tuple(t == "sliding_attention" for t in types)


def _rope(config: Mapping[str, Any], max_position_embeddings: int, head_dim: int) -> RopeConfig:
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if unknown := set(rope).difference(_ROPE_KEYS):
        raise ValueError(f"rope parameters {sorted(unknown)!r} are not supported; supported: {', '.join(_ROPE_KEYS)}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope_type={kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor={partial!r} is not supported; supported: 1.0")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    original = max_position_embeddings
    if kind in ("llama3", "yarn"):
        stated = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        original = int(stated or original)
    factor = rope.get("factor")
    if factor is None and kind == "yarn":
        factor = max_position_embeddings / original
    for field in _ROPE_REQUIRED.get(kind, ()):
        if rope.get(field) is None:
            raise ValueError(f"rope_type={kind!r} needs {field}")
    divisors = tuple(float(d) for d in rope.get("freq_divisors", ()))
    if divisors and len(divisors) != head_dim // 2:
        raise ValueError(f"freq_divisors has {len(divisors)} entries, expected head_dim/2={head_dim // 2}")
    result = RopeConfig(
        theta=10000.0 if theta is None else float(theta),
        kind=kind,
        factor=1.0 if factor is None else float(factor),
        original_max_position_embeddings=original,
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=_optional_float(rope.get("attention_factor")),
        mscale=_optional_float(rope.get("mscale")),
        mscale_all_dim=_optional_float(rope.get("mscale_all_dim")),
        truncate=bool(rope.get("truncate", True)),
        freq_divisors=divisors,
    )
    if not result.theta > 0:
        raise ValueError(f"rope_theta={result.theta!r} must be > 0")
    if not result.factor >= 1:
        raise ValueError(f"rope factor={result.factor!r} must be >= 1")
    return result


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """The EOS ids of all configs, each id once, in order of first mention."""
    ids: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        ids.extend([] if value is None else value if isinstance(value, (list, tuple)) else [value])
    return tuple(dict.fromkeys(int(i) for i in ids))
