"""Time of the step from logits to tokens, beside PyTorch's usual way in the same run.

    python bench/sampling.py [--rows 1 8 64 256] [--vocab 32000 128256] [--json FILE] [--plot FILE.png]

One call on normal logits (scaled by --spread: smaller is flatter, and leaves more rows to the exact fallback).

MB: what has to be read, once: the logits, and for penalties the counts and the bits of the prompt. floor: one read of
the logits, by a sum over them, on the same threads. torch: sort, cumulative sum, mask, softmax, exponential race;
penalties from int64 histograms of prompt and output that are counted anew; with seeds one generator a row. float32.
Left out where torch is not installed (extra oracle). "penalties" is that operation alone; "everything" is sampling with
top_k, top_p, min_p, penalties, logit_bias, bad words, min_tokens, allowed ids and a seed in every row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import SamplingParams
from jaxserve.batch import empty_row
from jaxserve.sampling.penalties import Penalties, TokenUse, penalize
from jaxserve.sampling.processor import ProcessorConfig
from jaxserve.sampling.registry import make_processors
from jaxserve.sampling.sampler import Sampler, Window
from pallas_kernels import Filters

PROMPT, OUTPUT = 512, 256  # tokens in a history
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "  and seeds": {"temperature": 1.0, "seeded": True},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top_k, top_p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "penalties": {"penalties": True},
    "everything": {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "penalties": True, "all": True,
                   "seeded": True},
}  # fmt: skip


class Tokenizer:
    """As many words as a bad word has tokens."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [7 + i for i, _ in enumerate(text.split())]


def median_ms(call: Callable[[], Any], repeats: int, budget_s: float = 8.0) -> float:
    """Of up to `repeats` calls, fewer where they would take longer than the budget; one to warm up."""
    call()
    samples: list[float] = []
    while len(samples) < repeats and (len(samples) < 3 or sum(samples) < budget_s):
        started = time.perf_counter()
        call()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples) * 1e3


def ours(logits: np.ndarray, history: np.ndarray, kind: dict[str, Any]) -> Callable[[], Any]:
    count, vocab = logits.shape
    config = ProcessorConfig(vocab, 4096, count, tokenizer=Tokenizer(), stop_token_ids=(2,))
    sampler = Sampler(vocab, make_processors((), config))
    params = SamplingParams()
    if kind.get("all"):
        params = SamplingParams(
            logit_bias={i: 0.5 for i in range(100, 200)},
            bad_words=["a b c", "d e"],
            min_tokens=8,
            max_tokens=64,
            allowed_token_ids=list(range(vocab - 100)),
        )
    rows = [p.row(params) for p in sampler.processors]
    row = replace(
        empty_row(sampler.processors, sampler.max_listed),
        num_tokens=np.int32(PROMPT + OUTPUT),
        prompt_len=np.int32(PROMPT),
        filters=Filters(
            np.float32(kind.get("temperature", 0)),
            np.float32(kind.get("min_p", 0)),
            np.int32(kind.get("top_k", 0)),
            np.float32(kind.get("top_p", 1)),
        ),
        penalties=Penalties(*map(np.float32, (1.1, 0.1, 0.1) if kind.get("penalties") else (1, 0, 0))),
        processors=tuple(p.empty_row() if r is None else r for p, r in zip(sampler.processors, rows, strict=True)),
    )
    table = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *np.shape(x))), row)
    seeds = np.arange(2 * count, dtype=np.uint32).reshape(count, 2) if kind.get("seeded") else np.zeros((count, 2))
    window = Window(
        replace(table, seed=jnp.asarray(seeds, jnp.uint32)),
        jnp.asarray(history),
        jnp.full((count, 0), -1, jnp.int32),
        jnp.ones((count, 1), bool),
        jnp.full(count, -1, jnp.int32),
    )
    use = token_use(history, vocab)
    x = jnp.asarray(logits)[:, None]
    if "temperature" not in kind:
        run = jax.jit(lambda x, w, u: penalize(x, w.rows.penalties, u, w.drafts))
    else:
        shaped = bool(kind.get("penalties") or kind.get("all"))
        run = jax.jit(lambda x, w, u: sampler.verify(x, w, u, shaped=shaped).tokens)
    return lambda: jax.block_until_ready(run(x, window, use))


