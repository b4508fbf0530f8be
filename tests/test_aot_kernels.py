"""The kernels as H100 programs, compiled without a GPU; and how what the compiler made of them is read."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parent.parent
PLUGIN = any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))
TRITON = all(importlib.util.find_spec(name) for name in ("triton", "jax_triton"))
sys.path.append(str(ROOT / "bench"))

with mock.patch.dict(os.environ):  # the script sets what JAX needs to compile for a GPU that is not there
    import aot_kernels

KB = 1024  # of the arrays below, f32[256]
FUSIONS = """HloModule jit_f, is_scheduled=true

%fused (p.0: f32[256]) -> (f32[256], f32[256]) {
  %p.0 = f32[256]{0} parameter(0)
  %a = f32[256]{0} add(%p.0, %p.0)
  %b = f32[256]{0} multiply(%a, %p.0)
  ROOT %t = (f32[256]{0}, f32[256]{0}) tuple(%a, %b)
}

%small (p.1: f32[256]) -> bf16[64] {
  %p.1 = f32[256]{0} parameter(0)
  ROOT %s = bf16[64]{0} slice(%p.1), slice={[0:64]}
}

ENTRY %main (x: f32[256]) -> f32[16,16] {
  %x = f32[256]{0:T(256)} parameter(0)
  %pair = (f32[256]{0}, /*index=1*/f32[256]{0}) fusion(%x), kind=kLoop, calls=%fused
  %first = f32[256]{0} get-tuple-element(%pair), index=0
  %few = bf16[64]{0} fusion(%first), kind=kLoop, calls=%small, metadata={op_name="jit(f)/slice (f32[256])"}
  %start = ((f32[256]{0}), f32[256]{0}) all-to-all-start(%first), dimensions={0}
  %done = f32[256]{0} all-to-all-done(%start)
  %kernel = (f32[64]{0}, f32[256]{0}, u8[1024]{0}) custom-call(%done), custom_call_target="mosaic_gpu_v2"
  %out = f32[256]{0} get-tuple-element(%kernel), index=1
  ROOT %view = f32[16,16]{1,0} bitcast(%out)
}
"""
CONTROL = """HloModule jit_g

