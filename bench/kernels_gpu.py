"""The kernels on a GPU: right first, then how fast, beside XLA, Triton, torch and FlashInfer where these are installed.

    python bench/kernels_gpu.py [--rows 1 8 64 256 512] [--vocab 32000 128256 151936] [--json FILE] [--budget SECONDS]
    python bench/kernels_gpu.py --interpret      # tiny shapes on any machine: that the script works, not how fast

An implementation is timed at a vocabulary only if it gives the reference's tokens there, on every case of
pallas_kernels.cases. Time: of one call among many that are queued, over logits in several buffers that do not fit the
L2 cache together. GB/s: one read of the logits, or of the keys and values, in that time; copy: of the copy that is
measured first, the share. What the budget leaves no time for is listed as skipped. Exit status 1 where something is
wrong, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Filters, Proposal, paged_attention, rejection_sample, top_k_top_p_sample
from pallas_kernels.cases import BENCH_ROWS, BENCH_VOCABS, draft_case, sampling_case

CACHE = 64 << 20  # bytes of L2 that the buffers together must exceed
TOP_K, TOP_P = 50, 0.9
DRAFTS, SLOTS = 3, 64
KEYS, PAGE, WIDTH = 2352, 16, 128
Call = Callable[[], Any]


@dataclass
class Result:
    """A row of the table. vocab: columns of the logits, or keys of a request. bytes: of the input. ms, gb_per_s: None
    where nothing was timed, note says why."""

    operation: str
    implementation: str
    rows: int
    vocab: int
    bytes: int
    ms: float | None = None
    gb_per_s: float | None = None
    copy_share: float | None = None
    note: str = ""


# ---- time


def queued_ms(calls: list[Call], wait: Callable[[Any], Any], repeats: int) -> float:
    """Of one call, in turn over `calls`: the median of five runs of `repeats` calls that are queued together."""
    wait([call() for call in calls])
    times = []
    for _ in range(5):
        started = time.perf_counter()
        wait([calls[i % len(calls)]() for i in range(repeats)])
        times.append((time.perf_counter() - started) / repeats)
    return statistics.median(times) * 1e3


def copy_bandwidth(size: int) -> float:
    """GB/s of reading and writing `size` bytes by XLA."""
    x = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * size / queued_ms([partial(copy, x)], jax.block_until_ready, 20) / 1e6


# ---- what is compared


def filters(rows: int) -> Filters:
    return Filters(
        temperature=jnp.full(rows, 1.0),
        min_p=jnp.zeros(rows),
        top_k=jnp.full(rows, TOP_K, jnp.int32),
        top_p=jnp.full(rows, TOP_P),
    )


def logits(rows: int, vocab: int) -> list[jax.Array]:
    """Buffers of normal logits: as many as do not fit the cache together."""
    count = 1 + CACHE // (4 * rows * vocab) if rows * vocab > 1000 else 1
    keys = jax.random.split(jax.random.key(0), min(count, 64))
    return [3 * jax.random.normal(key, (rows, vocab)) for key in keys]


def sampler(implementation: str) -> Callable[..., Any]:
    return jax.jit(partial(top_k_top_p_sample, implementation=implementation))


def verifier(implementation: str, method: str) -> Callable[..., Any]:
    return jax.jit(partial(rejection_sample, method=method, implementation=implementation))


def sampling_arguments(rows: int, vocab: int) -> list[tuple[Any, ...]]:
    words = jax.random.bits(jax.random.key(1), (rows, 8), jnp.uint32)
    return [(x, filters(rows), words) for x in logits(rows, vocab)]


def verifying_arguments(slots: int, vocab: int) -> list[tuple[Any, ...]]:
    """Drafts that are the most probable tokens, so that some are kept."""
    words = jax.random.bits(jax.random.key(1), (slots, 1 + DRAFTS, 8), jnp.uint32)
    uniforms = jax.random.uniform(jax.random.key(2), (slots, DRAFTS))
    shaped = [x.reshape(slots, 1 + DRAFTS, vocab) for x in logits(slots * (1 + DRAFTS), vocab)]
    drafts = [jnp.argmax(x[:, :-1], axis=2).astype(jnp.int32) for x in shaped]
    return [(x, d, filters(slots), words, uniforms) for x, d in zip(shaped, drafts, strict=True)]


def attention(implementation: str) -> Callable[..., Any]:
    return jax.jit(partial(paged_attention, implementation=implementation))


def attending_arguments(slots: int, length: int, keys: int, heads: int) -> list[tuple[Any, ...]]:
    """Pools of several layers, which take turns; every request has `keys` keys, on pages in any order."""
    pages = -(-keys // PAGE)
    layers = 1 + CACHE // (slots * keys * heads * WIDTH * 4) if slots > 1 else 1
    keys_of = jax.random.split(jax.random.key(3), 4)
    pools = [
        jax.random.normal(key, (layers, 1 + slots * pages, PAGE, heads, WIDTH), jnp.bfloat16) for key in keys_of[:2]
    ]
    q = jax.random.normal(keys_of[2], (slots, length, heads, 8, WIDTH), jnp.bfloat16)
    tables = 1 + jax.random.permutation(keys_of[3], slots * pages).reshape(slots, pages).astype(jnp.int32)
    positions = jnp.broadcast_to(keys - length + jnp.arange(length), (slots, length)).astype(jnp.int32)
    return [(q, *pools, jnp.int32(layer), tables, positions) for layer in range(layers)]


# ---- right


def attending_is_wrong(arguments: tuple[Any, ...]) -> str:
    """How far the kernel is from the definition, empty where it is near."""
    ours, expected = (attention(name)(*arguments).astype(jnp.float32) for name in ("mosaic", "xla"))
    difference = float(jnp.max(jnp.abs(ours - expected)))
    return "" if difference < 0.02 else f"attention differs by {difference}"


def sampling_is_right(implementation: str, vocab: int, only: str) -> str:
    """The cases that differ from the reference; empty where none does."""
    case = sampling_case(vocab, only=only)
    drawn, expected = (sampler(name)(case.logits, case.filters, case.words) for name in (implementation, "xla"))
    differ = (np.asarray(drawn.token) != np.asarray(expected.token)) & np.asarray(expected.finite)
    differ |= np.asarray(drawn.finite) != np.asarray(expected.finite)
    return ", ".join(name for name, different in zip(case.names, differ, strict=True) if different)


def verifying_is_right(implementation: str, vocab: int, only: str) -> str:
    """As `sampling_is_right`, of standard verification with a distribution of the drafts."""
    case = draft_case(vocab, only)
    proposal = Proposal(jnp.asarray(case.draft_logits), case.draft_filters)
    arguments = case.logits, case.drafts, case.filters, case.words, case.uniforms
    got, expected = (
        verifier(name, "standard")(*arguments, proposal=proposal).tokens for name in (implementation, "xla")
    )
    differ = (np.asarray(got) != np.asarray(expected)).any(axis=1)
    return ", ".join(name for name, different in zip(case.names, differ, strict=True) if different)


# ---- rivals that are not JAX's


def torch_calls(rows: int, vocab: int) -> tuple[list[Call], Callable[[Any], Any]]:
    """The usual way: sort, cumulative sum, mask, softmax, exponential race."""
    import torch

    def call(x: Any) -> Any:
        values, ids = x.sort(dim=-1, descending=True)
        values[:, TOP_K:] = -torch.inf
        p = values.softmax(dim=-1)
        p[p.cumsum(dim=-1) - p > TOP_P] = 0
        return ids.gather(1, (p / torch.empty_like(p).exponential_()).argmax(dim=-1, keepdim=True))

    buffers = [torch.from_dlpack(x) for x in logits(rows, vocab)]
    return [partial(call, x) for x in buffers], lambda _: torch.cuda.synchronize()


def flashinfer_calls(rows: int, vocab: int) -> tuple[list[Call], Callable[[Any], Any]]:
    import flashinfer
    import torch

    sample = flashinfer.sampling.top_k_top_p_sampling_from_logits
    buffers = [torch.from_dlpack(x) for x in logits(rows, vocab)]
    return [partial(sample, x, TOP_K, TOP_P) for x in buffers], lambda _: torch.cuda.synchronize()


RIVALS = {"torch": torch_calls, "flashinfer": flashinfer_calls}


# ---- the runs


class Bench:
    """Until `deadline`, of time.monotonic. interpret: nothing is timed."""

    def __init__(self, implementations: list[str], deadline: float, interpret: bool) -> None:
        self.implementations, self.deadline, self.interpret = implementations, deadline, interpret
        self.repeats = 1 if interpret else 100
        self.copy = copy_bandwidth(1 << 20 if interpret else 1 << 30)

    def time(self, result: Result, calls: list[Call], wait: Callable[[Any], Any]) -> Result:
        result.ms = queued_ms(calls, wait, self.repeats)
        result.gb_per_s = result.bytes / result.ms / 1e6
        result.copy_share = result.gb_per_s / self.copy
        return result

    def compiled(
        self, work: list[tuple[Result, Callable[..., Any], Callable[[], list[tuple[Any, ...]]]]]
    ) -> Iterator[Result]:
        """Timed results of functions over lists of arguments. They are compiled side by side, which takes longest, and
        timed alone."""
        with ThreadPoolExecutor(8) as pool:
            programs = [pool.submit(self.compile, function, arguments) for _, function, arguments in work]
            for (result, _, arguments), program in zip(work, programs, strict=True):
                if (executable := program.result()) is None or time.monotonic() > self.deadline:
                    result.note = "skipped: out of time"
                    yield result
                else:
                    yield self.time(result, [partial(executable, *a) for a in arguments()], jax.block_until_ready)

    def compile(self, function: Callable[..., Any], arguments: Callable[[], list[tuple[Any, ...]]]) -> Any:
        if time.monotonic() > self.deadline:
            return None
        shapes = jax.eval_shape(lambda: arguments()[0])
        return function.lower(*shapes).compile()

    def sampling(self, rows: list[int], vocabs: list[int], only: str) -> Iterator[Result]:
        work = []
        for vocab in vocabs:
            for name in self.implementations:
                wrong = "" if name == "xla" else sampling_is_right(name, vocab, only)
                for count in rows:
                    result = Result("top_k_top_p_sample", name, count, vocab, 4 * count * vocab)
                    result.note = wrong and f"wrong: {wrong}"
                    if wrong:
                        yield result
                    else:
                        work.append((result, sampler(name), partial(sampling_arguments, count, vocab)))
        work.sort(key=lambda item: (item[0].rows, item[0].vocab) != (64, 128256))  # what the goal is about
        yield from self.compiled(work)

    def verifying(self, slots: int, vocab: int, only: str) -> Iterator[Result]:
        work = []
        for name in (n for n in self.implementations if n != "triton"):
            wrong = "" if name == "xla" else verifying_is_right(name, min(vocab, 32000), only)
            for method in ("coupled", "standard"):
                count = slots * (1 + DRAFTS)
                result = Result(f"rejection_sample {method}", name, count, vocab, 4 * count * vocab)
                result.note = wrong and f"wrong: {wrong}"
                if wrong:
                    yield result
                else:
                    take = 5 if method == "standard" else 4
                    arguments = partial(first_of, take, partial(verifying_arguments, slots, vocab))
                    work.append((result, verifier(name, method), arguments))
        yield from self.compiled(work)

    def attending(self, slots: int, keys: int, heads: int) -> Iterator[Result]:
        """A decode and a window of 1 + DRAFTS, 8 query heads to a KV head, as on a GPU of eight that share 70B."""
        work = []
        for length in (1, 1 + DRAFTS):
            problem = partial(attending_arguments, slots, length, keys, heads)
            wrong = attending_is_wrong(problem()[0])
            for name in (n for n in self.implementations if n != "triton"):
                size = slots * keys * heads * WIDTH * 4
                result = Result(f"paged_attention 1 + {length - 1}", name, slots, keys, size)
                if name == "mosaic" and wrong:
                    result.note = f"wrong: {wrong}"
                    yield result
                else:
                    work.append((result, attention(name), problem))
        yield from self.compiled(work)

    def rivals(self, rows: list[int], vocabs: list[int]) -> Iterator[Result]:
        for name, make in RIVALS.items():
            if importlib.util.find_spec(name) is None or importlib.util.find_spec("torch") is None:
                continue
            for count in rows:
                for vocab in vocabs:
                    result = Result("top_k_top_p_sample", name, count, vocab, 4 * count * vocab)
                    if time.monotonic() > self.deadline:
                        result.note = "skipped: out of time"
                    else:
                        try:
                            self.time(result, *make(count, vocab))
                        except Exception as error:  # a rival that does not run here is no reason to stop
                            result.note = f"failed: {type(error).__name__}: {error}"[:120]
                    yield result


def first_of(count: int, make: Callable[[], list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    return [arguments[:count] for arguments in make()]


def available(interpret: bool) -> list[str]:
    names = ["xla", "mosaic"]
    if not interpret and importlib.util.find_spec("jax_triton"):
        names.append("triton")
    return names


def line(result: Result) -> str:
    figures = result.note or f"{result.ms:9.3f} ms {result.gb_per_s:8.0f} GB/s  {result.copy_share:5.0%} of a copy"
    return f"{result.operation:26} {result.implementation:10} {result.rows:4} x {result.vocab:6}  {figures}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(BENCH_ROWS))
    parser.add_argument("--vocab", type=int, nargs="+", default=list(BENCH_VOCABS))
    parser.add_argument("--budget", type=float, default=450, help="seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--interpret", action="store_true", help="tiny shapes, interpreted, on any machine")
    args = parser.parse_args(argv)
    if not args.interpret and jax.default_backend() not in ("gpu", "cuda"):
        print(f"kernels_gpu needs an NVIDIA GPU; JAX's backend is {jax.default_backend()!r} (or use --interpret)")
        return 2
    bench = Bench(available(args.interpret), time.monotonic() + args.budget, args.interpret)
    rows, vocabs, only, slots = ([2], [100], "top_k 1", 1) if args.interpret else (args.rows, args.vocab, "", SLOTS)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, copy {bench.copy:.0f} GB/s", flush=True)
    results = []
    for found in (
        bench.sampling(rows, vocabs, only),
        bench.verifying(slots, vocabs[0] if args.interpret else 128256, "one draft" if args.interpret else ""),
        bench.attending(*((1, 80, 1) if args.interpret else (SLOTS, KEYS, 1))),
        () if args.interpret else bench.rivals(rows, vocabs),
    ):
        for result in found:
            results.append(result)
            print(line(result), flush=True)
    if args.json:
        figures = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "copy_gb_per_s": bench.copy}
        args.json.write_text(json.dumps(figures | {"results": [asdict(r) for r in results]}, indent=1))
    return int(any("wrong" in result.note for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
