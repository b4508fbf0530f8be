"""Time block shapes of the Mosaic sampling kernels on a GPU and print the table of pallas_kernels/block_shape.py.

    python bench/autotune.py [--rows 1 4 8 16 64 256] [--vocab 128256]

Of each number of rows the three fields are tried one after the other, the best kept: seven shapes instead of 27.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
from kernels_gpu import queued_ms, sampling_arguments

from pallas_kernels import BlockShape, top_k_top_p_sample
from pallas_kernels.block_shape import CHUNKS, PARTS, STATISTICS, block_shape

FIELDS = {"tiles": STATISTICS, "part": PARTS, "chunk": CHUNKS}


def time_shape(rows: int, vocab: int, shape: BlockShape) -> float:
    """Milliseconds."""
    sample = jax.jit(partial(top_k_top_p_sample, implementation="mosaic", block_shape=shape))
    calls = [partial(sample, *arguments) for arguments in sampling_arguments(rows, vocab)]
    return queued_ms(calls, jax.block_until_ready, 100)


def best_shape(start: BlockShape, measure: Callable[[BlockShape], float]) -> tuple[BlockShape, float]:
    """The shape that `measure` finds fastest, and its time: field by field from `start`."""
    times = {start: measure(start)}
    best = start
    for name, values in FIELDS.items():
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
    parser.add_argument("--vocab", type=int, default=128256)
    args = parser.parse_args()
    if jax.default_backend() not in ("gpu", "cuda"):
        print(f"autotune needs an NVIDIA GPU; JAX's backend is {jax.default_backend()!r}")
        return 2
    found = {}
    for rows in args.rows:
        found[rows], ms = best_shape(block_shape(rows), partial(time_shape, rows, args.vocab))
        print(f"{rows:4} x {args.vocab}: {ms:.3f} ms, {found[rows]}", flush=True)
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