%body.1 (c: (s32[], f32[256])) -> (s32[], f32[256]) {
  %c = (s32[], f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %y = f32[256]{0} get-tuple-element(%c), index=1
  %n = f32[256]{0} negate(%y)
  ROOT %r = (s32[], f32[256]{0}) tuple(%i, %n)
}

%condition.1 (c.1: (s32[], f32[256])) -> pred[] {
  %c.1 = (s32[], f32[256]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%c.1), index=0
  ROOT %less = pred[] compare(%i.1, %i.1), direction=LT
}

%nothing (q: f32[256]) -> f32[256] {
  ROOT %q = f32[256]{0} parameter(0)
}

%twice (q.1: f32[256]) -> f32[256] {
  %q.1 = f32[256]{0} parameter(0)
  %exp = f32[256]{0} exponential(%q.1)
  ROOT %log = f32[256]{0} log(%exp)
}

%called (z: f32[256]) -> f32[256] {
  %z = f32[256]{0} parameter(0)
  ROOT %copy = f32[256]{0} copy(%z)
}

ENTRY %main (x: f32[256], which: s32[]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %which = s32[] parameter(1)
  %zero = s32[] constant(0)
  %init = (s32[], f32[256]{0}) tuple(%zero, %x)
  %loop = (s32[], f32[256]{0}) while(%init), condition=%condition.1, body=%body.1
  %end = f32[256]{0} get-tuple-element(%loop), index=1
  %branch = f32[256]{0} conditional(%which, %end, %end), branch_computations={%nothing, %twice}
  ROOT %call = f32[256]{0} call(%branch), to_apply=%called
}
"""


def test_members_of_tuples_are_arrays_that_are_written() -> None:
    """Two of a fusion, one of a collective (when it is done), two of a custom call; no view, nothing small."""
    assert aot_kernels.copies(FUSIONS, KB) == 2 + 1 + 2


def test_arrays_of_half_the_size_count_and_smaller_ones_do_not() -> None:
    assert aot_kernels.copies(FUSIONS, 2 * KB) == 5
    assert aot_kernels.copies(FUSIONS, 2 * KB + 1) == 0
    assert aot_kernels.copies(FUSIONS, 512) == 6  # the first result of the custom call


def test_called_computations_are_read() -> None:
    """One round of the loop, the branch that writes more, the call; none of these writes anything itself."""
    assert aot_kernels.copies(CONTROL, KB) == 1 + 2 + 1


def test_older_conditionals_name_their_branches_one_by_one() -> None:
    older = CONTROL.replace(
        "branch_computations={%nothing, %twice}", "true_computation=%twice, false_computation=%nothing"
    )
    assert aot_kernels.copies(older, KB) == 4


def test_names_without_a_sign_are_read_too() -> None:
    assert aot_kernels.copies(CONTROL.replace("%", ""), KB) == 4


def test_what_the_compiler_says_of_a_kernel_is_read() -> None:
    report = "ptxas info: Used 61 registers\n8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads"
    ptx = (
        "ld.v4.b32 {a}; ld.global.v4.b32 {b}; ld.shared.v4.b32 {c}; ld.global.b32 d; shfl.sync.bfly.b32 e; bar.sync 0;"
    )
    kernel = aot_kernels.read_kernel("sample", report, ptx)
    assert (kernel.registers, kernel.spilled) == (61, 16)
    assert list(kernel.instructions.values()) == [2, 0, 0, 1, 1]


def test_what_is_not_as_planned_is_said() -> None:
    """A spill, another kernel, narrow loads, another number of arrays and wide temporaries: each a line."""
    instructions = dict.fromkeys(aot_kernels.PTX, 0)
    good = aot_kernels.Program("p", size=100, plan=1, room=0.5, calls=("statistics",), loads=8, copies=1, temp=50)
    good.kernels = [aot_kernels.Kernel("statistics", 40, 0, instructions | {"128-bit loads": 8})]
    assert aot_kernels.check(good) == []
    bad = aot_kernels.Program("p", size=100, plan=0, room=0.4, calls=("sample",), loads=16, copies=1, temp=50)
    bad.kernels = [aot_kernels.Kernel("statistics", 40, 4, instructions | {"128-bit loads": 8})]
    assert len(aot_kernels.check(bad)) == 5


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What the script measured, by name, in a process of its own: the plugin is chosen at the start. Its own checks
    fail the tests too."""
    if not PLUGIN:
        pytest.skip("JAX's CUDA plugin is not installed (extra cuda12)")
    file = tmp_path_factory.mktemp("aot") / "figures.json"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "bench" / "aot_kernels.py"), "--json", str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    print("\n" + done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return {program["name"]: program for program in json.loads(file.read_text())}


def mosaic(programs: dict[str, dict], start: str) -> dict[str, dict]:
    """By what follows the operation's name."""
    return {name.removeprefix(start).strip(): p for name, p in programs.items() if name.startswith(start)}


@pytest.mark.aot
def test_no_kernel_spills(programs: dict[str, dict]) -> None:
    """But Triton's before Hopper."""
    kernels = [(name, kernel) for name, program in programs.items() for kernel in program["kernels"]]
    assert len(kernels) > 40
    assert {name for name, kernel in kernels if kernel["spilled"] and "sm_80" not in name} == set()


@pytest.mark.aot
def test_passes_over_the_logits_load_128_bits(programs: dict[str, dict]) -> None:
    """Without TMA copies: 32 loads of 4 values a thread for 64 tiles, fewer for few rows, and not one narrower."""
    for name, program in programs.items():
        loads = {"top_k_top_p_sample 4 x 128256": 8, "top_k_top_p_sample 8 x 32000": 16}.get(name, 32)
        passes = [kernel for kernel in program["kernels"] if kernel["name"] == "statistics"]
        assert bool(passes) == name.startswith(("top_k_top_p_sample", "rejection_sample"))
        assert {kernel["instructions"]["128-bit loads"] for kernel in passes} <= {loads}, name
        assert not any(kernel["instructions"]["TMA copies"] for kernel in passes)


@pytest.mark.aot
def test_arrays_as_large_as_the_logits_are_written_where_rows_are_padded_widened_or_masked(
    programs: dict[str, dict],
) -> None:
    """One copy, no more; statistics take an eighth. Nor are pages gathered."""
    copied = {
        "top_k_top_p_sample 64 x 151936",
        "top_k_top_p_sample 64 x 8192",
        "top_k_top_p_sample 64 x 128256, bfloat16",
        "top_k_top_p_sample 64 x 128256, mask",
    }
    assert {name for name, program in programs.items() if program["copies"]} == copied
    for name, program in programs.items():
        copy = {"64 x 8192": 2}.get(name.partition("sample ")[2], 1) if name in copied else 0  # 8192 padded to 16384
        assert program["copies"] == (copy > 0)
        assert copy <= program["temp"] / program["size"] <= copy + 0.3, name


@pytest.mark.aot
def test_verification_is_as_many_kernels_as_planned(programs: dict[str, dict]) -> None:
    """Statistics and sums of p, the same of q, masses for block, the draw. Coupled is sampling."""
    started = {
        name.partition(" 64 x")[0]: sorted(k["name"] for k in program["kernels"])
        for name, program in mosaic(programs, "rejection_sample").items()
    }
    assert started == {
        "coupled": ["sample", "statistics"],
        "standard": ["residual", "statistics", "weigh"],
        "standard, with q": ["residual", "statistics", "statistics", "weigh", "weigh"],
        "block, with q": ["residual", "residual", "statistics", "statistics", "weigh", "weigh"],
        "synthetic": ["residual", "statistics", "weigh"],
    }


@pytest.mark.aot
def test_attention_reads_pages_by_tma_for_the_tensor_cores(programs: dict[str, dict]) -> None:
    """One kernel; beside the result it leaves the parts of splits, a tenth of the keys and values at most."""
    attended = mosaic(programs, "paged_attention")
    assert len(attended) == 9
    for program in attended.values():
        (kernel,) = program["kernels"]
        assert kernel["instructions"]["TMA copies"] > 0
        assert kernel["instructions"]["tensor core products"] > 0
        assert program["temp"] < 0.1 * program["size"]
    for more in ("keys of 8 x 64", "float16", "pages of 8", "pages of 32", "pages of 64", "pages of 128"):
        assert any(name.endswith(more) for name in attended)


@pytest.mark.aot
@pytest.mark.skipif(not TRITON, reason="needs the extra triton")
def test_tritons_sampler_is_one_kernel(programs: dict[str, dict]) -> None:
    """And copies nothing, for Hopper and before."""
    found = mosaic(programs, "Triton")
    assert len(found) == 2
    for program in found.values():
        assert len(program["kernels"]) == 1
        assert program["temp"] < 0.01 * program["size"]
