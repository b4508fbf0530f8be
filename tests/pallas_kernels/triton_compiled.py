"""Compile the Triton kernel for sm_90 without a GPU; print what ptxas says of it, and whether JAX lowers to it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pallas_kernels import Filters
from pallas_kernels.triton.kernel import sample_kernel
from pallas_kernels.triton.sample import OPTIONS, WARPS, kernel_constants, sample_random

ROWS, VOCAB = 64, 128256
POINTERS = {"logits": "*fp32", "floats": "*fp32", "ints": "*i32", "words": "*u32", "token": "*i32", "largest": "*fp32"}


def compiled() -> dict[str, int]:
    constants = kernel_constants(VOCAB)
    signature = POINTERS | {"sums": "*fp32", "vocab": "i32"} | dict.fromkeys(constants, "constexpr")
    order = sample_kernel.arg_names
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(order) if name not in constants}
    source = ASTSource(sample_kernel, {name: signature[name] for name in order}, constants, attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS | {"num_warps": WARPS}).asm["ptx"]
    file = Path(tempfile.mkdtemp()) / "kernel.ptx"
    file.write_text(ptx)
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [str(ptxas), "-v", "-arch=sm_90a", str(file), "-o", str(file.with_suffix(".cubin"))]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", report))),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "128-bit loads": len(re.findall(r"ld\.global[a-z0-9.:]*\.v4", ptx)),
    }


def calls() -> int:
    """Kernels in the program that JAX lowers to."""

    def sample(logits: jax.Array, filters: Filters, words: jax.Array) -> Any:
        return sample_random(logits, filters, words, None, compute_capability=90)

    shape = jax.ShapeDtypeStruct
    number = shape((ROWS,), jnp.float32)
    filters = Filters(number, number, shape((ROWS,), jnp.int32), number)
    arguments = shape((ROWS, VOCAB), jnp.float32), filters, shape((ROWS, 8), jnp.uint32)
    lowered = jax.jit(sample).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("triton_kernel_call")


if __name__ == "__main__":
    print(json.dumps(compiled() | {"calls": calls()}))
