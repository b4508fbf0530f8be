"""The scripts that measure kernels on a GPU, as far as they go without one."""

# ruff: noqa: E402 (the path comes before the scripts)

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import AttentionShape, BlockShape
from pallas_kernels.block_shape import block_shape

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))  # scripts import each other by name

import autotune
import kernels_gpu


@pytest.mark.parametrize("script", ["kernels_gpu.py", "autotune.py"])
def test_without_a_gpu_one_line_says_so(script: str) -> None:
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "bench" / script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1
    assert "needs an NVIDIA GPU; JAX's backend is 'cpu'" in done.stdout


def test_kernels_are_compared_and_timed(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert kernels_gpu.main(["--interpret", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    kinds = {(r["operation"], r["implementation"]) for r in figures["results"] if r["ms"] > 0}
    operations = {"top_k_top_p_sample", "rejection_sample coupled", "rejection_sample standard"}
    operations |= {"paged_attention 1 + 0", "paged_attention 1 + 3"}
    assert kinds == {(operation, name) for operation in operations for name in ("xla", "mosaic")}


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_gpu, "sampling_is_right", lambda *_: "greedy, ties")
    monkeypatch.setattr(kernels_gpu, "copy_bandwidth", lambda _: 1.0)
    bench = kernels_gpu.Bench(["mosaic"], deadline=float("inf"), interpret=True)
    (result,) = bench.sampling([2], [100], "")
    assert result.note == "wrong: greedy, ties"
    assert result.ms is None


def test_what_there_is_no_time_for_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_gpu, "copy_bandwidth", lambda _: 1.0)
    bench = kernels_gpu.Bench(["xla"], deadline=0.0, interpret=True)
    assert [r.note for r in bench.sampling([2, 4], [100], "")] == ["skipped: out of time"] * 2


def test_the_fastest_shape_is_found_field_by_field() -> None:
    measured: list[BlockShape] = []

    def measure(shape: BlockShape) -> float:
        measured.append(shape)
        return abs(shape.tiles - 32) + shape.part + abs(shape.chunk - 128)

    best, time = autotune.best_shape(BlockShape(), measure)
    assert best == BlockShape(tiles=32, part=16, chunk=128)
    assert time == 16
    assert len(measured) == len(set(measured)) == 7
    splits, _ = autotune.best_shape(AttentionShape(8), lambda shape: abs(shape.splits - 4) + shape.stages)
    assert splits == AttentionShape(splits=4, stages=2)
    found = {1: BlockShape(tiles=16), 4: BlockShape(tiles=16), 64: BlockShape()}
    assert eval(autotune.table(found).removeprefix("_TABLE = ")) == ((4, BlockShape(tiles=16)), (64, BlockShape()))


def test_few_rows_are_cut_in_more_blocks() -> None:
    assert [block_shape(rows).tiles for rows in (1, 4, 8, 16, 17, 512)] == [16, 16, 32, 32, 64, 64]
    with pytest.raises(ValueError, match="tiles of a block shape is 128; it must be one of"):
        BlockShape(tiles=128)
