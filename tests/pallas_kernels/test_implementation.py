"""Which implementation runs where: by what JAX says of its devices."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.implementation import choose


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An H100, until somebody says otherwise; and jax-triton."""
    device = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
    found = importlib.util.find_spec
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "jax_triton" or found(name))
    return device


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_on_hopper_kernels_are_compiled(gpu: SimpleNamespace, implementation: str) -> None:
    assert choose(implementation) == (implementation, False, None)


@pytest.mark.parametrize(
    ("kind", "capability", "refused"),
    [
        ("NVIDIA A100-SXM4-80GB", "8.0", {"mosaic"}),
        ("NVIDIA B200", "10.0", {"mosaic"}),
        ("Tesla V100-SXM2-16GB", "7.0", {"mosaic", "triton"}),
        ("AMD Instinct MI300X", "gfx942", {"mosaic", "triton"}),
    ],
)
def test_on_other_gpus_what_does_not_run_is_refused(
    gpu: SimpleNamespace, kind: str, capability: str, refused: set[str]
) -> None:
    gpu.device_kind, gpu.compute_capability = kind, capability
    for implementation, needed in (("mosaic", "9.x"), ("triton", "8.0 or more")):
        if implementation in refused:
            reason = (
                f"implementation '{implementation}' needs an NVIDIA GPU of compute capability {needed}; "
                f"JAX's device is '{kind}', its compute capability {capability}"
            )
            with pytest.raises(ValueError, match=reason):
                choose(implementation)
        else:
            assert choose(implementation).name == implementation
        assert choose(implementation, interpret=False).name == implementation  # ahead of time, for another GPU


def test_a_device_that_says_nothing_is_refused(gpu: SimpleNamespace) -> None:
    del gpu.compute_capability
    with pytest.raises(ValueError, match="its compute capability unknown"):
        choose("mosaic")


def test_the_default_asks_no_device(gpu: SimpleNamespace) -> None:
    gpu.compute_capability = "7.0"
    assert choose(None) == choose("xla") == ("xla", False, None)


def test_on_a_cpu_kernels_are_interpreted_or_lowered() -> None:
    assert choose("mosaic").interpret
    assert choose("mosaic", interpret=False) == ("mosaic", False, None)
