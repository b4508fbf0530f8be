"""The scripts that measure kernels on a GPU, as far as they go without one."""

# ruff: noqa: E402 (the path comes before the scripts)

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    assert kernels_gpu.main(["--interpret", "--budget", "3000", "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    kinds = {(r["operation"], r["implementation"]) for r in results if r["ms"] > 0}
    operations = {f"rejection_sample {kind}" for kind in ("standard", "standard with q", "block with q", "coupled")}
    operations |= {"top_k_top_p_sample", "paged_attention 1 + 0", "paged_attention 1 + 3"}
    assert kinds == {(operation, name) for operation in operations for name in ("xla", "mosaic")}


def test_what_matters_comes_first() -> None:
    steps = kernels_gpu.plan([1, 64], [32000, 128256], ["xla", "mosaic", "triton"], ["torch"], tiny=False)
    found = [
        [(p.results[0].operation.split()[0], p.results[0].rows, p.results[0].vocab) for p in step] for step in steps
    ]
    sampling = "top_k_top_p_sample"
    assert found[0] == found[3] == [(sampling, 64, 128256)]
    assert found[1] == [("rejection_sample", 256, 128256)] * 4
    assert found[2] == [("paged_attention", 64, 2352)] * 2
    assert found[4:6] == [[(sampling, 1, 32000), (sampling, 1, 128256)], [(sampling, 64, 32000)]]
    assert steps[1][0].results[0].operation == "rejection_sample standard"
    assert [r.implementation for r in steps[0][0].results] == ["xla", "mosaic", "triton"]
    assert [r.implementation for r in steps[3][0].results] == ["torch"]


def test_cases_are_cut_in_batches_of_the_timed_shape() -> None:
    batches = list(kernels_gpu.in_batches("abc", (np.arange(3), {"x": np.arange(6).reshape(3, 2)}), 2))
    assert [names for names, _ in batches] == [["a", "b"], ["c", "a"]]
    assert batches[1][1][0].tolist() == [2, 0]
    assert batches[1][1][1]["x"].tolist() == [[4, 5], [0, 1]]
    names, arguments = next(iter(kernels_gpu.verifying_cases(3, 100, "top_p 0.9")))
    drafts, proposal = arguments[1], arguments[5]
    assert len(names) == 3
    assert drafts.shape == (3, kernels_gpu.DRAFTS)
    assert drafts[:, 2].tolist() == [-1] * 3
    assert proposal.logits.shape == (3, kernels_gpu.DRAFTS, 100)


def double(x: jax.Array) -> jax.Array:
    return 2 * x


def on_the_host(function: Callable[[], Any]) -> Callable[[jax.Array], jax.Array]:
    """A program that calls `function` whenever it runs."""

    def called(x: np.ndarray) -> np.ndarray:
        function()
        return 2 * np.asarray(x)

    return lambda x: jax.pure_callback(called, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def raises(error: BaseException) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


def problem(**implementations: Callable[[jax.Array], jax.Array]) -> kernels_gpu.Problem:
    return kernels_gpu.Problem(
        [kernels_gpu.Result("double", name, 2, 3, 24) for name in implementations],
        lambda: iter([(jnp.ones((2, 3)),)]),
        lambda: [(["case a", "case b"], (jnp.array([[1.0, 2, 3], [1, 2, 4]]),))],
        lambda x, implementation: implementations[implementation](x),
        lambda got, want: (got != want).any(axis=1),
    )


def bench(monkeypatch: pytest.MonkeyPatch, *problems: kernels_gpu.Problem, **options: Any) -> kernels_gpu.Bench:
    monkeypatch.setattr(kernels_gpu, "copy_bandwidth", lambda _: 1.0)
    return kernels_gpu.Bench([[p] for p in problems], **{"deadline": time.monotonic() + 600, "tiny": True} | options)


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench(monkeypatch, problem(xla=double, mosaic=lambda x: jnp.where(x == 4, 0, 2 * x)))
    assert run.run() == 1
    right, wrong = run.results
    assert (right.note, wrong.note) == ("", "wrong: case b")
    assert right.ms > 0
    assert wrong.ms is None


@pytest.mark.parametrize(
    ("kernel", "error"),
    [
        (raises(ValueError("no such tile\nin the layout")), "ValueError: no such tile"),
        (on_the_host(raises(ValueError("no such tile"))), "JaxRuntimeError: "),
    ],
    ids=["compiled", "run"],
)
def test_a_kernel_that_raises_is_a_row_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kernel: Callable[..., Any],
    error: str,
) -> None:
    file = tmp_path / "figures.json"
    run = bench(monkeypatch, problem(xla=double, mosaic=kernel, triton=double), problem(xla=double), file=file)
    assert run.run() == 1
    results = json.loads(file.read_text())["results"]
    assert [(r["implementation"], r["ms"] is None, r["note"]) for r in results] == [
        ("xla", False, ""), ("mosaic", True, ""), ("triton", False, ""), ("xla", False, ""),
    ]  # fmt: skip
    assert results[1]["error"].startswith(error)
    assert "\n" not in results[1]["error"]
    assert f"failed: {error}" in capsys.readouterr().out


def test_without_a_reference_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = bench(monkeypatch, problem(xla=raises(MemoryError("of the GPU")), mosaic=double))
    assert run.run() == 1
    assert run.results[0].error == "MemoryError: of the GPU"
    assert run.results[1].note == "skipped: nothing to compare with"


def test_a_rival_that_fails_changes_no_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_gpu, "rival_calls", raises(ImportError("libcuda")))
    run = bench(monkeypatch, problem(xla=double, torch=double))
    assert run.run() == 0
    assert run.results[1].error == "ImportError: libcuda"


def test_what_there_is_no_time_for_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By table and file; and nothing is begun, or this test would take a minute."""
    file = tmp_path / "figures.json"
    assert kernels_gpu.main(["--interpret", "--budget", "0", "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    assert [r["note"] for r in results] == ["skipped: out of time"] * 14
    assert [r["ms"] for r in results] == [None] * 14
    assert capsys.readouterr().out.count("skipped: out of time") == 14


def test_the_deadline_holds_between_the_runs_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def late() -> None:
        ran.append(0)
        run.deadline = 0.0

    run = bench(monkeypatch, problem(xla=on_the_host(late), mosaic=double))
    assert run.run() == 0
    assert [r.note for r in run.results] == ["skipped: out of time"] * 2
    assert len(ran) == 1  # neither the cases nor the clock


def test_a_run_that_dies_leaves_its_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    run = bench(monkeypatch, problem(xla=double, mosaic=raises(KeyboardInterrupt())), problem(xla=double), file=file)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    results = json.loads(file.read_text())["results"]
    assert results[0]["ms"] > 0
    assert [r["note"] for r in results] == ["", "not reached", "not reached"]
    assert list(tmp_path.iterdir()) == [file]


def test_a_compilation_that_does_not_come_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def stuck(x: jax.Array) -> jax.Array:
        release.wait()
        return x

    monkeypatch.setattr(kernels_gpu, "COMPILE", 2)
    run = bench(monkeypatch, problem(xla=double, mosaic=stuck, triton=double), tiny=False)
    assert run.run() == 1
    release.set()
    assert [r.error for r in run.results] == ["", "TimeoutError: not compiled in 2 s", ""]
    assert run.results[2].ms > 0


def test_a_run_that_does_not_come_back_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, started, release, statuses = tmp_path / "figures.json", threading.Event(), threading.Event(), []

    def stuck() -> None:
        started.set()
        release.wait()

    monkeypatch.setattr(os, "_exit", statuses.append)
    run = bench(monkeypatch, problem(xla=double, mosaic=on_the_host(stuck)), problem(xla=double), file=file)
    thread = threading.Thread(target=run.run)
    thread.start()
    assert started.wait(60)
    run.end()
    results = json.loads(file.read_text())["results"]
    release.set()
    thread.join()
    assert statuses == [1]
    assert results[0]["ms"] > 0
    assert [r["error"] for r in results] == ["", "TimeoutError: it did not come back", ""]
    assert results[2]["note"] == "skipped: out of time"


def test_the_process_ends_soon_after_the_budget(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    program = f"""
import os, threading, kernels_gpu
kernels_gpu.GRACE = 1
kernels_gpu.copy_bandwidth = lambda _: threading.Event().wait()
os._exit(kernels_gpu.main(["--interpret", "--budget", "4", "--json", {str(file)!r}]))
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped: out of time") == 14
    assert [r["note"] for r in json.loads(file.read_text())["results"]] == ["skipped: out of time"] * 14


def test_the_fastest_shape_is_found_field_by_field() -> None:
    measured: list[BlockShape] = []

    def measure(shape: BlockShape) -> float:
        measured.append(shape)
        return abs(shape.tiles - 32) + shape.part + abs(shape.chunk - 128)

    best, ms = autotune.best_shape(BlockShape(), measure)
    assert best == BlockShape(tiles=32, part=16, chunk=128)
    assert ms == 16
    assert len(measured) == len(set(measured)) == 7
    splits, _ = autotune.best_shape(AttentionShape(8), lambda shape: abs(shape.splits - 4) + shape.stages)
    assert splits == AttentionShape(splits=4, stages=2)
    found = {1: BlockShape(tiles=16), 4: BlockShape(tiles=16), 64: BlockShape()}
    assert eval(autotune.table(found).removeprefix("_TABLE = ")) == ((4, BlockShape(tiles=16)), (64, BlockShape()))


def test_few_rows_are_cut_in_more_blocks() -> None:
    assert [block_shape(rows).tiles for rows in (1, 4, 8, 16, 17, 512)] == [16, 16, 32, 32, 64, 64]
    with pytest.raises(ValueError, match="tiles of a block shape is 128; it must be one of"):
        BlockShape(tiles=128)
