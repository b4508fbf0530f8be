"""Compile the engine's own 70B programs for 8 x H100 on a machine without a GPU, and check what comes out.

    python bench/aot_h100.py [--json FILE]          (needs the cuda12 extra: JAX's CUDA plugin, no driver, no GPU)

The programs are the ones the engine runs (jaxserve.step, models.llama), lowered with abstract arguments over eight
devices described by h100_sxm.txtpb. Printed and checked: bytes of arguments, temporaries and aliased (donated) buffers
of one device, and every collective with its bytes. The script fails when the KV pool or the batch is not updated in
place, when a temporary is as large as the KV pool, when a decode copies weights, or when logits are gathered.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve import batch
from jaxserve.config import make_buckets
from jaxserve.sampling.processor import ProcessorConfig
from jaxserve.sampling.registry import make_processors
from jaxserve.sampling.sampler import Sampler
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

LLAMA_3_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "eos_token_id": [128001, 128009], "bos_token_id": 128000,
}  # fmt: skip
SLOTS, CONTEXT, HISTORY, BLOCK = 64, 2350, 2560, 16
TILE, PREFILL_TILES = 128, 16
PAGES = -(-CONTEXT // BLOCK)
PROGRAMS: dict[str, tuple[Any, int, str]] = {  # key, drafts of a request, what it is
    "forward": (("forward", SLOTS, PAGES, 0), 0, "forward pass of a decode step"),
    "forward pages": (("forward", SLOTS, PAGES, 0), 0, "forward pass of a decode step, pages attended to in place"),
    "sample": (("sample", SLOTS, False, False, 0), 0, "sampling of a decode step"),
    "sample all": (("sample", SLOTS, True, False, 0), 0, "sampling with processors, penalties, thinking budget"),
    "verify": (("forward", SLOTS, PAGES, 3), 3, "forward pass with 3 drafts a request"),
    "verify pages": (("forward", SLOTS, PAGES, 3), 3, "the same, pages attended to in place"),
    "sample drafts": (
        ("sample", SLOTS, True, True, 3),
        3,
        "sampling and verification with 3 drafts a request, everything on, with grammars",
    ),
    "sample grammars": (("sample", SLOTS, False, True, 0), 0, "sampling with grammars"),
    "propose": (("propose", SLOTS, PAGES, 0, 3), 3, "n-gram proposals of 3 drafts a request"),
    "prefill": (("prefill", PREFILL_TILES, PAGES), 0, f"prefill of {TILE * PREFILL_TILES} tokens"),
    "score": (("score", PREFILL_TILES, PAGES), 0, "the same with log-probabilities of the prompt"),
}
SMALL = 4096  # bytes: XLA may give flags of one byte a slot a new buffer
COLLECTIVES = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
ITEMSIZE = {"pred": 1, "u8": 1, "s8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8}


def h100_mesh() -> Mesh:
    """Eight H100s in one host, as the compiler sees them."""
    target = (Path(__file__).parent / "h100_sxm.txtpb").read_text()
    topology = topologies.get_topology_desc("h100", platform="cuda", target_config=target, topology="1x1x8")
    return make_mesh(topology.devices)


def step_programs(mesh: Mesh, drafts: int, in_place: bool = False) -> StepPrograms:
    """The engine's programs at 64 requests with a context of 2350 tokens, over abstract values. in_place: the attention
    kernel reads the pages; else they are gathered."""
    model = Llama(ModelConfig.from_hf(LLAMA_3_70B), dtype="bfloat16", platform="gpu")
    if in_place:
        model = model.with_attention_implementation("mosaic", BLOCK)
    vocab, pages = model.vocab_size, -(-CONTEXT // BLOCK)
    config = ProcessorConfig(vocab, HISTORY, SLOTS, stop_token_ids=tuple(model.eos_token_ids))
    sampler = Sampler(vocab, make_processors((), config), Markers(start=(128002,), end=(128003,)))
    row = batch.empty_row(sampler.processors, sampler.max_listed)
    state = jax.eval_shape(lambda: batch.empty_batch(SLOTS, HISTORY, pages, drafts, row, vocab))
    whole, by_slot = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("tp"))
    state = replace(_placed(state, whole), use=_placed(state.use, by_slot))
    kv = model.kv_spec(1 + SLOTS * pages, BLOCK, mesh)
    proposer = NgramProposer(drafts, min_n=2, max_n=5) if drafts else None
    return StepPrograms(
        parts=Parts(model, sampler, mesh, proposer),
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


def lower(mesh: Mesh, name: str) -> tuple[jax.stages.Lowered, dict[str, int]]:
    """A program by its name in PROGRAMS, and the sizes on one device to compare it with."""
    key, drafts, _ = PROGRAMS[name]
    programs = step_programs(mesh, drafts, in_place=name.endswith("pages"))
    program = programs.program(key)
    updated = {"kv": 0, "batch": 0, "logits": SLOTS * (1 + drafts) * programs.parts.model.vocab_size * 4}
    if key[0] in ("sample", "propose"):
        use = _bytes(programs.state.use)
        updated["batch"] = _bytes(programs.state) - use + use // mesh.size
    else:
        updated["kv"] = _bytes(programs.cache) // mesh.size
    return program.jitted.lower(*program.args), updated


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def collectives(hlo: str) -> list[dict[str, Any]]:
    """The collectives of the optimized program: kind, result shape, bytes on one device, if in a loop, and how many."""
    found: Counter[tuple[str, str, int, bool]] = Counter()
    for line in hlo.splitlines():
        match = re.search(rf"= (.*?) ({COLLECTIVES})(?:-start)?\(", line)
        if match is None:
            continue
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        sizes = [ITEMSIZE[t] * math.prod(int(n) for n in dims.split(",") if n) for t, dims in shapes if t in ITEMSIZE]
        shape = " ".join(f"{t}[{dims}]" for t, dims in shapes[-1:])
        found[match[2], shape, max(sizes, default=0), "while/body" in line] += 1
    names = ("kind", "shape", "bytes", "in_loop")
    return [dict(zip(names, key, strict=True)) | {"count": count} for key, count in found.items()]


def measure(mesh: Mesh, name: str) -> dict[str, Any]:
    """Compile and read off the figures."""
    started = time.perf_counter()
    lowered, sizes = lower(mesh, name)
    compiled = lowered.compile()
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    return {
        "name": name,
        "jax": jax.__version__,
        "seconds": time.perf_counter() - started,
        "argument": memory.argument_size_in_bytes,
        "temp": memory.temp_size_in_bytes,
        "alias": memory.alias_size_in_bytes,
        "sizes": sizes,
        "collectives": collectives(hlo),
        "copied": copied_weights(hlo),
        "kernels": sorted(set(re.findall(r'custom_call_target="([^"]+)"', hlo))),
    }


def check(m: dict[str, Any]) -> list[str]:
    """What is wrong with a program; empty when nothing is."""
    sizes, wrong = m["sizes"], []
    state = sizes["kv"] + sizes["batch"]
    if m["alias"] < state - SMALL:
        wrong.append(f"aliased {m['alias']} bytes, what it updates has {state}: not in place")
    if sizes["kv"] and m["temp"] >= sizes["kv"]:
        wrong.append(f"temporaries take {m['temp']} bytes, as much as the KV pool ({sizes['kv']})")
    if gathered := [c for c in m["collectives"] if c["kind"] == "all-gather" and c["bytes"] * 8 >= sizes["logits"]]:
        wrong.append(f"logits-sized all-gather: {gathered}")
    found = [c for c in m["collectives"] if c["kind"] == "all-to-all" and not c["in_loop"]]
    exchanged = [(c["bytes"] * 8, c["count"]) for c in found]
    if exchanged != ([(sizes["logits"], 1)] if m["name"].startswith("sample") else []):
        wrong.append(f"expected one all-to-all of all logits ({sizes['logits']} bytes) in sampling, found {exchanged}")
    if m["name"].startswith(("forward", "verify")) and m["copied"]:
        wrong.append(f"weights are copied before they are used: {m['copied']}")
    return wrong


def copied_weights(hlo: str) -> list[str]:
    """Shapes of copies and slices of eight million elements and more, as large as a layer's smallest projection."""
    operations = re.findall(r"= \w+\[([\d,]+)\]\S* (copy|dynamic-slice)\(", hlo)
    return sorted({dims for dims, _ in operations if math.prod(map(int, dims.split(","))) >= 8 << 20})


