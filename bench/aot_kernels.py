"""Compile the kernels for an H100 on a machine without a GPU, and read off what the compiler made of them.

    python bench/aot_kernels.py [--write docs/h100.md] [--json FILE] [--only NAME] [--jobs N]

Needs the extra cuda12 (JAX's CUDA plugin and ptxas; no GPU), and triton for Triton's kernel. Of every kernel:
registers, spills and the PTX instructions that matter; of every program: temporaries, the arrays as large as its logits
(or keys and values) that it writes, and the time to compile. Fails on spills, on attention without tensor cores, and
where arrays, kernels, temporaries or the 128-bit loads of a pass over the logits are others than is said here.
"""

# ruff: noqa: E402 (the environment comes before JAX)

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
DUMP = Path(tempfile.mkdtemp(prefix="aot_kernels"))  # of this process: a worker imports the module again
atexit.register(shutil.rmtree, DUMP, ignore_errors=True)
os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(DUMP)}
for _root in getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or ():
    os.environ["PATH"] = f"{_root}/cuda_nvcc/bin{os.pathsep}" + os.environ["PATH"]

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import Filters, Proposal, paged_attention, rejection_sample, top_k_top_p_sample

Shape = jax.ShapeDtypeStruct
PTX = {
    "128-bit loads": r"\bld\.(?!shared)[\w.:]*v4\.",
    "TMA copies": r"cp\.async\.bulk\.tensor",
    "tensor core products": r"\bwgmma\.mma_async",
    "shuffles": r"\bshfl\.",
    "barriers": r"\bbar\.sync|barrier\.sync",
}
ITEMSIZE = {"pred": 1, "u8": 1, "s8": 1, "u16": 2, "s16": 2, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}


@dataclass
class Kernel:
    name: str
    registers: int
    spilled: int  # bytes
    instructions: dict[str, int]  # of PTX


@dataclass
class Program:
    """name: what is compiled. size: bytes of its logits (of p) in float32, or of the keys and values that are seen;
    plan: arrays of half this size and more that it writes; room: most that its temporaries may take, in sizes. calls:
    names of its kernels. loads: of 128 bits by a thread of a pass over the logits. spills: bytes. The rest is found."""

    name: str
    size: int
    plan: int
    room: float
    calls: tuple[str, ...] = ()
    loads: int = 0
    spills: int = 0
    copies: int = 0
    temp: int = 0
    seconds: float = 0.0
    kernels: list[Kernel] = field(default_factory=list)


Case = tuple[Program, Callable[..., Any], tuple[Any, ...]]  # and what is compiled, with its arguments


# ---- the programs


def filters(rows: int) -> Filters:
    number = Shape((rows,), jnp.float32)
    return Filters(temperature=number, min_p=number, top_k=Shape((rows,), jnp.int32), top_p=number)


