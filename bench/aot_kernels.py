"""Compile the kernels for an H100 on a machine without a GPU, and read off what the compiler made of them.

    python bench/aot_kernels.py [--write docs/h100.md] [--json FILE] [--only NAME]

Needs the cuda12 extra (JAX's CUDA plugin and ptxas; no driver, no GPU). Of every kernel: registers, spills and the PTX
instructions that matter; of every program: temporaries, the arrays as large as its input that it writes, and the time
to compile. Fails on a spill, on a program that writes more of these arrays than its byte plan says or starts another
number of kernels, on a pass over the logits without 128-bit loads, and on attention without tensor cores.
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

from pallas_kernels import Filters, Proposal, paged_attention, rejection_sample, top_k_top_p_sample
from pallas_kernels.top_k_top_p import apply_mask

PTX = {
    "128-bit loads": r"\bld\.[a-z.:]*v4\.",
    "TMA copies": r"cp\.async\.bulk\.tensor",
    "tensor core products": r"\bwgmma\.mma_async",
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
    """name, what was compiled; calls: of Mosaic kernels, distinct: of these, since equal ones may be compiled once.
    input: the bytes of p's logits, or of the keys and values that are seen. plan: how many arrays of this size its byte
    plan writes, copies: how many the program does. called: kernels that it starts."""

    name: str
    input: int
    plan: int
    calls: int
    distinct: int
    copies: int = 0
    called: int = 0
    temp: int = 0
    seconds: float = 0.0
    kernels: list[Kernel] = field(default_factory=list)


Function = Callable[..., Any]
SAMPLED = ((64, 128256), (64, 151936), (8, 32000))
VERIFIED = ((64, 3, 128256),)
# Requests, positions of each, KV heads, query heads to each, width, keys: of Llama-3-70B's shard of eight, and 3-8B.
ATTENDED = ((64, 1, 1, 8, 128, 2352), (64, 4, 1, 8, 128, 2352), (8, 1, 8, 4, 128, 8192))
PAGE = 16


def filters(rows: int) -> Filters:
    number = Shape((rows,), jnp.float32)
    return Filters(temperature=number, min_p=number, top_k=Shape((rows,), jnp.int32), top_p=number)


def sample(*args: Any) -> Any:
    return top_k_top_p_sample(*args, implementation="mosaic", interpret=False)


def sample_arguments(rows: int, vocab: int) -> tuple[Any, ...]:
    return Shape((rows, vocab), jnp.float32), filters(rows), Shape((rows, 8), jnp.uint32)


def verify(method: str) -> Function:
    def function(proposal: Proposal | None, *args: Any) -> Any:
        keywords = {"proposal": proposal, "method": method}
        return rejection_sample(*args, **keywords, implementation="mosaic", interpret=False)

    return function


def verify_arguments(slots: int, k: int, vocab: int, paired: bool) -> tuple[Any, ...]:
    logits, drafts = Shape((slots, 1 + k, vocab), jnp.float32), Shape((slots, k), jnp.int32)
    words, uniforms = Shape((slots, 1 + k, 8), jnp.uint32), Shape((slots, k), jnp.float32)
    proposal = Proposal(Shape((slots, k, vocab), jnp.float32), filters(slots)) if paired else None
    return proposal, logits, drafts, filters(slots), words, uniforms


def attend(*args: Any) -> Any:
    return paged_attention(*args, implementation="mosaic", interpret=False)


def attend_arguments(n: int, length: int, heads: int, group: int, width: int, keys: int) -> tuple[Any, ...]:
    pool = Shape((1, 1 + n * keys // PAGE, PAGE, heads, width), jnp.bfloat16)
    q = Shape((n, length, heads, group, width), jnp.bfloat16)
    return q, pool, pool, Shape((), jnp.int32), Shape((n, keys // PAGE), jnp.int32), Shape((n, length), jnp.int32)


def process(
    logits: jax.Array,
    mask: jax.Array,
    counts: jax.Array,
    prompt: jax.Array,
    penalties: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    """Grammar mask, penalties and temperature as the engine applies them: logits [R, V] bfloat16, counts [R, V] int32
    of the output, prompt [R, ceil(V / 32)] packed, penalties [R, 3]."""
    x = apply_mask(logits.astype(jnp.float32), mask)
    repetition, frequency, presence = (penalties[:, i, None] for i in range(3))
    seen = (counts > 0) | (apply_mask(jnp.zeros_like(x), prompt) == 0)
    x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
    return (x - frequency * counts - presence * (counts > 0)) / temperature[:, None]


def process_arguments(rows: int, vocab: int) -> tuple[Any, ...]:
    words = Shape((rows, -(-vocab // 32)), jnp.uint32)
    logits, counts = Shape((rows, vocab), jnp.bfloat16), Shape((rows, vocab), jnp.int32)
    return logits, words, counts, words, Shape((rows, 3), jnp.float32), Shape((rows,), jnp.float32)


def programs() -> list[tuple[Program, Function, tuple[Any, ...]]]:
    found: list[tuple[Program, Function, tuple[Any, ...]]] = []
    # Where the vocabulary is no multiple of 256 the row is padded, which is a copy when nothing comes before.
    for rows, vocab in SAMPLED:
        plan = int(vocab % 256 > 0)
        program = Program(f"top_k_top_p_sample {rows} x {vocab}", 4 * rows * vocab, plan, calls=2, distinct=2)
        found.append((program, sample, sample_arguments(rows, vocab)))
    for slots, k, vocab in VERIFIED:
        for method, paired, calls, distinct in (("standard", False, 3, 3), ("block", True, 6, 4)):
            name = f"rejection_sample {method}{', with q' if paired else ''} {slots} x {1 + k} x {vocab}"
            program = Program(name, 4 * slots * (1 + k) * vocab, 0, calls, distinct)
            found.append((program, verify(method), verify_arguments(slots, k, vocab, paired)))
    for shape in ATTENDED:
        n, length, heads, group, width, keys = shape
        name = f"paged_attention {n} x {length} x {heads * group} heads, {keys} keys of {heads} x {width}"
        program = Program(name, 4 * n * keys * heads * width, plan=0, calls=1, distinct=1)
        found.append((program, attend, attend_arguments(*shape)))
    program = Program("mask, penalties and temperature 64 x 128256", 4 * 64 * 128256, plan=1, calls=0, distinct=0)
    return [*found, (program, process, process_arguments(64, 128256))]


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
    text = compiled.as_text()
    program.copies = copies(text, program.input)
    program.called = len(re.findall(r'custom_call_target="mosaic_gpu', text))
    program.kernels = [read_kernel(file) for file in sorted(set(DUMP.rglob("*.ptxas")) - before)]
    return program


def copies(text: str, size: int) -> int:
    """How many instructions of the entry computation write half of `size` bytes, or more."""
    entry = text[text.index("\nENTRY") :]
    written = 0
    for dtype, dims, operation in re.findall(r"= (\w+)\[([\d,]+)\]\S* ([\w-]+)\(", entry):
        width = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1}.get(dtype, 8)
        bytes_ = width * int(np.prod([int(d) for d in dims.split(",")]))
        written += operation not in ("parameter", "bitcast", "get-tuple-element") and bytes_ >= size / 2
    return written


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
    if not program.distinct <= len(program.kernels) <= program.calls:
        wrong.append(f"{len(program.kernels)} kernels were compiled, not {program.distinct} to {program.calls}")
    if program.called != program.calls:
        wrong.append(f"{program.called} kernels are started, not {program.calls}")
    if program.name.startswith("paged_attention"):
        if not all(k.instructions["tensor core products"] and k.instructions["TMA copies"] for k in program.kernels):
            wrong.append("attention without TMA copies or tensor cores")
    elif program.calls:
        passes = [k for k in program.kernels if not k.instructions["TMA copies"]]  # over the logits, by plain loads
        if not (passes and all(k.instructions["128-bit loads"] for k in passes)):
            wrong.append("the pass over the logits has no 128-bit loads")
    if program.copies > program.plan:
        wrong.append(f"{program.copies} arrays as large as the input are written, not {program.plan}")
    if program.temp > (program.plan + 0.3) * program.input:
        wrong.append(f"temporaries take {program.temp} bytes, the input {program.input}")
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
    lines += ["", "| program | input, MB | temporaries, MB | arrays as large written | compiled in, s |"]
    lines += ["|---|---|---|---|---|"]
    for p in measured:
        lines.append(f"| {p.name} | {p.input / 1e6:.1f} | {p.temp / 1e6:.1f} | {p.copies} | {p.seconds:.0f} |")
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
