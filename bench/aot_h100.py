"""Compile the engine's own 70B programs for 8 x H100 on a machine without a GPU, and check what comes out.

    python bench/aot_h100.py [--write docs/h100.md] [--json FILE] [--only NAME] [--jobs N]

Needs the cuda12 extra: JAX's CUDA plugin, no driver, no GPU. The programs are the ones the engine runs (jaxserve.step,
last_step, models.llama) and the samplers of pallas_kernels.sharded, lowered with abstract arguments over eight devices
described by h100_sxm.txtpb; and, for one device, what the engine does to logits before it draws. Printed and checked:
bytes of arguments, temporaries and aliased (donated) buffers of one device, arrays as large as its logits, kernels, and
every collective with its bytes. The script fails when the KV pool or the batch is not updated in place, when
temporaries are as large as the KV pool, when a decode copies weights, when logits are exchanged twice or gathered, and
when a program writes more arrays or starts other kernels than is said here.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import aot_kernels as aot  # before JAX, for it sets the environment
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve import batch
from jaxserve.config import make_buckets
from jaxserve.sampling import sampler
from jaxserve.sampling.processor import ProcessorConfig
from jaxserve.sampling.registry import make_processors
from jaxserve.sampling.sampler import Sampler, Window
from jaxserve.sampling.thinking import Markers
from jaxserve.speculative.ngram import NgramProposer
from jaxserve.step import Cache, Parts, Weights
from jaxserve.step_programs import StepPrograms
from jaxserve.structured.config import StructuredOutputsConfig
from jaxserve.structured.device import Grammars
from models import ModelConfig
from models.llama import Llama
from models.params import abstract_params
from models.sharding import make_mesh
from pallas_kernels import rejection_sample
from pallas_kernels.sharded import sample_by_rows, sample_by_vocabulary

LLAMA_3_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "eos_token_id": [128001, 128009], "bos_token_id": 128000,
}  # fmt: skip
VOCAB, DEVICES = 128256, 8
SLOTS, CONTEXT, HISTORY, BLOCK = 64, 2350, 2560, 16
TILE, PREFILL_TILES = 128, 16
PAGES = -(-CONTEXT // BLOCK)
SMALL = 4096  # bytes: XLA may give flags of one byte a slot a new buffer
COLLECTIVES = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"


class Plan(NamedTuple):
    """text: what it is. key: of StepPrograms; None for a function of pallas_kernels.sharded. drafts: of a request.
    arrays: as large as a device's logits that it may write, None where that says nothing. mosaic: kernels are named, of
    attention and of sampling; calls: which of them it starts. drawn: drafts are judged by what they were drawn from, by
    block verification. rows: of logits, without the drafts."""

    text: str
    key: tuple[Any, ...] | None
    drafts: int = 0
    arrays: int | None = None
    mosaic: bool = False
    calls: tuple[str, ...] = ()
    drawn: bool = False
    rows: int = SLOTS

    @property
    def samples(self) -> str:
        """Whether logits are dealt out by "rows" or stay split by "vocabulary"; "" where nothing is sampled."""
        if self.key is None:
            return "rows" if self.mosaic else "vocabulary"
        return "rows" if self.key[0] == "sample" else ""


ATTEND, DRAW, JUDGE = ("attend",) * 80, ("statistics", "sample"), ("statistics", "weigh") * 2 + ("residual",) * 2
FORWARD, VERIFY = ("forward", SLOTS, PAGES, 0), ("forward", SLOTS, PAGES, 3)
PROGRAMS = {
    "forward": Plan("forward pass of a decode", FORWARD),
    "forward pages": Plan("the same, pages attended to in place", FORWARD, mosaic=True, calls=ATTEND),
    "verify": Plan("forward pass with 3 drafts each", VERIFY, 3),
    "verify pages": Plan("the same, pages attended to in place", VERIFY, 3, mosaic=True, calls=ATTEND),
    "prefill": Plan(f"prefill of {TILE * PREFILL_TILES} tokens", ("prefill", PREFILL_TILES, PAGES)),
    "score": Plan("the same with log-probabilities of the prompt", ("score", PREFILL_TILES, PAGES)),
    "propose": Plan("n-gram proposals of 3 drafts each", ("propose", SLOTS, PAGES, 0, 3), 3),
    "sample": Plan("sampling", ("sample", SLOTS, False, False, 0), arrays=10),
    "sample grammars": Plan("sampling with grammars", ("sample", SLOTS, False, True, 0), arrays=10),
    "sample all": Plan("sampling, everything on", ("sample", SLOTS, True, False, 0), arrays=15),
    "sample drafts": Plan("verification of 3 drafts each, everything on", ("sample", SLOTS, True, True, 3), 3, 18),
    "sample mosaic": Plan("sampling, Mosaic", ("sample", SLOTS, False, False, 0), 0, 7, True, DRAW),
    "sample drafts mosaic": Plan(
        "verification of 3 drafts each, everything on, Mosaic", ("sample", SLOTS, True, True, 3), 3, 14, True, DRAW
    ),
    "sample block mosaic": Plan(
        "block verification of 3 drawn drafts each, Mosaic", ("sample", SLOTS, False, False, 3), 3, 6, True, JUDGE, True
    ),
    "sample by rows mosaic": Plan("sharded.sample_by_rows, 64 rows, Mosaic", None, 0, 3, True, DRAW),
    "vocabulary 64": Plan("sharded.sample_by_vocabulary, 64 rows", None, arrays=11),
    "vocabulary 4": Plan("sharded.sample_by_vocabulary, 4 rows", None, arrays=20, rows=4),
}


def h100_mesh() -> Mesh:
    """Eight H100s in one host, as the compiler sees them."""
    target = (Path(__file__).parent / "h100_sxm.txtpb").read_text()
    topology = topologies.get_topology_desc("h100", platform="cuda", target_config=target, topology=f"1x1x{DEVICES}")
    return make_mesh(topology.devices)


def step_programs(mesh: Mesh, plan: Plan) -> StepPrograms:
    """The engine's programs at 64 requests with a context of 2350 tokens, over abstract values."""
    model = Llama(ModelConfig.from_hf(LLAMA_3_70B), dtype="bfloat16", platform="gpu")
    if plan.mosaic:
        model = model.with_attention_implementation("mosaic", BLOCK)
    vocab, drafts = model.vocab_size, plan.drafts
    config = ProcessorConfig(vocab, HISTORY, SLOTS, stop_token_ids=tuple(model.eos_token_ids))
    made = Sampler(
        vocab,
        make_processors((), config),
        Markers(start=(128002,), end=(128003,)),
        method="block" if plan.drawn else "coupled",
        implementation="mosaic" if plan.mosaic else None,
    )
    row = batch.empty_row(made.processors, made.max_listed)
    state = jax.eval_shape(lambda: batch.empty_batch(SLOTS, HISTORY, PAGES, drafts, row, vocab, plan.drawn))
    whole, by_slot = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("tp"))
    own = _placed((state.use, state.draft_logits), by_slot)
    state = replace(_placed(state, whole), use=own[0], draft_logits=own[1])
    kv = model.kv_spec(1 + SLOTS * PAGES, BLOCK, mesh)
    proposer = NgramProposer(drafts, min_n=2, max_n=5) if drafts else None
    return StepPrograms(
        parts=Parts(model, made, mesh, proposer),
        buckets=make_buckets(SLOTS, CONTEXT, TILE * PREFILL_TILES + SLOTS, BLOCK, TILE, mesh.size),
        weights=Weights(abstract_params(model.specs(), mesh), {}),
        cache=Cache(kv=kv, boundary=None, draft_kv=None, block_size=BLOCK),
        state=state,
        draft_counts=(drafts,),
        grammars=_placed(_grammars(vocab, drafts), whole),
    )


