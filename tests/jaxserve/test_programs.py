"""How many programs an engine needs, and what becomes of the memory areas that a CPU's executables map."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import memory, programs

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA:CPU")


@on_cpu
def test_too_few_memory_areas_are_an_error(
    make_engine: Any, random_markov: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the end of the process: in a warm-up, and for a program that was not warmed up."""
    engine = make_engine(random_markov(16))
    monkeypatch.setattr(programs, "free_memory_areas", lambda: 100)
    with pytest.raises(RuntimeError, match=r"100 memory areas .*vm\.max_map_count .*max_num_seqs"):
        engine.warmup(progress=False)
    with pytest.raises(RuntimeError, match=r"compiling \('move',\) may take more than the 100 memory areas"):
        engine.runner.programs["move",]
    monkeypatch.setattr(programs, "free_memory_areas", lambda: None)  # a system that does not say
    engine.warmup(progress=False)
    assert engine.num_compilations == 0


def test_free_memory_areas(tmp_path: Path) -> None:
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "self").mkdir()
    assert memory.free_memory_areas(tmp_path) is None
    (tmp_path / "sys/vm/max_map_count").write_text("65530\n")
    assert memory.free_memory_areas(tmp_path) is None
    (tmp_path / "self/maps").write_text("55d0-55d1 r-xp 00000000 00:00 0\n" * 30)
    assert memory.free_memory_areas(tmp_path) == 65500
    found = memory.free_memory_areas()
    assert found is None or found > 1000


@on_cpu
def test_a_cpu_needs_one_forward_for_every_number_of_slots_and_drafts(
    make_engine: Any, alphabet: Any, letters: Any
) -> None:
    """Whatever the context; and no sampling of its own where nobody has a grammar."""
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    engine = make_engine(alphabet, letters, max_num_seqs=8, max_model_len=2048, speculative_config=speculation)
    assert engine.runner.grammars is not None
    step_programs = engine.runner._step_programs
    keys = list(step_programs.keys())
    found = Counter(key[0] for key in keys)
    counts = len(step_programs.draft_counts)
    assert len(set(keys)) == len(keys)
    assert found["forward"] == 3 * counts  # of 1, 4 and 8 slots
    assert found["sample"] == 2 * 3 * counts  # with and without processors


@on_cpu
def test_layers_share_what_they_map(make_engine: Any, make_llama: Any) -> None:
    """XLA:CPU maps three areas for every kernel, of which a layer has only the two that store to pages to itself."""
    if memory.free_memory_areas() is None:
        pytest.skip("this system does not say how many areas are mapped")

    def areas(layers: int) -> int:
        engine = make_engine(make_llama(num_hidden_layers=layers), max_num_seqs=4)
        engine.runner.programs["forward", 1, engine.runner.buckets.pages[-1], 0]  # whatever is made once
        gc.collect()  # executables of earlier engines would give areas back meanwhile
        before = memory.free_memory_areas()
        engine.runner.programs["forward", 4, engine.runner.buckets.pages[-1], 0]
        after = memory.free_memory_areas()
        assert before is not None
        assert after is not None
        return before - after

    few, many = areas(2), areas(8)
    assert few > 100  # they are counted
    assert (many - few) / 6 < 3 * 2.5
