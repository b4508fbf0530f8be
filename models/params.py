"""Abstract weights: one declaration gives random initialisation, sharding and the checkpoint's mapping."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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

    shape:    of one layer; `layers` > 0 puts a stacking axis of that length in front.
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
    layers: int = 0

    @property
    def full_shape(self) -> tuple[int, ...]:
        return (self.layers, *self.shape) if self.layers else self.shape

    @property
    def full_axes(self) -> Axes:
        return ("layers", *self.axes) if self.layers else self.axes

    def sharding(self, mesh: Mesh | None) -> jax.sharding.NamedSharding | None:
        return sharding.sharding(self.full_axes, self.full_shape, mesh)


def is_spec(x: object) -> bool:
    return isinstance(x, ParamSpec)


def abstract_params(specs: Any, mesh: Mesh | None) -> Any:
    """ShapeDtypeStructs (with shardings) of a declaration: what ahead-of-time compilation needs."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.full_shape, s.dtype, sharding=s.sharding(mesh)),
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
            return jnp.ones(spec.full_shape, spec.dtype)
        if spec.scale == 0:
            return jnp.zeros(spec.full_shape, spec.dtype)
        return (jax.random.normal(key, spec.full_shape, jnp.float32) * spec.scale).astype(spec.dtype)

    return jax.jit(make, out_shardings=spec.sharding(mesh))(key)


def load_params(specs: Any, source: Checkpoint, mesh: Mesh | None, unused: str = r"(?!)") -> Any:
    """Read a checkpoint straight onto its sharding. The host holds the tensors of one array's one layer at a time.

    Raises ValueError naming the tensor when one is missing or misshapen, or has no place in the model (a bias that the
    configuration does not mention): ignoring it would compute another model. `unused` is a pattern of names that may
    be there and are not needed. `{i}` counts layers in `specs` order: stacked specs run over their own axis, unstacked
    per-layer specs sit in lists.
    """
    _refuse_leftovers(specs, source, unused)
    return jax.tree_util.tree_map_with_path(
        lambda path, s: _load(s, source, _list_index(path), mesh), specs, is_leaf=is_spec
    )


def _refuse_leftovers(specs: Any, source: Checkpoint, unused: str) -> None:
    known: set[str] = set()
    for path, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_spec)[0]:
        layers = range(spec.layers) if spec.layers else [_list_index(path)]
        known.update(name.format(i=i) for name in spec.sources for i in layers)
    extra = sorted(name for name in source.names() if name not in known and not re.fullmatch(unused, name))
    if extra:
        raise ValueError(f"{source.path} has tensors that this model has no place for: {', '.join(extra[:5])}")


def _list_index(path: tuple[Any, ...]) -> int:
    """The layer of a leaf: the last list index on its path (0 for leaves outside any list)."""
    return next((k.idx for k in reversed(path) if isinstance(k, jax.tree_util.SequenceKey)), 0)


def _load(spec: ParamSpec, source: Checkpoint, layer: int, mesh: Mesh | None) -> jax.Array:
    if not spec.layers:
        return _put(_read(spec, source, layer), spec.sharding(mesh))
    stacked = spec.sharding(mesh)
    array = jax.jit(partial(jnp.zeros, spec.full_shape, spec.dtype), out_shardings=stacked)()
    write = jax.jit(
        lambda a, x, i: jax.lax.dynamic_update_index_in_dim(a, x, i, 0), donate_argnums=0, out_shardings=stacked
    )
    for i in range(spec.layers):
        array = write(array, _put(_read(spec, source, i), sharding.sharding(spec.axes, spec.shape, mesh)), i)
    return array


def _put(x: np.ndarray, target: jax.sharding.Sharding | None) -> jax.Array:
    return jnp.asarray(x) if target is None else jax.device_put(x, target)


def _read(spec: ParamSpec, source: Checkpoint, layer: int) -> np.ndarray:
    tensors = list(_tensors(spec, source, layer))
    return np.ascontiguousarray(spec.assemble(*tensors).astype(spec.dtype)).reshape(spec.shape)


def _tensors(spec: ParamSpec, source: Checkpoint, layer: int) -> Iterator[np.ndarray]:
    for pattern, shape in zip(spec.sources, spec.parts, strict=True):
        yield get_tensor(source, pattern.format(i=layer), shape)
