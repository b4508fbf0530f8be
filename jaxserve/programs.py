"""Compiled programs by name and shape. After warm-up every shape that can be asked for is here already."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxserve.memory import free_memory_areas

_AT_ONCE = 8  # compilations of a warm-up
_AREAS = 1024  # that an executable of XLA:CPU maps, with room to spare: three for each of its kernels


@dataclass(frozen=True)
class Program:
    """One thing to compile. key: name and static sizes; jitted: the function; args: abstract arguments."""

    key: Hashable
    jitted: Any
    args: tuple[Any, ...]

    def compile(self) -> Callable[..., Any]:
        return self.jitted.lower(*self.args).compile()


class Programs:
    """Executables, compiled on first use or ahead of time.

    compilations counts the programs compiled outside `warmup`: with a complete warm-up it stays 0.
    """

    def __init__(self, make: Callable[[Hashable], Program]) -> None:
        self._make = make
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self.compilations = 0

    def __getitem__(self, key: Hashable) -> Callable[..., Any]:
        compiled = self._compiled.get(key)
        if compiled is None:
            self.compilations += 1
            compiled = self._compiled[key] = self._compile(key, 1)
        return compiled

    def warmup(self, keys: Iterable[Hashable], progress: bool) -> None:
        """Compile all of `keys`, several at a time (XLA releases the interpreter lock).

        Raises RuntimeError where a CPU's executables would need more memory areas than the system allows.
        """
        missing = [k for k in keys if k not in self._compiled]
        at_once = min(_AT_ONCE, os.cpu_count() or 1)
        with ThreadPoolExecutor(at_once) as pool:
            results = pool.map(lambda k: self._compile(k, at_once), missing)
            shown = tqdm(results, "Compiling", len(missing), disable=not progress)
            for key, compiled in zip(missing, shown, strict=True):
                self._compiled[key] = compiled

    def _compile(self, key: Hashable, at_once: int) -> Callable[..., Any]:
        free = free_memory_areas() if jax.default_backend() == "cpu" else None
        if free is not None and free < at_once * _AREAS:  # beyond them LLVM ends the process
            raise RuntimeError(
                f"compiling {key} may take more than the {free} memory areas that are left to this process: raise "
                "vm.max_map_count (sysctl -w vm.max_map_count=262144), or lower max_num_seqs or the number of draft "
                "counts, or shut down other engines"
            )
        return self._make(key).compile()

    def clear(self) -> None:
        """Let go of the executables."""
        self._compiled.clear()


def use_persistent_cache(directory: str | Path | None) -> None:
    """Point JAX's compilation cache at `directory` unless the user has configured one; "" leaves it off."""
    configured = jax.config.values.get("jax_compilation_cache_dir")
    if directory != "" and configured is None:
        path = Path(directory) if directory else Path.home() / ".cache" / "jaxserve"
        jax.config.update("jax_compilation_cache_dir", str(path))
