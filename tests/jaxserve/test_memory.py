"""How many pages there is memory for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import psutil
import pytest

import jaxserve.engine
from jaxserve import memory
from jaxserve.step import Cache
from models.sharding import make_mesh

PAGE = 2 * 2 * 16 * 2 * 16 * 4  # bytes: keys and values of 2 layers, 16 positions, 2 heads of 16 in float32


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="counts the host's memory")
@pytest.mark.parametrize(("devices", "copies"), [(1, 1), (2, 1), (4, 4)])
def test_a_page_counts_on_every_device_that_holds_it(
    make_llama: Any, monkeypatch: pytest.MonkeyPatch, devices: int, copies: int
) -> None:
    """Two KV heads are split over two devices, and four devices hold each page whole."""
    monkeypatch.setattr(memory, "free_host_memory", lambda: 2 * 64 * PAGE)
    mesh = None if devices == 1 else make_mesh(jax.devices()[:devices])
    page = Cache(make_llama().init_kv(1, 16, mesh), None, None, 16)
    assert memory.affordable_blocks(page, 0.5) == 64 // copies


def test_gpus_count_what_each_has_left() -> None:
    class Gpu:
        platform = "gpu"

        def __init__(self, limit: int) -> None:
            self.memory_stats = lambda: {"bytes_limit": limit, "bytes_in_use": 100}

    shards = [SimpleNamespace(device=Gpu(limit), data=SimpleNamespace(nbytes=8)) for limit in (1000, 900)]
    page = SimpleNamespace(addressable_shards=shards)
    assert memory.affordable_blocks(page, 0.5) == 48  # 50 of the fuller device's 400, in three digits


def test_restarts_agree(make_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Cache(make_llama().init_kv(1, 16, None), None, None, 16)
    found = set()
    for pages in (1000, 1003, 1020):
        monkeypatch.setattr(memory, "free_host_memory", lambda pages=pages: pages * PAGE)
        found.add(memory.affordable_blocks(page, 1.0))
    assert found == ({896} if jax.default_backend() == "cpu" else {memory.affordable_blocks(page, 1.0)})


def test_a_model_without_state_has_no_limit() -> None:
    assert memory.affordable_blocks(Cache((), None, None, 16), 0.5) is None


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert memory.free_host_memory(tmp_path) == 1000
    for name, text in (("current", "600\n"), ("stat", "anon 500\ninactive_file 50\n"), ("max", "max\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.free_host_memory(tmp_path) == 1000
    for limit, free in ((700, 150), (5000, 1000), (100, 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert memory.free_host_memory(tmp_path) == free


def test_pages_are_counted_when_the_weights_are_loaded(
    make_engine: Any, make_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = make_llama(), []
    weights = sum(x.nbytes for x in jax.tree.leaves(model.load_params(None)))

    def spy(*args: Any) -> int:
        seen.append(sum(x.nbytes for x in jax.live_arrays()))
        return memory.num_blocks(*args)

    monkeypatch.setattr(jaxserve.engine, "num_blocks", spy)
    before = sum(x.nbytes for x in jax.live_arrays())
    engine = make_engine(model, max_num_seqs=2)
    assert seen[0] >= before + weights
    assert engine.kv.pool.num_blocks == 1 + 2 * 128 // 16
