"""The kernels as H100 programs, compiled without a GPU. In a process of its own: the plugin is chosen at the start."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGIN = any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(not PLUGIN, reason="JAX's CUDA plugin is not installed (extra cuda12)"),
]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What the script measured, by name. The script's own checks fail it; the tests below say what they are."""
    file = tmp_path_factory.mktemp("aot") / "figures.json"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "bench" / "aot_kernels.py"), "--json", str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    print("\n" + done.stdout)
    assert file.exists(), done.stdout + done.stderr
    return {program["name"]: program for program in json.loads(file.read_text())}


def test_no_kernel_spills(programs: dict[str, dict]) -> None:
    kernels = [(name, kernel) for name, program in programs.items() for kernel in program["kernels"]]
    assert len(kernels) > 10
    assert [name for name, kernel in kernels if kernel["spilled"]] == []


def test_passes_over_the_logits_load_128_bits(programs: dict[str, dict]) -> None:
    """The kernels without TMA copies: 32 loads of 4 values a thread for 64 tiles, and not one narrower."""
    for program in (p for p in programs.values() if not p["name"].startswith("paged_attention")):
        passes = [kernel for kernel in program["kernels"] if not kernel["instructions"]["TMA copies"]]
        assert bool(passes) == bool(program["kernels"])
        assert all(kernel["instructions"]["128-bit loads"] in (8, 16, 32) for kernel in passes)


def test_the_byte_plan_holds(programs: dict[str, dict]) -> None:
    """No array of the logits' size is written, but where the row has to be padded; statistics take an eighth. Nor are
    pages gathered."""
    for name, program in programs.items():
        padded = "151936" in name
        assert program["copies"] == program["plan"] == int(padded or "penalties" in name), name
        assert program["temp"] <= (0.3 + padded) * program["input"], name


def test_verification_is_as_many_kernels_as_planned(programs: dict[str, dict]) -> None:
    """Statistics and sums of p, the same of q, masses for block, the draw."""
    assert sorted(program["called"] for name, program in programs.items() if "rejection" in name) == [3, 6]


def test_attention_reads_pages_by_tma_for_the_tensor_cores(programs: dict[str, dict]) -> None:
    """One kernel; beside the result it leaves the parts of splits, a tenth of the keys and values at most."""
    attended = [program for name, program in programs.items() if name.startswith("paged_attention")]
    assert len(attended) == 3
    for program in attended:
        assert program["called"] == len(program["kernels"]) == 1
        (kernel,) = program["kernels"]
        assert kernel["instructions"]["TMA copies"] > 0
        assert kernel["instructions"]["tensor core products"] > 0
        assert program["temp"] < 0.1 * program["input"]


def test_mask_and_penalties_are_one_kernel(programs: dict[str, dict]) -> None:
    """XLA fuses what the engine does to logits before the sampler: one array is written, nothing beside it."""
    (program,) = [program for name, program in programs.items() if "penalties" in name]
    assert program["copies"] == 1
    assert program["temp"] < program["input"] / 16  # a copy of the mask
    assert not program["kernels"]
