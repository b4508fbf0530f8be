"""The 8 x H100 programs, compiled without a GPU. In a process of its own: the plugin is chosen before JAX starts."""

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
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    file = tmp_path_factory.mktemp("aot") / "figures.json"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "bench" / "aot_h100.py"), "--json", str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    print("\n" + done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())["programs"]


def test_state_is_updated_in_place(programs: list[dict]) -> None:
    for program in programs:
        sizes = program["sizes"]
        assert program["alias"] >= sizes["kv"] + sizes["batch"] - 4096
        assert program["temp"] < (sizes["kv"] / 10 if sizes["kv"] else sizes["logits"])


def test_logits_are_dealt_out_by_one_exchange(programs: list[dict]) -> None:
    for program in programs:
        found = [c for c in program["collectives"] if c["kind"] == "all-to-all" and not c["in_loop"]]
        exchanged = [(c["bytes"] * 8, c["count"]) for c in found]
        assert exchanged == ([(program["sizes"]["logits"], 1)] if program["name"].startswith("sample") else [])


def test_nothing_else_is_large(programs: list[dict]) -> None:
    """Two all-reduces a layer and one of the embedding, of the activations, and no gather of logits, counts or KV. What
    the last layer of a prefill gives is not needed, but for its keys and values."""
    tokens = {"forward": 64, "verify": 64 * 4, "prefill": 2048, "score": 2048}
    for program in programs:
        activations = 2 * tokens.get(program["name"].removesuffix(" pages"), 0) * 8192
        reduced = [c for c in program["collectives"] if c["kind"] == "all-reduce" and c["bytes"] == activations]
        layers = 79 if program["name"] == "prefill" else 80
        assert sum(c["count"] for c in reduced) == (2 * layers + 1 if activations else 0)
        rest = [c for c in program["collectives"] if c not in reduced and c["kind"] != "all-to-all"]
        # Split by vocabulary, candidates and sums of tiles go round.
        limit = {"vocabulary 64": 64 * 4096, "vocabulary 4": 4 * 4096}.get(program["name"], 64_000)
        if program["name"].startswith("sample drafts") or program["name"] == "sample block mosaic":
            limit = 128_000
        assert all(c["bytes"] <= limit for c in rest)


def test_a_decode_reads_weights_where_they_are(programs: list[dict]) -> None:
    """And leaves no copy of a layer's projections among its temporaries."""
    for program in programs:
        if program["name"].startswith(("forward", "verify")):
            assert not program["copied"]
            assert program["temp"] < 100e6


def test_pages_are_attended_to_in_place(programs: list[dict]) -> None:
    """By one kernel, without the copy of all keys and values of a layer that gathering them makes."""
    by_name = {program["name"]: program for program in programs}
    for name in ("forward", "verify"):
        gathered, in_place = by_name[name], by_name[f"{name} pages"]
        assert [kernel["name"] for kernel in in_place["kernels"]] == ["attend"] * 80
        assert not gathered["kernels"]
        assert in_place["temp"] < gathered["temp"]


def test_prefill_attention_is_fused(programs: list[dict]) -> None:
    prefill = next(program for program in programs if program["name"] == "prefill")
    assert any("fmha" in name for name in prefill["libraries"])