def sample_arguments(rows: int, vocab: int, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    return Shape((rows, vocab), dtype), filters(rows), Shape((rows, 8), jnp.uint32)


def sampling(rows: int, vocab: int, plan: int = 0, loads: int = 32, more: str = "") -> Case:
    """plan, loads: as of Program. more: beyond plain float32 logits, "bfloat16", "mask" or "logprob"."""

    def sample(logits: Any, filters: Any, words: Any, mask: Any = None) -> Any:
        options = {"mask": mask, "logprob": more == "logprob", "implementation": "mosaic", "interpret": False}
        return top_k_top_p_sample(logits, filters, words, **options)

    arguments = sample_arguments(rows, vocab, jnp.bfloat16 if more == "bfloat16" else jnp.float32)
    if more == "mask":
        arguments += (Shape((rows, -(-vocab // 32)), jnp.uint32),)
    name = f"top_k_top_p_sample {rows} x {vocab}{more and f', {more}'}"
    room = (0.15 + plan) * max(1.0, 64 * 256 / vocab)  # no row of a copy is shorter
    return Program(name, 4 * rows * vocab, plan, room, ("statistics", "sample"), loads), sample, arguments


def verification(method: str, paired: bool = False, slots: int = 64, k: int = 3, vocab: int = 128256) -> Case:
    """paired: with the logits that drafts were drawn from."""

    def verify(proposal: Any, rates: Any, uniforms: Any, *args: Any) -> Any:
        options = {"proposal": proposal, "rates": rates, "implementation": "mosaic", "interpret": False}
        return rejection_sample(*args, uniforms, method=method, **options)

    logits, drafts = Shape((slots, 1 + k, vocab), jnp.float32), Shape((slots, k), jnp.int32)
    proposal = Proposal(Shape((slots, k, vocab), jnp.float32), filters(slots)) if paired else None
    rates = Shape((k,), jnp.float32) if method == "synthetic" else None
    uniforms = None if method == "coupled" else Shape((slots, k), jnp.float32)
    arguments = (proposal, rates, uniforms, logits, drafts, filters(slots), Shape((slots, 1 + k, 8), jnp.uint32))
    calls = ("statistics", "weigh") * (1 + paired) + ("residual",) * (1 + (method == "block"))
    name = f"rejection_sample {method}{', with q' * paired} {slots} x {1 + k} x {vocab}"
    calls = ("statistics", "sample") if method == "coupled" else calls
    return Program(name, 4 * slots * (1 + k) * vocab, 0, 0.15 + 0.1 * paired, calls, loads=32), verify, arguments


def attention(
    n: int, length: int, heads: int, group: int, keys: int, width: int = 128, dtype: Any = jnp.bfloat16, page: int = 16
) -> Case:
    """Of n requests, `length` positions each, over so many keys; `group` query heads to each of `heads` KV heads."""

    def attend(*args: Any) -> Any:
        return paged_attention(*args, implementation="mosaic", interpret=False)

    pages = -(-keys // page)
    pool = Shape((1 + n * pages, page, heads, width), dtype)
    q, positions = Shape((n, length, heads, group, width), dtype), Shape((n, length), jnp.int32)
    arguments = q, pool, pool, Shape((n, pages), jnp.int32), positions
    name = f"paged_attention {n} x {length} x {heads * group} heads, {keys} keys of {heads} x {width}"
    name += ", float16" * (dtype == jnp.float16) + f", pages of {page}" * (page != 16)
    return Program(name, 4 * n * keys * heads * width, 0, 0.1, ("attend",)), attend, arguments


def groups() -> list[list[Case]]:
    """The programs. Those of a group have kernels in common, which are compiled once when one process has them all."""
    judged = [("standard", False), ("standard", True), ("block", True), ("synthetic", False)]
    variants = [(0, "logprob"), (1, "bfloat16"), (1, "mask")]
    return [
        [verification(*method) for method in judged],
        [sampling(64, 128256), *(sampling(64, 128256, plan, more=more) for plan, more in variants)],
        [sampling(256, 128256), verification("coupled")],
        [sampling(512, 128256)],
        [sampling(64, 151936, plan=1)],  # no multiple of 256
        [sampling(64, 8192, plan=1)],  # fewer tiles than a block of the pass has
        [sampling(8, 32000, loads=16)],
        [sampling(4, 128256, loads=8)],
        [
            attention(64, 1, 1, 8, 2352),  # Llama-3-70B's shard of eight
            attention(64, 4, 1, 8, 2352),
            attention(8, 1, 8, 4, 8192),  # Llama-3-8B
            attention(64, 1, 8, 4, 2352, width=64),
            attention(64, 1, 1, 8, 2352, dtype=jnp.float16),
            *(attention(64, 1, 1, 8, 2352, page=page) for page in (8, 32, 64, 128)),
        ],
    ]


# ---- what the compiler made of them


def h100(major: int = 9) -> NamedSharding:
    """One H100, as the compiler sees it; with major=8 an A100's instructions and an H100's other figures."""
    target = (Path(__file__).parent / "h100_sxm.txtpb").read_text()
    if major != 9:
        target = target.replace("major: 9 feature_extension: ACCELERATED_FEATURES", f"major: {major}")
    topology = topologies.get_topology_desc(f"sm_{major}0", platform="cuda", target_config=target, topology="1x1x1")
    return NamedSharding(Mesh(np.array(topology.devices[:1]), ("device",)), PartitionSpec())


def measure(case: Case, major: int = 9) -> tuple[Program, str]:
    (program, function, arguments), device = case, h100(major)
    arguments = jax.tree.map(lambda x: Shape(x.shape, x.dtype, sharding=device), arguments)
    started = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    program.seconds = time.perf_counter() - started
    program.temp = compiled.memory_analysis().temp_size_in_bytes
    text = compiled.as_text()
    program.copies, program.kernels = copies(text, program.size), started_kernels(text)
    return program, text


def measure_group(index: int, only: str) -> list[Program]:
    return [measure(case)[0] for case in groups()[index] if only in case[0].name]


_compiled: dict[str, Kernel] = {}  # by a hash of the code; equal kernels are compiled once in a process


def started_kernels(text: str) -> list[Kernel]:
    """The Mosaic kernels that a program starts. Of those that were compiled for it, the reports lie in DUMP."""
    calls = [line for line in text.split("\n") if 'custom_call_target="mosaic_gpu' in line]
    hashes = [re.search(r'kernel_hash = ("(?:[^"\\]|\\.)*")', line)[1] for line in calls]
    names = [re.search(r'op_name="[^"]*jit\(_?([a-z_]+)\)', line)[1] for line in calls]
    new = {key: name for key, name in zip(hashes, names, strict=True) if key not in _compiled}
    reports = sorted(DUMP.glob("*.ptxas"), key=lambda file: int(file.stem.rpartition("_")[2]))
    for (key, name), report in zip(new.items(), reports, strict=True):
        ptx = report.with_suffix(".ptx").read_text(errors="replace")
        name = {"segment_statistics": "statistics", "run": "residual"}.get(name, name.removesuffix("_kernel"))
        _compiled[key] = read_kernel(name, report.read_text(errors="replace"), ptx)
    for file in DUMP.glob("*.*"):  # a hundred megabytes of logs a kernel
        file.unlink()
    return [_compiled[key] for key in hashes]


def read_kernel(name: str, report: str, ptx: str) -> Kernel:
    """report: what ptxas -v says."""
    registers = max(map(int, re.findall(r"[Uu]sed (\d+) registers", report)))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", report)))
    return Kernel(name, registers, spilled, {name: len(re.findall(pattern, ptx)) for name, pattern in PTX.items()})


class Instruction(NamedTuple):
    """operation; arrays: shape and bytes of its results, members of tuples; line: its text."""

    operation: str
    arrays: list[tuple[str, int]]
    line: str

    def called(self, *attributes: str) -> list[str]:
        """Names of the computations that these attributes name."""
        found = re.findall(rf"\b(?:{'|'.join(attributes)})=(?:{{([^}}]*)}}|%?([\w.-]+))", self.line)
        return [name.strip(" %") for several, one in found for name in (several or one).split(",")]


def computations(text: str) -> dict[str, list[Instruction]]:
    """The computations of an HLO module by name; the entry computation is "ENTRY"."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.split("\n"):
        if head := re.match(r"(ENTRY )?%?([\w.-]+) (?:\(.*)?\{\s*$", line):
            current = found.setdefault("ENTRY" if head[1] else head[2], [])
        elif match := re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][\w-]*)\(", line):
            shapes = re.findall(r"([a-z]\w*)\[([\d,]*)\]", match[1])
            arrays = [(f"{t}[{d}]", ITEMSIZE.get(t, 8) * math.prod(map(int, re.findall(r"\d+", d)))) for t, d in shapes]
            current.append(Instruction(match[2], arrays, line))
    return found


# A view, a number that is there already, or what others do: control flow, and the start of what is done later.
_WRITE_NOTHING = ["parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "call"]


def copies(text: str, size: int) -> int:
    """How many arrays of half of `size` bytes, or more, a program writes: results of its entry computation, members of
    tuples too, and of what it calls, but not inside fusions. Of branches the one with the most, of a loop one round; an
    update in place counts as a whole array."""
    all_ = computations(text)

    def written(name: str) -> int:
        return sum(by(instruction) for instruction in all_[name])

    def by(instruction: Instruction) -> int:
        operation, called = instruction.operation, instruction.called
        if operation == "conditional":
            branches = called("branch_computations", "true_computation", "false_computation")
            return max(written(name) for name in branches)
        if operation in ("while", "call"):
            return sum(written(name) for name in called("body", "condition", "to_apply"))
        if operation in _WRITE_NOTHING or operation.endswith("-start"):
            return 0
        return sum(bytes_ >= size / 2 for _, bytes_ in instruction.arrays)

    return written("ENTRY")


def measure_triton(major: int) -> Program:
    """Its sampler by XLA and jax-triton; the kernel once more by Triton's own compiler, for its figures."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pallas_kernels.triton.kernel import sample_kernel
    from pallas_kernels.triton.sample import OPTIONS, WARPS, kernel_constants, sample_random

    vocab, arch = 128256, f"sm_{major}0{'a' * (major == 9)}"
    sample = partial(sample_random, valid=None, compute_capability=10 * major)
    name, spills = f"Triton, {arch}: top_k_top_p_sample 64 x {vocab}", 112 * (major == 8)
    program = Program(name, 4 * 64 * vocab, 0, 0.01, ("triton",), loads=20, spills=spills)
    program, text = measure((program, sample, sample_arguments(64, vocab)), major)
    constants, names = kernel_constants(vocab), sample_kernel.arg_names
    types = {"words": "*u32", "ints": "*i32", "token": "*i32", "vocab": "i32"} | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants}
    source = ASTSource(sample_kernel, {name: types.get(name, "*fp32") for name in names}, constants, aligned)
    target, options = GPUTarget("cuda", 10 * major, 32), OPTIONS | {"num_warps": WARPS}
    os.environ["TRITON_CACHE_DIR"] = str(DUMP)  # jax-triton leaves none
    ptx = triton.compile(source, target=target, options=options).asm["ptx"]
    (DUMP / "triton.ptx").write_text(ptx)
    command = ["ptxas", "-v", f"-arch={arch}", "triton.ptx", "-o", "triton.cubin"]
    done = subprocess.run(command, cwd=DUMP, capture_output=True, text=True, check=True)
    program.kernels = [read_kernel("triton", done.stderr, ptx)] * text.count('custom_call_target="triton_kernel_call')
    return program


def check(program: Program) -> list[str]:
    """What is wrong; empty when nothing is."""
    wrong = check_kernels(program.kernels, program.calls, program.loads, program.spills)
    if program.copies != program.plan:
        wrong.append(f"{program.copies} arrays of the size of the input are written, not {program.plan}")
    if program.temp > program.room * program.size:
        wrong.append(f"temporaries take {program.temp} bytes, over {program.room} x {program.size}")
    return [f"{program.name}: {w}" for w in wrong]


def check_kernels(kernels: list[Kernel], calls: tuple[str, ...], loads: int, spills: int = 0) -> list[str]:
    """calls, loads, spills: as of Program."""
    wrong = [f"kernel {k.name} spills {k.spilled} bytes, not {spills}" for k in kernels if k.spilled != spills]
    if sorted(k.name for k in kernels) != sorted(calls):
        wrong.append(f"starts the kernels {[k.name for k in kernels]}, not {list(calls)}")
    for k in kernels:
        wide, tma, products = (k.instructions[x] for x in ("128-bit loads", "TMA copies", "tensor core products"))
        if (by_loads := k.name in ("statistics", "triton")) and wide != loads:
            wrong.append(f"kernel {k.name} reads the logits by {wide} loads of 128 bits, not {loads}")
        if bool(tma) == by_loads:
            wrong.append(f"kernel {k.name} has {tma} TMA copies")
        if k.name == "attend" and not products:
            wrong.append("attention without tensor cores")
    return wrong


def program_table(measured: list[Program]) -> str:
    lines = ["| program | logits or keys and values, MB | temporaries, MB | arrays as large written | kernels | s |"]
    lines += ["|---|---|---|---|---|---|"]
    for p in measured:
        figures = f"{p.size / 1e6:.1f} | {p.temp / 1e6:.1f} | {p.copies}"
        lines.append(f"| {p.name} | {figures} | {', '.join(k.name for k in p.kernels)} | {p.seconds:.0f} |")
    return "\n".join(lines)


def kernel_table(started: list[tuple[str, list[Kernel]]]) -> str:
    """Of the kernels of programs by name: a row for all that have equal figures."""
    rows: dict[tuple[Any, ...], str] = {}
    for program, kernels in started:
        for k in kernels:
            rows.setdefault((k.name, k.registers, k.spilled, *k.instructions.values()), program)
    head = "| kernel | first in | registers | spilled bytes | " + " | ".join(PTX) + " |"
    lines = [head, "|---" * (4 + len(PTX)) + "|"]
    lines += [f"| {name} | {first} | " + " | ".join(map(str, rest)) + " |" for (name, *rest), first in rows.items()]
    return "\n".join(lines)


def main() -> None:
    args = arguments(__doc__)
    indices = [i for i, group in enumerate(groups()) if any(args.only in program.name for program, *_ in group)]
    measured = [p for group in in_processes(partial(measure_group, only=args.only), indices, args.jobs) for p in group]
    if args.only in "Triton" and all(importlib.util.find_spec(name) for name in ("triton", "jax_triton")):
        measured += [measure_triton(major) for major in (9, 8)]
    text = f"{program_table(measured)}\n\n{kernel_table([(p.name, p.kernels) for p in measured])}"
    report("jax", text, measured, [w for p in measured for w in check(p)], args)


def arguments(description: str | None) -> Any:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="replace the tables between the markers of this Markdown file")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 4), help="processes that compile")
    return parser.parse_args()


def in_processes(function: Callable[[Any], Any], items: list[Any], jobs: int) -> Iterator[Any]:
    """function(item) of each, in order. Most of the time goes into Python's lowering, so processes, not threads."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(function, items)


def report(marker: str, text: str, figures: Any, wrong: list[str], args: Any) -> None:
    """Print, write what was asked for, and end the process. The marker and JAX's version name the part of the file."""
    print(text := f"jax {jax.__version__}, sm_90a\n\n{text}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1, default=vars))
    if args.write:
        name = f"{marker} {'.'.join(jax.__version__.split('.')[:2])}"
        start, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, rest = args.write.read_text().split(start)
        args.write.write_text(f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}")
    print("\n" + ("\n".join(wrong) if wrong else "All checks hold."))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
