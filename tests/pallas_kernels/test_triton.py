"""The Triton kernel: the definition's tokens in Triton's interpreter, and a program for an H100 where Triton compiles.

In processes of their own: whether Triton interprets is decided when it is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_kernels import top_k_top_p_sample
from pallas_kernels.cases import sampling_case

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def missing(*modules: str) -> list[str]:
    return [name for name in modules if importlib.util.find_spec(name) is None]


def run(script: str, *arguments: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(bool(missing("triton", "torch")), reason="Triton's interpreter needs triton and torch")
def test_interpreted_it_gives_the_definitions_tokens() -> None:
    vocabs = 100, 8193
    for vocab, tokens in zip(vocabs, json.loads(run("triton_interpreted.py", *map(str, vocabs))), strict=True):
        case = sampling_case(vocab)
        expected = jax.jit(top_k_top_p_sample)(case.logits, case.filters, case.words)
        differ = (np.asarray(tokens) != np.asarray(expected.token)) & np.asarray(expected.finite)
        assert [name for name, different in zip(case.names, differ, strict=True) if different] == []


@pytest.mark.aot
@pytest.mark.skipif(
    bool(missing("triton", "jax_triton", "jax_cuda12_plugin")), reason="needs the extras triton and cuda12"
)
def test_it_compiles_for_an_h100() -> None:
    """Nothing spilled, loads of 128 bits, and one kernel in the program that JAX lowers to."""
    figures = json.loads(run("triton_compiled.py"))
    assert figures["spilled"] == 0
    assert figures["128-bit loads"] > 0
    assert figures["calls"] == 1
