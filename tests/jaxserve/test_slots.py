"""Arrays that each device keeps of its own slots."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.sampling.slots import by_device, put_slots

S, B, K, V = 16, 8, 3, 5


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("k", [1, 3])
def test_only_slots_that_run_are_replaced(devices: int, k: int) -> None:
    if jax.device_count() < devices:
        pytest.skip(f"needs {devices} devices")
    mesh = None if devices == 1 else Mesh(np.array(jax.devices()[:devices]), ("tp",))
    rng = np.random.default_rng(devices)
    by_slot, values = rng.normal(size=(S, K, V)).astype(np.float32), rng.normal(size=(B, k, V)).astype(np.float32)
    run = rng.random(B) < 0.5
    device_major = by_slot.reshape(S // devices, devices, K, V).swapaxes(0, 1).reshape(S, K, V)
    with jax.default_device(jax.devices()[0]):
        put = np.asarray(jax.jit(put_slots, static_argnums=0)(mesh, by_device(device_major, mesh), values, run))
    by_slot[:B, :k][run] = values[run]
    np.testing.assert_array_equal(put.reshape(devices, S // devices, K, V).swapaxes(0, 1).reshape(S, K, V), by_slot)
