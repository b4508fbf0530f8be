"""Time of the step from logits to tokens, beside PyTorch's sort-based path in the same run.

    python bench/sampling.py [--rows 1 8 32 64] [--vocab 32000 49152 128256]

One call on normal logits (scaled by --spread: smaller is flatter, and leaves more rows to the exact fallback). floor:
one read of the logits, by a sum over them. torch: sort, cumulative sum, mask, softmax, exponential race, in
float32, on the same threads; left out where torch is not installed (extra oracle).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sampling.sampler import SamplingRows, sample
from pallas_kernels import Filters

KINDS = {  # temperature, top_k, top_p
    "greedy": (0.0, 0, 1.0),
    "temperature": (1.0, 0, 1.0),
    "top_k 50": (1.0, 50, 1.0),
    "top_p 0.9": (1.0, 0, 0.9),
    "both": (1.0, 50, 0.9),
}


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    call()
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples) * 1e3


def sampling_rows(count: int, temperature: float, top_k: int, top_p: float) -> SamplingRows:
    return SamplingRows(
        filters=Filters(
            temperature=jnp.full(count, temperature),
            min_p=jnp.zeros(count),
            top_k=jnp.full(count, top_k, jnp.int32),
            top_p=jnp.full(count, top_p),
        ),
        seed=jnp.zeros((count, 2), jnp.uint32),
        position=jnp.arange(count, dtype=jnp.int32),
        want_logprob=jnp.zeros(count, bool),
        valid=jnp.ones(count, bool),
    )


def torch_sample(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> Callable[[], Any] | None:
    """The usual way in PyTorch; None without it."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    x = torch.from_numpy(logits.copy())

    def call() -> torch.Tensor:
        if temperature == 0:
            return x.argmax(-1)
        z = x / temperature
        if top_k or top_p < 1:
            values, ids = z.sort(dim=-1)
            if top_k:
                values = values.masked_fill(values < values[:, -top_k, None], -torch.inf)
            if top_p < 1:
                dropped = values.softmax(-1).cumsum(-1) <= 1 - top_p
                dropped[:, -1] = False
                values = values.masked_fill(dropped, -torch.inf)
            z = torch.empty_like(values).scatter_(-1, ids, values)
        return (z.softmax(-1) / torch.empty_like(z).exponential_(1)).argmax(-1)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 128256])
    parser.add_argument("--spread", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    step, total = jax.jit(sample), jax.jit(lambda x: x.sum(axis=1))
    print(f"ms a call, median of {args.repeats}, {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'V':>7}{'rows':>6}  {'':<13}{'jaxserve':>9}{'MB':>7}{'floor':>8}{'torch':>9}{'torch / jaxserve':>18}")
    for vocab in args.vocab:
        for count in args.rows:
            logits = np.random.default_rng(0).normal(0, args.spread, (count, vocab)).astype(np.float32)
            x = jnp.asarray(logits)
            floor = median_ms(lambda x=x: total(x).block_until_ready(), args.repeats)
            for name, (temperature, top_k, top_p) in KINDS.items():
                rows = sampling_rows(count, temperature, top_k, top_p)
                ours = median_ms(lambda x=x, rows=rows: jax.block_until_ready(step(x, rows)), args.repeats)
                line = f"{vocab:>7}{count:>6}  {name:<13}{ours:>9.2f}{x.nbytes / 1e6:>7.1f}{floor:>8.2f}"
                if peer := torch_sample(logits, temperature, top_k, top_p):
                    theirs = median_ms(peer, args.repeats)
                    line += f"{theirs:>9.1f}{theirs / ours:>18.1f}"
                print(line, flush=True)


if __name__ == "__main__":
    main()
