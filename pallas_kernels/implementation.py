"""Which of an operation's implementations runs. All give the same tokens for the same random words."""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import jax

from pallas_kernels import compat

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
    available: tuple[str, ...] = IMPLEMENTATIONS,
) -> Choice:
    """The implementation that runs, and how.

    implementation: None is "xla" on every platform: the kernels are compiled for sm_90a and tested by interpretation,
        but until they have been timed on a GPU they run only where they are asked for by name.
    interpret: None interprets a named Mosaic kernel where JAX's default backend is a CPU; False compiles it all the
        same, for lowering ahead of time.
    block_shape: of a Mosaic kernel, instead of the table's.
    available: what the operation has.
    Raises ValueError when the named one is unknown or cannot run, saying why.
    """
    if implementation is None:
        implementation = "xla"
    if implementation not in available:
        raise ValueError(f"implementation is {implementation!r}; it must be None or one of {', '.join(available)}")
    if block_shape is not None and implementation != "mosaic":
        raise ValueError(f"block_shape means nothing to implementation {implementation!r}; leave it out")
    backend = jax.default_backend()
    if implementation == "xla":
        return Choice("xla")
    if interpret is None:
        interpret = implementation == "mosaic" and backend == "cpu"
        if not interpret and backend not in ("gpu", "cuda"):
            raise ValueError(f"implementation 'triton' or 'mosaic' needs an NVIDIA GPU; JAX's backend is {backend!r}")
    if implementation == "triton":
        if interpret:
            raise ValueError(
                "implementation 'triton' cannot be interpreted inside JAX; interpret must be None or False"
            )
        if importlib.util.find_spec("jax_triton") is None:
            raise ValueError("implementation 'triton' needs the package jax-triton, which is not installed")
    return Choice(implementation, compat.interpret_params() if interpret else False, block_shape)
