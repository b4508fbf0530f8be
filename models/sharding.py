"""Logical axis names, and the one place where they meet the mesh."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Only these axes are ever split; every other name ("embed", "pages", ...) stays whole on each device.
RULES: dict[str, str] = {"vocab": "tp", "kv_heads": "tp", "mlp": "tp", "rows": "tp"}

Axes = tuple[str | None, ...]


def make_mesh(devices: list[jax.Device] | np.ndarray) -> Mesh:
    """A one-axis tensor-parallel mesh over `devices`; the compiler places collectives (Auto axes)."""
    return Mesh(np.asarray(devices), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))


def partition_spec(axes: Axes, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Mesh axes of an array; an axis that the mesh does not divide stays whole (3 KV heads over 2 devices)."""
    if len(axes) != len(shape):
        raise ValueError(f"axes {axes} do not describe shape {shape}")
    names = (RULES.get(axis) if axis is not None else None for axis in axes)
    return PartitionSpec(
        *(n if n and size % mesh.shape[n] == 0 else None for n, size in zip(names, shape, strict=True))
    )


def sharding(axes: Axes, shape: tuple[int, ...], mesh: Mesh | None) -> NamedSharding | None:
    """NamedSharding of an array with these logical axes; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, partition_spec(axes, shape, mesh))


def constrain(x: jax.Array, axes: Axes, mesh: Mesh | None) -> jax.Array:
    """A sharding constraint by logical axes; the identity without a mesh."""
    target = sharding(axes, x.shape, mesh)
    return x if target is None else jax.lax.with_sharding_constraint(x, target)
