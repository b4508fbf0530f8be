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
            compiled = self._compiled[key] = self._make(key).compile()
        return compiled

    def warmup(self, keys: Iterable[Hashable], progress: bool) -> None:
        """Compile all of `keys`, several at a time (XLA releases the interpreter lock)."""
        missing = [k for k in keys if k not in self._compiled]
        with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
            results = pool.map(lambda k: self._make(k).compile(), missing)
            shown = tqdm(results, "Compiling", len(missing), disable=not progress)
            for key, compiled in zip(missing, shown, strict=True):
                self._compiled[key] = compiled

    def clear(self) -> None:
        """Let go of the executables."""
        self._compiled.clear()


def use_persistent_cache(directory: str | Path | None) -> None:
    """Point JAX's compilation cache at `directory` unless the user has configured one; "" leaves it off."""
    configured = jax.config.values.get("jax_compilation_cache_dir")
    if directory != "" and configured is None:
        path = Path(directory) if directory else Path.home() / ".cache" / "jaxserve"
        jax.config.update("jax_compilation_cache_dir", str(path))