def show(m: dict[str, Any]) -> None:
    print(
        f"\nLlama-3-70B {PROGRAMS[m['name']][2]}, TP = 8, {SLOTS} requests x {CONTEXT} tokens, bf16\n"
        f"jax {m['jax']}, compiled in {m['seconds']:.1f} s; bytes of one device"
    )
    for name in ("argument", "temp", "alias"):
        print(f"  {name:<48}{m[name] / 1e6:>10.1f} MB")
    for name, text in (("kv", "KV pool"), ("batch", "batch state"), ("logits", "all logits, on no device")):
        print(f"  {text:<48}{m['sizes'][name] / 1e6:>10.1f} MB")
    for kernel in m["kernels"]:
        print(f"  kernel {kernel}")
    for c in m["collectives"]:
        where = "in a loop" if c["in_loop"] else ""
        print(f"  {c['count']:>4} x {c['kind']:<16}{c['shape']:<25}{where:<10}{c['bytes'] / 1e6:>10.3f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    mesh = h100_mesh()
    measured = [measure(mesh, name) for name in PROGRAMS]
    for m in measured:
        show(m)
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1))
    wrong = [f"{m['name']}: {w}" for m in measured for w in check(m)]
    print("\n" + ("\n".join(wrong) if wrong else "All checks hold."))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
