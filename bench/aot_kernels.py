"""Compile the kernels for an H100 on a machine without a GPU, and read off what the compiler made of them.

    python bench/aot_kernels.py [--write docs/h100.md] [--json FILE] [--only NAME]

Needs the cuda12 extra (JAX's CUDA plugin and ptxas; no driver, no GPU). Of every kernel: registers, spills, shared
memory, the PTX instructions that matter and the time to compile; of every program: temporaries. Fails on a spill, on a
program that writes a copy of the logits where its byte plan has none, and on a pass over the logits without 128-bit
loads.
"""

# ruff: noqa: E402 (the environment comes before JAX)

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
DUMP = Path(tempfile.mkdtemp(prefix="aot_kernels"))
os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(DUMP)}
for _root in getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or ():
    os.environ["PATH"] = f"{_root}/cuda_nvcc/bin{os.pathsep}" + os.environ["PATH"]

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import Filters, top_k_top_p_sample

PTX = {
    "128-bit loads": r"\bld\.[a-z.:]*v4\.",
    "TMA copies": r"cp\.async\.bulk\.tensor",
    "shuffles": r"\bshfl\.",
    "barriers": r"\bbar\.sync|barrier\.sync",
}
Shape = jax.ShapeDtypeStruct


@dataclass
class Kernel:
    registers: int
    spilled: int  # bytes
    instructions: dict[str, int]


@dataclass
class Program:
    """name, what was compiled. copies: of the logits, that its byte plan allows."""

    name: str
    logits: int  # bytes
    copies: float
    temp: int = 0
    seconds: float = 0.0
    kernels: list[Kernel] = field(default_factory=list)


def filters(rows: int) -> Filters:
    return Filters(Shape((rows,), jnp.float32), Shape((rows,), jnp.float32), Shape((rows,), jnp.int32),
                   Shape((rows,), jnp.float32))  # fmt: skip


def sample_arguments(rows: int, vocab: int) -> tuple[Any, ...]:
    return Shape((rows, vocab), jnp.float32), filters(rows), Shape((rows, 8), jnp.uint32)


def sample(*args: Any) -> Any:
    return top_k_top_p_sample(*args, implementation="mosaic", interpret=False)


def programs() -> list[tuple[Program, Callable[..., Any], tuple[Any, ...]]]:
    found: list[tuple[Program, Callable[..., Any], tuple[Any, ...]]] = []
    # Where the vocabulary is no multiple of 256 the row is padded, which is a copy when nothing comes before.
    for rows, vocab, copies in ((64, 128256, 0.2), (64, 151936, 1.2), (8, 32000, 0.2)):
        program = Program(f"top_k_top_p_sample {rows} x {vocab}", 4 * rows * vocab, copies)
        found.append((program, sample, sample_arguments(rows, vocab)))
    return found


def h100() -> NamedSharding:
    """One H100, as the compiler sees it."""
    target = (Path(__file__).parent / "h100_sxm.txtpb").read_text()
    topology = topologies.get_topology_desc("h100", platform="cuda", target_config=target, topology="1x1x1")
    return NamedSharding(Mesh(np.array(topology.devices[:1]), ("device",)), PartitionSpec())


def measure(program: Program, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Program:
    device = h100()
    arguments = jax.tree.map(lambda x: Shape(x.shape, x.dtype, sharding=device), arguments)
    before = set(DUMP.rglob("*.ptxas"))
    started = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    program.seconds = time.perf_counter() - started
    program.temp = compiled.memory_analysis().temp_size_in_bytes
    program.kernels = [read_kernel(file) for file in sorted(set(DUMP.rglob("*.ptxas")) - before)]
    return program


def read_kernel(report: Path) -> Kernel:
    text, ptx = report.read_text(errors="replace"), report.with_suffix(".ptx").read_text(errors="replace")
    return Kernel(
        registers=max(map(int, re.findall(r"[Uu]sed (\d+) registers", text))),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill", text))),
        instructions={name: len(re.findall(pattern, ptx)) for name, pattern in PTX.items()},
    )


def check(program: Program) -> list[str]:
    """What is wrong; empty when nothing is."""
    wrong = [f"kernel {i} spills {k.spilled} bytes" for i, k in enumerate(program.kernels) if k.spilled]
    if not program.kernels:
        wrong.append("no kernel was compiled")
    elif not program.kernels[0].instructions["128-bit loads"]:
        wrong.append("the pass over the logits has no 128-bit loads")
    if program.temp > program.copies * program.logits:
        wrong.append(f"temporaries take {program.temp} bytes, the logits {program.logits}")
    return [f"{program.name}: {w}" for w in wrong]


def table(measured: list[Program]) -> str:
    lines = [
        "| program | kernel | registers | spilled bytes | " + " | ".join(PTX) + " |",
        "|---|" + "---|" * (3 + len(PTX)),
    ]
    for program in measured:
        for i, kernel in enumerate(program.kernels):
            cells = [i, kernel.registers, kernel.spilled, *kernel.instructions.values()]
            lines.append(f"| {program.name if i == 0 else ''} | " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| program | logits, MB | temporaries, MB | compiled in, s |", "|---|---|---|---|"]
    for p in measured:
        lines.append(f"| {p.name} | {p.logits / 1e6:.1f} | {p.temp / 1e6:.1f} | {p.seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="replace the table between the markers of this Markdown file")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    args = parser.parse_args()
    measured = [measure(*program) for program in programs() if args.only in program[0].name]
    text = f"jax {jax.__version__}, sm_90a\n\n{table(measured)}"
    print(text)
    if args.json:
        args.json.write_text(json.dumps([asdict(p) for p in measured], indent=1))
    if args.write:
        write(args.write, text)
    wrong = [w for program in measured for w in check(program)]
    print("\n" + ("\n".join(wrong) if wrong else "All checks hold."))
    raise SystemExit(1 if wrong else 0)


def write(file: Path, text: str) -> None:
    """Replace what stands between the markers of this JAX version."""
    version = ".".join(jax.__version__.split(".")[:2])
    start, end = f"<!-- begin jax {version} -->", f"<!-- end jax {version} -->"
    document = file.read_text()
    before, rest = document.split(start)
    file.write_text(f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    main()
