"""Abstract weights: one declaration gives random initialisation, sharding and the checkpoint's mapping."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models import sharding
from models.checkpoint import Checkpoint, get_tensor
from models.sharding import Axes


@dataclass(frozen=True)
class ParamSpec:
    """One array of the model.

    axes:     logical names of `shape` (models.sharding.RULES maps them to the mesh).
    sources:  checkpoint tensors it is made of, `{i}` standing for the layer; the tuple's order is assemble's.
    parts:    their shapes in the checkpoint.
    assemble: the sources -> one array of `shape`.
    scale:    standard deviation of a random initialisation; None for ones, 0 for zeros.
    """

    shape: tuple[int, ...]
    axes: Axes
    sources: tuple[str, ...]
    parts: tuple[tuple[int, ...], ...]
    assemble: Callable[..., np.ndarray]
    scale: float | None
    dtype: Any

    def sharding(self, mesh: Mesh | None) -> jax.sharding.NamedSharding | None:
        return sharding.sharding(self.axes, self.shape, mesh)


def is_spec(x: object) -> bool:
    return isinstance(x, ParamSpec)


def abstract_params(specs: Any, mesh: Mesh | None) -> Any:
    """ShapeDtypeStructs (with shardings) of a declaration: what ahead-of-time compilation needs."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding(mesh)),
        specs,
        is_leaf=is_spec,
    )


def random_params(specs: Any, seed: int, mesh: Mesh | None) -> Any:
    """Normal weights with each spec's scale. The same on every mesh."""
    leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(tree, [_random(s, k, mesh) for s, k in zip(leaves, keys, strict=True)])


def _random(spec: ParamSpec, key: jax.Array, mesh: Mesh | None) -> jax.Array:
    def make(key: jax.Array) -> jax.Array:
        if spec.scale is None:
            return jnp.ones(spec.shape, spec.dtype)
        if spec.scale == 0:
            return jnp.zeros(spec.shape, spec.dtype)
        return (jax.random.normal(key, spec.shape, jnp.float32) * spec.scale).astype(spec.dtype)

    return jax.jit(make, out_shardings=spec.sharding(mesh))(key)


def load_params(specs: Any, source: Checkpoint, mesh: Mesh | None, unused: str = r"(?!)") -> Any:
    """Read a checkpoint straight onto its sharding. The host holds the tensors of one array at a time.

    Raises ValueError naming the tensor when one is missing or misshapen, or has no place in the model (a bias that the
    configuration does not mention): ignoring it would compute another model. `unused` is a pattern of names that may
    be there and are not needed. `{i}` is a spec's place in the list of layers.
    """
    _refuse_leftovers(specs, source, unused)
    return jax.tree_util.tree_map_with_path(
        lambda path, s: _load(s, source, _list_index(path), mesh), specs, is_leaf=is_spec
    )


def _refuse_leftovers(specs: Any, source: Checkpoint, unused: str) -> None:
    known: set[str] = set()
    for path, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]:
        known.update(name.format(i=_list_index(path)) for name in spec.sources)
    extra = sorted(name for name in source.names() if name not in known and not re.fullmatch(unused, name))
    if extra:
        raise ValueError(f"{source.path} has tensors that this model has no place for: {', '.join(extra[:5])}")


def _list_index(path: tuple[Any, ...]) -> int:
    """The layer of a leaf: the last list index on its path (0 for leaves outside any list)."""
    return next((k.idx for k in reversed(path) if isinstance(k, jax.tree_util.SequenceKey)), 0)


def _load(spec: ParamSpec, source: Checkpoint, layer: int, mesh: Mesh | None) -> jax.Array:
    array, target = _read(spec, source, layer), spec.sharding(mesh)
    return jnp.asarray(array) if target is None else jax.device_put(array, target)


def _read(spec: ParamSpec, source: Checkpoint, layer: int) -> np.ndarray:
    tensors = list(_tensors(spec, source, layer))
    return np.ascontiguousarray(spec.assemble(*tensors).astype(spec.dtype)).reshape(spec.shape)


def _tensors(spec: ParamSpec, source: Checkpoint, layer: int) -> Iterator[np.ndarray]:
    for pattern, shape in zip(spec.sources, spec.parts, strict=True):
        yield get_tensor(source, pattern.format(i=layer), shape)
