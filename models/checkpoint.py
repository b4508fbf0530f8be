"""Checkpoints as named arrays: what the model loader needs of a file format, and the safetensors directory."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class Checkpoint(Protocol):
    """Named weights with Hugging Face names and layout: a Linear is [out, in].

    `config` is the content of `config.json` or its equivalent, `generation_config` that of `generation_config.json`,
    None when there is none.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it. Raises ValueError if there is none of this name."""
        ...

    def get(self, name: str) -> np.ndarray:
        """A tensor in its stored dtype (float32 if quantised). Raises ValueError if there is none of this name."""
        ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a directory in Hugging Face layout (config.json and safetensors) or a GGUF file.

    Raises FileNotFoundError when the path does not exist or the directory lacks a file, ValueError when a file is
    truncated or not of the expected format.
    """
    path = Path(path)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if not path.exists():
        raise FileNotFoundError(f"no such model directory or GGUF file: {path}")
    if path.suffix == ".gguf":
        from models.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path)
    raise ValueError(f"{path} is neither a directory with config.json and safetensors nor a .gguf file")


def get_tensor(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor, which must have this shape. Raises ValueError naming tensor and file if missing or misshapen."""
    actual = checkpoint.shape(name)
    if actual != shape:
        raise ValueError(f"tensor {name!r} in {checkpoint.path} has shape {actual}, the config implies {shape}")
    return checkpoint.get(name)


def missing_tensor(name: str, path: Path) -> ValueError:
    """The error for a tensor the checkpoint does not have."""
    return ValueError(f"tensor {name!r} is missing from {path}")


class _Entry(NamedTuple):
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # from the start of the file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsCheckpoint:
    """A directory with config.json and model.safetensors, or model.safetensors.index.json and its shards.

    Headers are read and checked against the file sizes at once; tensors are read-only memory maps, so that a tensor
    costs memory only when, and where, it is used.
    """

    def __init__(self, directory: str | Path):
        self.path = Path(directory)
        self.config: Mapping[str, Any] = _read_json(self.path / "config.json")
        generation = self.path / "generation_config.json"
        self.generation_config: Mapping[str, Any] | None = _read_json(generation) if generation.exists() else None
        self._entries = _read_index(self.path)
        self._maps: dict[Path, np.memmap] = {}

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def get(self, name: str) -> np.ndarray:
        entry = self._entry(name)
        if entry.file not in self._maps:
            self._maps[entry.file] = np.memmap(entry.file, np.uint8, mode="r")
        raw = self._maps[entry.file][entry.offset : entry.offset + entry.num_bytes]
        return raw.view(np.ndarray).view(entry.dtype).reshape(entry.shape)

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise missing_tensor(name, self.path) from None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise FileNotFoundError(f"{file.parent} has no {file.name}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def _read_index(directory: Path) -> dict[str, _Entry]:
    """All tensors of the directory. With an index, exactly those it lists, each from the shard it names."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        single = directory / "model.safetensors"
        if not single.exists():
            raise FileNotFoundError(f"{directory} has neither {single.name} nor {index.name}")
        return _read_header(single)
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map")
    shards: dict[str, dict[str, _Entry]] = {}
    for shard in dict.fromkeys(weight_map.values()):
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index} names the shard {shard!r}, which is not a file name")
        if not (directory / shard).exists():
            raise FileNotFoundError(f"{directory} has no {shard}, which {index.name} names")
        shards[shard] = _read_header(directory / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise missing_tensor(name, directory / shard)
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _read_header(file: Path) -> dict[str, _Entry]:
    """The tensors of one safetensors file: 8 bytes of header length, a JSON header, then the data."""
    file_size = file.stat().st_size
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        start = 8 + header_size
        if file_size < 8 or header_size > _MAX_HEADER_BYTES or start > file_size:
            raise ValueError(f"{file} is truncated or not a safetensors file ({file_size} bytes, header {header_size})")
        raw = stream.read(header_size)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"{file} is not a safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file} is not a safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    entries = {name: _read_entry(file, start, name, info) for name, info in header.items()}
    needed = max((entry.offset + entry.num_bytes for entry in entries.values()), default=start)
    if needed > file_size:
        raise ValueError(f"{file} is truncated: it has {file_size} bytes, its header describes {needed}")
    return entries


def _read_entry(file: Path, start: int, name: str, info: Any) -> _Entry:
    try:
        dtype, shape, (begin, end) = str(info["dtype"]), tuple(info["shape"]), info["data_offsets"]
        valid = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise ValueError(f"tensor {name!r} in {file} has a malformed description: {info!r}")
    if dtype not in _DTYPES:
        raise ValueError(f"tensor {name!r} in {file} has dtype {dtype!r}; supported: {', '.join(_DTYPES)}")
    entry = _Entry(file, _DTYPES[dtype], shape, start + begin)
    if end - begin != entry.num_bytes:
        raise ValueError(f"tensor {name!r} in {file}: {dtype} {shape} is {entry.num_bytes} bytes, not {end - begin}")
    return entry
