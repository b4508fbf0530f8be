"""Which of an operation's implementations runs. All give the same tokens for the same random words."""

from __future__ import annotations

import importlib.util
import re
from typing import Any, NamedTuple

import jax

from pallas_kernels import compat
from pallas_kernels.block_shape import BlockShape

IMPLEMENTATIONS = ("xla", "mosaic", "triton")


class Choice(NamedTuple):
    """name: one of IMPLEMENTATIONS. interpret: False, or what Mosaic kernels are interpreted with. block_shape: theirs,
    a BlockShape or AttentionShape; None for the table's."""

    name: str
    interpret: Any = False
    block_shape: Any = None


def choose(
    implementation: str | None,
    interpret: bool | None = None,
    block_shape: Any = None,
    *,
    available: tuple[str, ...] = IMPLEMENTATIONS,
    shape_type: type = BlockShape,
) -> Choice:
    """The implementation that runs, and how.

    implementation: None is "xla" on every platform: the kernels are compiled for sm_90a and tested by interpretation,
        but until they have been timed on a GPU they run only where they are asked for by name.
    interpret: None interprets a named Mosaic kernel where JAX's default backend is a CPU, and elsewhere asks whether
        the GPU can run what is named; False compiles it all the same, for lowering ahead of time.
    block_shape: a shape_type, of a Mosaic kernel, instead of the table's.
    available: what the operation has.
    Raises ValueError when the named one is unknown or cannot run, saying why, and for what it would ignore.
    """
    if implementation is None:
        implementation = "xla"
    if implementation not in available:
        raise ValueError(f"implementation is {implementation!r}; it must be None or one of {', '.join(available)}")
    if block_shape is not None and not isinstance(block_shape, shape_type):
        raise ValueError(f"block_shape is {block_shape!r}; it must be None or of type {shape_type.__name__}")
    if block_shape is not None and implementation != "mosaic":
        raise ValueError(f"block_shape means nothing to implementation {implementation!r}; leave it out")
    if implementation == "xla":
        if interpret:
            raise ValueError("interpret means nothing to implementation 'xla'; leave it out")
        return Choice("xla")
    if implementation == "triton" and interpret:
        raise ValueError("implementation 'triton' cannot be interpreted inside JAX; interpret must be None or False")
    if interpret is None:
        interpret = implementation == "mosaic" and jax.default_backend() == "cpu"
        if not interpret:
            _check_gpu(implementation)
    if implementation == "triton" and importlib.util.find_spec("jax_triton") is None:
        raise ValueError("implementation 'triton' needs the package jax-triton, which is not installed")
    return Choice(implementation, compat.interpret_params() if interpret else False, block_shape)


def _check_gpu(implementation: str) -> None:
    """Raises ValueError where JAX's first device is no NVIDIA GPU on which kernels of this implementation run."""
    needed = {"mosaic": "9.x", "triton": "8.0 or more"}[implementation]
    needs = f"implementation {implementation!r} needs an NVIDIA GPU of compute capability {needed}"
    if (backend := jax.default_backend()) not in ("gpu", "cuda"):
        raise ValueError(f"{needs}; JAX's backend is {backend!r}")
    device = jax.devices()[0]
    found = str(getattr(device, "compute_capability", "unknown"))  # of ROCm "gfx942" or the like
    major = int(found.split(".")[0]) if re.fullmatch(r"\d+\.\d+", found) else 0
    if not (major == 9 if implementation == "mosaic" else major >= 8):
        raise ValueError(f"{needs}; JAX's device is {device.device_kind!r}, its compute capability {found}")
