"""Time block shapes of the Mosaic kernels on a GPU, for the table and the rule of pallas_kernels/block_shape.py.

    python bench/autotune.py [--rows 1 4 8 16 64 256] [--slots 16 64] [--vocab 128256] [--requests 1 8 64] [--keys 2352]

The fields of a shape are tried one after the other, the best kept: of sampling seven shapes instead of 27. Verification
of S slots has the table's shape for S (1 + K) rows: what is best for it is printed beside that one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
from kernels_gpu import DRAFTS, attending_arguments, queued_ms, sampling_arguments, verify, verifying_arguments

from pallas_kernels import AttentionShape, BlockShape, paged_attention, top_k_top_p_sample
from pallas_kernels.block_shape import CHUNKS, PARTS, STATISTICS, attention_shape, block_shape
from pallas_kernels.mosaic.attention import TILE

FIELDS: dict[type, dict[str, tuple[int, ...]]] = {
    BlockShape: {"tiles": STATISTICS, "part": PARTS, "chunk": CHUNKS},
    AttentionShape: {"splits": (1, 2, 4, 8, 16, 32), "stages": (2, 3, 4)},
}
Shape = TypeVar("Shape", BlockShape, AttentionShape)


def time_shape(function: Callable[..., Any], arguments: list[tuple[Any, ...]], shape: Any) -> float:
    """Milliseconds."""
    compiled = jax.jit(partial(function, implementation="mosaic", block_shape=shape))
    return queued_ms([partial(compiled, *a) for a in arguments], jax.block_until_ready, 100)


def best_shape(start: Shape, measure: Callable[[Shape], float]) -> tuple[Shape, float]:
    """The shape that `measure` finds fastest, and its time: field by field from `start`."""
    times = {start: measure(start)}
    best = start
    for name, values in FIELDS[type(start)].items():
        for value in values:
            shape = replace(best, **{name: value})
            if shape not in times:
                times[shape] = measure(shape)
        best = min(times, key=lambda shape: times[shape])
    return best, times[best]


def table(found: dict[int, BlockShape]) -> str:
    """As Python: a pair of the largest number of rows and its shape for each run of rows with one shape."""
    pairs: list[tuple[int, BlockShape]] = []
    for rows, shape in sorted(found.items()):
        if pairs and pairs[-1][1] == shape:
            pairs.pop()
        pairs.append((rows, shape))
    return "_TABLE = (" + "".join(f"({rows}, {shape}), " for rows, shape in pairs).rstrip() + ")"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 64, 256])
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64], help=f"of {DRAFTS} drafts")
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--keys", type=int, default=2352, help="of a request")
    args = parser.parse_args()
    if jax.default_backend() not in ("gpu", "cuda"):
        print(f"autotune needs an NVIDIA GPU; JAX's backend is {jax.default_backend()!r}")
        return 2
    found = {}
    for rows in args.rows:
        measure = partial(time_shape, top_k_top_p_sample, list(sampling_arguments(rows, args.vocab)))
        found[rows], ms = best_shape(block_shape(rows), measure)
        print(f"{rows:4} x {args.vocab}: {ms:.3f} ms, {found[rows]}", flush=True)
    print(table(found))
    for slots in args.slots:
        arguments, rule = list(verifying_arguments(slots, args.vocab)), block_shape(slots * (1 + DRAFTS))
        for kind in ("standard", "block with q"):  # the fewest kernels, and all of them
            best, ms = best_shape(rule, partial(time_shape, partial(verify, kind), arguments))
            print(f"{slots:4} slots x {args.vocab}, {kind}: {ms:.3f} ms, {best}; by the table {rule}", flush=True)
    for requests in args.requests:  # a decode with one KV head
        split = attention_shape(requests, -(-args.keys // TILE))
        problem = list(attending_arguments(requests, 1, args.keys, 1))
        fastest, ms = best_shape(split, partial(time_shape, paged_attention, problem))
        print(f"{requests:4} x {args.keys} keys: {ms:.3f} ms, {fastest}; by the rule {split}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