def token_use(history: np.ndarray, vocab: int) -> TokenUse:
    counts = np.stack([np.bincount(row[PROMPT:], minlength=vocab) for row in history]).astype(np.uint16)
    seen = np.stack([np.bincount(row[:PROMPT], minlength=-(-vocab // 32) * 32) > 0 for row in history])
    return TokenUse(jnp.asarray(counts), jnp.asarray(np.packbits(seen, axis=1, bitorder="little").view(np.uint32)))


def torchs(logits: np.ndarray, history: np.ndarray, kind: dict[str, Any]) -> Callable[[], Any] | None:
    """The usual way in PyTorch; None without it."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    x, ids = torch.from_numpy(logits.copy()), torch.from_numpy(history.astype(np.int64))
    count, vocab = x.shape
    top_k, top_p, min_p = kind.get("top_k", 0), kind.get("top_p", 1.0), kind.get("min_p", 0.0)
    generators = [torch.Generator().manual_seed(i) for i in range(count)]

    def histogram(ids: torch.Tensor) -> torch.Tensor:
        bins = torch.zeros((count, vocab + 1), dtype=torch.int64)
        return bins.scatter_add_(1, ids, torch.ones_like(ids))[:, :vocab]

    def penalized(z: torch.Tensor) -> torch.Tensor:
        prompt, output = histogram(ids[:, :PROMPT]) > 0, histogram(ids[:, PROMPT:])
        factor = torch.where(prompt | (output > 0), 1.1, 1.0)
        z = z * torch.where(z > 0, 1 / factor, factor)
        return z - 0.1 * output - 0.1 * (output > 0)

    def filtered(z: torch.Tensor) -> torch.Tensor:
        if min_p:
            probs = z.softmax(-1)
            z = z.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
        if not top_k and top_p >= 1:
            return z
        values, order = z.sort(dim=-1)
        if top_k:
            values = values.masked_fill(values < values[:, -top_k, None], -torch.inf)
        if top_p < 1:
            dropped = values.softmax(-1).cumsum(-1) <= 1 - top_p
            dropped[:, -1] = False
            values = values.masked_fill(dropped, -torch.inf)
        return torch.empty_like(values).scatter_(-1, order, values)

    def race(z: torch.Tensor) -> torch.Tensor:
        q = torch.empty_like(z)
        if kind.get("seeded"):
            for row, generator in zip(q, generators, strict=True):
                row.exponential_(generator=generator)
        else:
            q.exponential_()
        return (z.softmax(-1) / q).argmax(-1)

    def call() -> torch.Tensor:
        z = x
        if kind.get("all"):
            z = z.clone()
            z[:, 100:200] += 0.5
            z[:, -100:] = -torch.inf
            z[:, 2] = -torch.inf
        if kind.get("penalties"):
            z = penalized(z)
        if "temperature" not in kind:
            return z
        if kind["temperature"] == 0:
            return z.argmax(-1)
        return race(filtered(z / kind["temperature"]))

    return call


def megabytes(kind: dict[str, Any], rows: int, vocab: int) -> float:
    return rows * vocab * (4 + (2 + 1 / 8 if kind.get("penalties") else 0)) / 1e6


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Milliseconds against rows, a panel for each vocabulary; ours drawn through, torch's dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    vocabs = sorted({r["vocab"] for r in results})
    figure, panels = plt.subplots(1, len(vocabs), figsize=(6 * len(vocabs), 4.5), sharey=True, squeeze=False)
    for panel, vocab in zip(panels[0], vocabs, strict=True):
        for color, name in enumerate(("greedy", "temperature", "top_k, top_p", "penalties", "everything")):
            points = [r for r in results if (r["vocab"], r["kind"]) == (vocab, name)]
            rows = [r["rows"] for r in points]
            panel.loglog(rows, [r["ms"] for r in points], "o-", color=f"C{color}", label=name)
            if all("torch_ms" in r for r in points):
                panel.loglog(rows, [r["torch_ms"] for r in points], "--", color=f"C{color}", alpha=0.6)
        panel.set(title=f"V = {vocab}", xlabel="rows", xticks=rows, xticklabels=rows)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("ms a call (dashed: torch)")
    panels[0][-1].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 128256])
    parser.add_argument("--spread", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them (needs matplotlib, extra bench)")
    args = parser.parse_args()

    total = jax.jit(lambda x: x.sum(axis=1))
    results: list[dict[str, Any]] = []
    print(f"ms a call, median of {args.repeats}, {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'V':>7}{'rows':>5}  {'':<13}{'jaxserve':>9}{'MB':>7}{'floor':>7}{'torch':>9}{'torch / jaxserve':>18}")
    for vocab in args.vocab:
        for count in args.rows:
            random = np.random.default_rng(0)
            logits = random.normal(0, args.spread, (count, vocab)).astype(np.float32)
            history = random.integers(0, vocab, (count, PROMPT + OUTPUT)).astype(np.int32)
            x = jnp.asarray(logits)
            floor = median_ms(lambda x=x: total(x).block_until_ready(), args.repeats)
            for name, kind in KINDS.items():
                result = {"vocab": vocab, "rows": count, "kind": name, "mb": megabytes(kind, count, vocab)}
                result |= {"floor_ms": floor, "ms": median_ms(ours(logits, history, kind), args.repeats)}
                line = f"{vocab:>7}{count:>5}  {name:<13}{result['ms']:>9.2f}{result['mb']:>7.1f}{floor:>7.2f}"
                if peer := torchs(logits, history, kind):
                    result["torch_ms"] = median_ms(peer, args.repeats)
                    line += f"{result['torch_ms']:>9.1f}{result['torch_ms'] / result['ms']:>18.1f}"
                print(line, flush=True)
                results.append(result)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