def _grammars(vocab: int, drafts: int) -> Grammars:
    words = -(-vocab // 32)
    arena = jax.ShapeDtypeStruct((StructuredOutputsConfig().pool_bytes // 4,), jnp.uint32)
    return Grammars(arena, jax.ShapeDtypeStruct((SLOTS, 1 + drafts, words), jnp.uint32))


def _placed(tree: Any, where: NamedSharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def lower(mesh: Mesh, plan: Plan) -> tuple[jax.stages.Lowered, dict[str, int]]:
    """A program, and the sizes on one device to compare it with; logits: of all devices together."""
    sizes = {"kv": 0, "batch": 0, "logits": 4 * plan.rows * (1 + plan.drafts) * VOCAB}
    if plan.key is None:
        return lower_sharded(mesh, plan), sizes
    # A sampler interprets its kernels where JAX's backend is a CPU, as it is here; the engine it is for has GPUs.
    with mock.patch.object(sampler, "rejection_sample", partial(rejection_sample, interpret=False)):
        programs = step_programs(mesh, plan)
        program = programs.program(plan.key)
        lowered = program.jitted.lower(*program.args)
    if plan.key[0] in ("sample", "propose"):
        own = _bytes((programs.state.use, programs.state.draft_logits))
        sizes["batch"] = _bytes(programs.state) - own + own // mesh.size
    else:
        sizes["kv"] = _bytes(programs.cache) // mesh.size
    return lowered, sizes


def lower_sharded(mesh: Mesh, plan: Plan) -> jax.stages.Lowered:
    """The package's own ways to sample over a mesh. By vocabulary there is no kernel, whatever its implementation."""
    logits, *rest = aot.sample_arguments(plan.rows, VOCAB)
    valid = jax.ShapeDtypeStruct((plan.rows,), jnp.bool_)
    split, whole = NamedSharding(mesh, PartitionSpec(None, "tp")), NamedSharding(mesh, PartitionSpec())
    arguments = _placed(logits, split), *_placed((*rest, valid), whole)
    function = partial(sample_by_vocabulary, mesh, "tp")
    if plan.mosaic:
        function = partial(sample_by_rows, mesh, "tp", implementation="mosaic", interpret=False)
    return jax.jit(function).lower(*arguments)


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def preparation(
    name: str, plan: int, room: float, k: int = 0, grammar: bool = False, everything: bool = False
) -> aot.Case:
    """What the engine does to logits before they are drawn from (`Sampler.prepare`), 64 slots of k drafts each.

    grammar: with masks. everything: with all processors and a thinking budget. plan, room: as of aot_kernels.Program.
    """
    processors = make_processors((), ProcessorConfig(VOCAB, HISTORY, SLOTS, stop_token_ids=(128001,)))
    made = Sampler(VOCAB)
    if everything:
        made = Sampler(VOCAB, processors, Markers(start=(128002,), end=(128003,)))
    row = batch.empty_row(made.processors, made.max_listed)
    state = jax.eval_shape(lambda: batch.empty_batch(SLOTS, HISTORY, PAGES, k, row, VOCAB))
    used = jax.ShapeDtypeStruct((SLOTS, 1 + k), jnp.bool_)
    allowed = _grammars(VOCAB, k).host_masks if grammar else None
    window = Window(state.rows, state.tokens, state.drafts, used, state.section, allowed)
    logits = jax.ShapeDtypeStruct((SLOTS, 1 + k, VOCAB), jnp.float32)

    def prepare(logits: Any, window: Window, use: Any) -> Any:
        return made.prepare(logits, window, use, shaped=name != "grammar mask").final

    name = f"{name}{f', {k} drafts each' * bool(k)}"
    program = aot.Program(name, 4 * SLOTS * (1 + k) * VOCAB, plan, room)
    return program, prepare, (logits, window, state.use)


PREPARATIONS = (
    partial(preparation, "penalties", 1, 0.1),
    partial(preparation, "penalties", 2, 0.1, k=3),
    partial(preparation, "grammar mask", 1, 0.1, grammar=True),
    partial(preparation, "grammar mask and penalties", 4, 1.1, grammar=True),
    partial(preparation, "everything", 8, 2.1, grammar=True, everything=True),
)


def collectives(hlo: str) -> list[dict[str, Any]]:
    """The collectives of the optimized program: kind, largest result, bytes of all results on one device, if in a loop,
    and how many."""
    found: Counter[tuple[str, str, int, bool]] = Counter()
    all_ = aot.computations(hlo)
    loops = run_by(all_, "while")
    for name, instructions in all_.items():
        for instruction in instructions:
            match = re.fullmatch(rf"({COLLECTIVES})(?:-done)?", instruction.operation)
            if match is None:
                continue
            shape, _ = max(instruction.arrays, key=lambda array: array[1])
            found[match[1], shape, sum(bytes_ for _, bytes_ in instruction.arrays), name in loops] += 1
    names = ("kind", "shape", "bytes", "in_loop")
    return [dict(zip(names, key, strict=True)) | {"count": count} for key, count in found.items()]


def run_by(all_: dict[str, list[aot.Instruction]], operation: str) -> set[str]:
    """The computations that instructions of this kind run, and all that these run."""
    runs = ("body", "condition", "to_apply", "calls", "branch_computations", "true_computation", "false_computation")
    found: set[str] = set()
    waiting = [name for all_of in all_.values() for i in all_of if i.operation == operation for name in i.called(*runs)]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += [other for i in all_.get(name, ()) for other in i.called(*runs)]
    return found


def measure(name: str) -> dict[str, Any]:
    """Compile and read off the figures."""
    plan, started = PROGRAMS[name], time.perf_counter()
    lowered, sizes = lower(h100_mesh(), plan)
    compiled = lowered.compile()
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    return {
        "name": name,
        "text": plan.text,
        "jax": jax.__version__,
        "seconds": time.perf_counter() - started,
        "argument": memory.argument_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "sizes": sizes,
        "arrays": aot.copies(hlo, sizes["logits"] // DEVICES),
        "collectives": collectives(hlo),
        "copied": copied_weights(hlo),
        "kernels": aot.started_kernels(hlo),
        "libraries": sorted(set(re.findall(r'custom_call_target="((?!mosaic)[^"]+)"', hlo))),
    }


def copied_weights(hlo: str) -> list[str]:
    """Shapes of copies and slices of eight million elements and more, as large as a layer's smallest projection."""
    operations = re.findall(r"= \w+\[([\d,]+)\]\S* (copy|dynamic-slice)\(", hlo)
    return sorted({dims for dims, _ in operations if math.prod(map(int, dims.split(","))) >= 8 << 20})


def check(m: dict[str, Any]) -> list[str]:
    """What is wrong with a program; empty when nothing is."""
    plan, sizes = PROGRAMS[m["name"]], m["sizes"]
    rows, state, logits = plan.rows * (1 + plan.drafts), sizes["kv"] + sizes["batch"], sizes["logits"]
    wrong = aot.check_kernels(m["kernels"], plan.calls, loads=16 if rows <= 16 * DEVICES else 32)
    if m["alias"] < state - SMALL:
        wrong.append(f"aliased {m['alias']} bytes, what it updates has {state}: not in place")
    if sizes["kv"] and m["temp"] >= sizes["kv"]:
        wrong.append(f"temporaries take {m['temp']} bytes, as much as the KV pool ({sizes['kv']})")
    if plan.arrays is not None and m["arrays"] > plan.arrays:
        wrong.append(f"{m['arrays']} arrays of the size of its logits are written, more than {plan.arrays}")
    exchanges = [c for c in m["collectives"] if c["kind"] == "all-to-all"]
    exchanged = [(c["bytes"] * DEVICES, c["count"]) for c in exchanges if not c["in_loop"]]  # a loop scores prompts
    if exchanged != [(logits, 1)] * (plan.samples == "rows"):
        wrong.append(f"logits of {logits} bytes are exchanged once if they are dealt out by rows; found {exchanged}")
    # Candidates and sums of tiles are 4 KB a row, 64 times less than a device's part of it.
    limit = 4096 * rows if plan.samples == "vocabulary" else logits // 1000
    rest = [c for c in m["collectives"] if c not in exchanges and c["bytes"] != activations(plan)]
    if large := [c for c in rest if c["bytes"] > limit]:
        wrong.append(f"collectives of more than {limit} bytes: {large}")
    if m["name"].startswith(("forward", "verify")) and m["copied"]:
        wrong.append(f"weights are copied before they are used: {m['copied']}")
    return [f"{m['name']}: {w}" for w in wrong]


def activations(plan: Plan) -> int:
    """Bytes of what a layer's projections leave on every device to be summed; 0 where the model does not run."""
    kind = "" if plan.key is None else plan.key[0]
    tokens = {"forward": plan.rows * (1 + plan.drafts), "prefill": TILE * PREFILL_TILES, "score": TILE * PREFILL_TILES}
    return 2 * LLAMA_3_70B["hidden_size"] * tokens.get(kind, 0)


def table(measured: list[dict[str, Any]]) -> str:
    lines = ["| program | arguments, MB | temporaries, MB | donated in place, MB | arrays | kernels | collectives |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for m in measured:
        plan = PROGRAMS[m["name"]]
        kernels = [f"{n} x {name}" for name, n in Counter(k.name for k in m["kernels"]).items()]
        kernels += ["cuDNN attention"] * any("fmha" in name for name in m["libraries"])
        figures = " | ".join(f"{m[name] / 1e6:.1f}" for name in ("argument", "temp", "alias"))
        cells = [plan.text, figures, str(m["arrays"]) if plan.samples else "", ", ".join(kernels), exchanged(m)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def exchanged(m: dict[str, Any]) -> str:
    """The collectives, largest first; those under 2 KB together."""
    large = sorted((c for c in m["collectives"] if c["bytes"] >= 2000), key=lambda c: -c["bytes"])
    text = [f"{c['count']} {c['kind']} {c['bytes'] / 1e3:.0f} kB{' in a loop' * c['in_loop']}" for c in large]
    if small := [c for c in m["collectives"] if c["bytes"] < 2000]:
        text.append(f"{sum(c['count'] for c in small)} of {max(c['bytes'] for c in small)} bytes and less")
    return ", ".join(text)


def main() -> None:
    args = aot.arguments(__doc__)
    names = [name for name in PROGRAMS if args.only in name]
    measured = list(aot.in_processes(measure, names, args.jobs))
    prepared = [aot.measure(make())[0] for make in PREPARATIONS] if args.only in "preparations" else []
    text = f"{table(measured)}\n\n{aot.kernel_table([(m['text'], m['kernels']) for m in measured])}"
    text += f"\n\n{aot.program_table(prepared)}"
    wrong = [w for m in measured for w in check(m)] + [w for p in prepared for w in aot.check(p)]
    aot.report("8 x H100, jax", text, {"programs": measured, "prepared": prepared}, wrong, args)


if __name__ == "__main__":
    main()
