"""The kernels on a GPU: right first, then how fast, beside XLA, Triton, torch and FlashInfer where these are installed.

    python bench/kernels_gpu.py [--rows 1 8 64 256 512] [--vocab 32000 128256 151936] [--json FILE] [--budget SECONDS]
    python bench/kernels_gpu.py --interpret      # tiny shapes on any machine: that the script works, not how fast

Right: a program gives the tokens of the "xla" program (attention: is within 0.02 of it) on an input that is timed and
on the cases of pallas_kernels.cases, in batches of its shape. If not, it is listed as wrong and not timed. torch and
FlashInfer draw by numbers of their own and are not compared. Time: of one call among many that are queued, over more
inputs than fit the L2 cache; never less than Python takes to start a call. GB/s: one read of the logits, with q those
of q too, or of keys and values, in that time, and its share of what a copy reaches.

Order: sampling 64 x 128256, verification, attention, rivals at 64 x 128256, other shapes, rivals there. Each step is
compiled side by side, for COMPILE seconds at most, then timed with nothing beside it. What a program raises is its
row's error, and the rest goes on. Nothing is begun after --budget seconds: the rest is listed as skipped. GRACE seconds
later the process ends, whatever it waits for. The JSON file has every row from the start and is replaced after each.
Exit status: 1 where a program of ours was wrong or failed, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.util import find_spec
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Filters, Proposal, paged_attention, rejection_sample, top_k_top_p_sample
from pallas_kernels.cases import BENCH_ROWS, BENCH_VOCABS, draft_case, sampling_case

CACHE = 64 << 20  # bytes of L2 that the inputs together must exceed
TOP_K, TOP_P = 50, 0.9
GOAL, SLOTS, DRAFTS = (64, 128256), 64, 3
KEYS, PAGE, WIDTH = 2352, 16, 128
BUDGET, GRACE, COMPILE = 420, 30, 120  # seconds: with the start, a run stays below eight minutes
PENDING, SKIPPED, STUCK = "not reached", "skipped: out of time", "TimeoutError: it did not come back"
VERIFICATIONS = ("standard", "block with q", "standard with q", "coupled")
RIVALS = ("torch", "flashinfer")
Call = Callable[[], Any]
Arguments = tuple[Any, ...]
Batch = tuple[Sequence[str], Arguments]  # names of the rows, and the arguments


@dataclass
class Result:
    """A row of the table. vocab: columns of the logits, or keys of a request. bytes: of the input. ms and what follows
    from it are None where nothing was timed; note or error then says why."""

    operation: str
    implementation: str
    rows: int
    vocab: int
    bytes: int
    ms: float | None = None
    gb_per_s: float | None = None
    copy_share: float | None = None
    note: str = PENDING
    error: str = ""


@dataclass(frozen=True)
class Problem:
    """results: of implementations that are given the same, "xla" first. arguments: of calls that take turns. cases:
    compared beside the first of these. function: of them and `implementation`. differ: in which rows two outputs do."""

    results: list[Result]
    arguments: Callable[[], Iterator[Arguments]]
    cases: Callable[[], Iterable[Batch]]
    function: Callable[..., Any]
    differ: Callable[[Any, Any], Any]

    def wrong(self, batches: list[Batch], got: list[Any], want: list[Any]) -> str:
        """The names of rows that differ, each once."""
        differ = [self.differ(*outputs) for outputs in zip(got, want, strict=True)]
        names = [name for (names, _), rows in zip(batches, differ, strict=True) for name in np.array(names)[rows]]
        return ", ".join(dict.fromkeys(names))


def queued_ms(calls: list[Call], wait: Callable[[Any], Any], repeats: int, runs: int = 5) -> float:
    """Of one call, in turn over `calls`: the median of runs of `repeats` calls that are queued together."""
    wait([call() for call in calls])
    turn, times = cycle(calls), []
    for _ in range(runs):
        started = time.perf_counter()
        wait([call() for call in islice(turn, repeats)])
        times.append((time.perf_counter() - started) / repeats)
    return sorted(times)[runs // 2] * 1e3


def copy_bandwidth(size: int) -> float:
    """GB/s of reading and writing `size` bytes by XLA."""
    x = jnp.zeros(size // 4, jnp.float32)
    return 2 * size / queued_ms([partial(jax.jit(lambda x: x + 1), x)], jax.block_until_ready, 20) / 1e6


def filters(rows: int) -> Filters:
    k, p = jnp.full(rows, TOP_K, jnp.int32), jnp.full(rows, TOP_P, jnp.float32)
    return Filters(temperature=jnp.ones(rows), min_p=jnp.zeros(rows), top_k=k, top_p=p)


def logits(rows: int, vocab: int) -> Iterator[jax.Array]:
    """Buffers of normal logits: as many as do not fit the cache together."""
    count = 1 + CACHE // (4 * rows * vocab) if rows * vocab > 1000 else 1
    for key in jax.random.split(jax.random.key(0), count):
        yield 3 * jax.random.normal(key, (rows, vocab))


def sampling_arguments(rows: int, vocab: int) -> Iterator[Arguments]:
    words, same = jax.random.bits(jax.random.key(1), (rows, 8), jnp.uint32), filters(rows)
    return ((x, same, words) for x in logits(rows, vocab))


def verifying_arguments(slots: int, vocab: int) -> Iterator[Arguments]:
    """Drafts that are the most probable tokens of a q near p, so that some are kept."""
    words = jax.random.bits(jax.random.key(1), (slots, 1 + DRAFTS, 8), jnp.uint32)
    uniforms = jax.random.uniform(jax.random.key(2), (slots, DRAFTS))
    for rows in logits(slots * (1 + DRAFTS), vocab):
        p = rows.reshape(slots, 1 + DRAFTS, vocab)
        q = p[:, :-1] + 0.5 * jax.random.normal(jax.random.key(3), (slots, DRAFTS, vocab))
        drafts = jnp.argmax(q, axis=2).astype(jnp.int32)
        yield p, drafts, filters(slots), words, uniforms, Proposal(q, filters(slots))


def attending_arguments(slots: int, length: int, keys: int, heads: int) -> Iterator[Arguments]:
    """Several pairs of pools, which take turns; every request has `keys` keys, on pages in any order. 8 query heads
    to a KV head; one KV head is what a GPU of eight that share 70B has."""
    pages = -(-keys // PAGE)
    pairs = 1 + CACHE // (slots * keys * heads * WIDTH * 4) if slots * keys > 1000 else 1
    first, second, *others = jax.random.split(jax.random.key(3), 2 + 2 * pairs)
    shape = 1 + slots * pages, PAGE, heads, WIDTH
    pools = [jax.random.normal(key, shape, jnp.bfloat16) for key in others]
    q = jax.random.normal(first, (slots, length, heads, 8, WIDTH), jnp.bfloat16)
    tables = 1 + jax.random.permutation(second, slots * pages).reshape(slots, pages).astype(jnp.int32)
    positions = jnp.broadcast_to(keys - length + jnp.arange(length), (slots, length)).astype(jnp.int32)
    return ((q, *pair, tables, positions) for pair in zip(pools[::2], pools[1::2], strict=True))


def in_batches(names: Sequence[str], arguments: Arguments, rows: int) -> Iterator[Batch]:
    """Of as many rows as the program has; the last is filled up with the first rows."""
    index = np.arange(-(-len(names) // rows) * rows) % len(names)
    for chosen in index.reshape(-1, rows):
        yield [names[i] for i in chosen], jax.tree.map(lambda x: jnp.asarray(x[chosen]), arguments)


def verifying_cases(slots: int, vocab: int, only: str) -> Iterator[Batch]:
    """The cases have fewer drafts than DRAFTS; the others are missing, and what belongs to them is not looked at."""
    case = draft_case(vocab, only)

    def wide(x: np.ndarray, **how: Any) -> Any:
        missing = DRAFTS - case.drafts.shape[1]
        return np.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), **how or {"mode": "edge"})

    p, words, uniforms, q = map(wide, (case.logits, case.words, case.uniforms, case.draft_logits))
    drafts = wide(case.drafts, constant_values=-1)
    arguments = p, drafts, case.filters, words, uniforms, Proposal(q, case.draft_filters)
    return in_batches(case.names, arguments, slots)


def sampling(rows: int, vocab: int, names: list[str], only: str) -> Problem:
    def cases() -> Iterator[Batch]:
        case = sampling_case(vocab, only=only)
        return in_batches(case.names, (case.masked, case.filters, case.words), rows)

    return Problem(
        [Result("top_k_top_p_sample", name, rows, vocab, 4 * rows * vocab) for name in names],
        partial(sampling_arguments, rows, vocab),
        cases,
        top_k_top_p_sample,
        lambda got, want: (got.finite != want.finite) | (want.finite & (got.token != want.token)),
    )


def verify(kind: str, *given: Any, **options: Any) -> Any:
    *window, uniforms, q = given
    options |= {} if kind == "coupled" else {"uniforms": uniforms}
    options |= {"proposal": q} if kind.endswith("with q") else {}
    return rejection_sample(*window, method=kind.split()[0], **options)


def verifying(kind: str, slots: int, vocab: int, names: list[str], only: str) -> Problem:
    rows = slots * (1 + DRAFTS)
    size = 4 * vocab * (rows + slots * DRAFTS * kind.endswith("with q"))
    return Problem(
        [Result(f"rejection_sample {kind}", name, rows, vocab, size) for name in names],
        partial(verifying_arguments, slots, vocab),
        partial(verifying_cases, slots, vocab, only),
        partial(verify, kind),
        lambda got, want: (got.finite != want.finite) | (got.tokens != want.tokens).any(axis=1),
    )


def attending(slots: int, length: int, keys: int, names: list[str]) -> Problem:
    return Problem(
        [Result(f"paged_attention 1 + {length - 1}", name, slots, keys, slots * keys * WIDTH * 4) for name in names],
        partial(attending_arguments, slots, length, keys, 1),
        lambda: (),
        paged_attention,
        # "not near" instead of "far": NaN is neither
        lambda got, want: ~(abs(np.float32(got) - np.float32(want)) < 0.02).reshape(slots, -1).all(axis=1),
    )


def plan(rows: list[int], vocabs: list[int], names: list[str], rivals: list[str], tiny: bool) -> list[list[Problem]]:
    """Steps, the most important first; of the other shapes those of one number of rows are a step."""
    only, slots, keys, vocab = ("top_k 1", 1, 80, 100) if tiny else ("", SLOTS, KEYS, GOAL[1])
    without_triton = [name for name in names if name != "triton"]
    shapes = [(2, 100)] if tiny else list(product(rows, vocabs))
    first, rest = [s for s in shapes if s == GOAL], [s for s in shapes if s != GOAL]
    return [
        [sampling(*shape, names, only) for shape in first],
        [verifying(kind, slots, vocab, without_triton, "one draft" if tiny else "") for kind in VERIFICATIONS],
        [attending(slots, length, keys, without_triton) for length in (1, 1 + DRAFTS)],
        [sampling(*shape, rivals, "") for shape in first],
        *([sampling(*shape, names, only) for shape in rest if shape[0] == count] for count in dict(shapes)),
        [sampling(*shape, rivals, "") for shape in rest],
    ]


def rival_calls(name: str, rows: int, vocab: int) -> tuple[list[Call], Callable[[Any], Any]]:
    """flashinfer's kernel, or torch in the usual way: sort, cumulative sum, mask, softmax, exponential race."""
    import torch

    def call(x: Any) -> Any:
        values, ids = x.sort(dim=-1, descending=True)
        values[:, TOP_K:] = -torch.inf
        p = values.softmax(dim=-1)
        p[p.cumsum(dim=-1) - p > TOP_P] = 0
        return ids.gather(1, (p / torch.empty_like(p).exponential_()).argmax(dim=-1, keepdim=True))

    if name == "flashinfer":
        import flashinfer

        call = partial(flashinfer.sampling.top_k_top_p_sampling_from_logits, top_k=TOP_K, top_p=TOP_P)
    return [partial(call, torch.from_dlpack(x)) for x in logits(rows, vocab)], lambda _: torch.cuda.synchronize()


class Untimed(Exception):
    """Why a row has no time where nothing failed."""


class Bench:
    """Steps of problems until `deadline`, of time.monotonic. `file` has every row from the start."""

    def __init__(self, steps: list[list[Problem]], deadline: float, tiny: bool, file: Path | None = None) -> None:
        self.steps, self.deadline, self.tiny, self.file = steps, deadline, tiny, file
        self.results = [result for step in steps for problem in step for result in problem.results]
        self.figures: dict[str, Any] = {"jax": jax.__version__, "device": None, "copy_gb_per_s": None}
        self.current: Result | None = None
        self.lock = threading.Lock()  # the end may come while a row is written

    def run(self) -> int:
        """The exit status."""
        self.write()
        self.figures["device"] = jax.devices()[0].device_kind
        if time.monotonic() < self.deadline:
            self.figures["copy_gb_per_s"] = copy_bandwidth(1 << 20 if self.tiny else 1 << 30)
        print(", ".join(f"{name} {value}" for name, value in self.figures.items()), flush=True)
        for step in self.steps:
            programs = self.compile(step)
            for problem in step:
                self.measure(problem, programs)
        return self.status()

    def compile(self, step: list[Problem]) -> dict[int, Future[Any]]:
        """Programs by the id of their result. Those that are not ready in time are not waited for."""

        def program(problem: Problem, implementation: str) -> Any:
            self.in_time()
            shapes = jax.eval_shape(lambda: next(problem.arguments()))
            return jax.jit(partial(problem.function, implementation=implementation)).lower(*shapes).compile()

        pool = ThreadPoolExecutor(8)  # one a step, for a thread that does not come back would keep its place
        ours = [(p, r) for p in step for r in p.results if r.implementation not in RIVALS]
        programs = {id(r): pool.submit(program, p, r.implementation) for p, r in ours}
        left = max(0, self.deadline - time.monotonic())
        wait(programs.values(), timeout=left if self.tiny else min(left, COMPILE))
        pool.shutdown(wait=False, cancel_futures=True)
        return programs

    def in_time(self) -> None:
        if time.monotonic() >= self.deadline:
            raise Untimed(SKIPPED)

    def measure(self, problem: Problem, programs: dict[int, Future[Any]]) -> None:
        reference: list[Any] = []

        @cache
        def inputs() -> tuple[list[Arguments], list[Batch]]:
            timed = list(problem.arguments())
            names = [f"timed input {i}" for i in range(len(timed[0][0]))]
            return jax.block_until_ready((timed, [(names, timed[0]), *problem.cases()]))

        def ours(result: Result) -> None:
            future = programs[id(result)]
            if future.cancelled() or not future.done():
                raise TimeoutError(f"not compiled in {COMPILE} s")
            program, (timed, batches) = future.result(), inputs()
            outputs = []
            for _, arguments in batches:
                self.in_time()
                outputs.append(jax.tree.map(np.asarray, program(*arguments)))
            if result.implementation == "xla":
                reference.extend(outputs)
            if not reference:
                raise Untimed("skipped: nothing to compare with")
            if wrong := problem.wrong(batches, outputs, reference):
                raise Untimed(f"wrong: {wrong}")
            self.time(result, [partial(program, *arguments) for arguments in timed], jax.block_until_ready)

        for result in problem.results:
            self.current, result.note = result, ""
            try:
                self.in_time()
                if result.implementation in RIVALS:
                    self.time(result, *rival_calls(result.implementation, result.rows, result.vocab))
                else:
                    ours(result)
            except Untimed as reason:
                result.note = str(reason)
            except Exception as error:  # one implementation's failure says nothing about the others
                result.error = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            with self.lock:
                self.current = None
                print(line(result), flush=True)
                self.write()

    def time(self, result: Result, calls: list[Call], wait: Callable[[Any], Any]) -> None:
        self.in_time()
        result.ms = queued_ms(calls, wait, 1, 1) if self.tiny else queued_ms(calls, wait, 100)
        result.gb_per_s = result.bytes / result.ms / 1e6
        result.copy_share = result.gb_per_s / self.figures["copy_gb_per_s"]

    def write(self) -> None:
        """The file, whole at any moment."""
        if self.file:
            part = self.file.with_name(self.file.name + ".part")
            part.write_text(json.dumps(self.figures | {"results": [asdict(r) for r in self.results]}, indent=1))
            os.replace(part, self.file)

    def status(self) -> int:
        ours = (r for r in self.results if r.implementation not in RIVALS)
        return int(any(r.error or r.note.startswith("wrong") for r in ours))

    def end(self) -> None:
        """Of the process, by a thread of its own: what the other one waits for may never come."""
        with self.lock:
            for result in (r for r in self.results if r is self.current or r.note == PENDING):
                result.note, result.error = ("", STUCK) if result is self.current else (SKIPPED, "")
                print(line(result), flush=True)
            self.write()
            os._exit(self.status())


def line(result: Result) -> str:
    figures = f"failed: {result.error}" if result.error else result.note
    figures = figures or f"{result.ms:9.3f} ms {result.gb_per_s:8.0f} GB/s  {result.copy_share:5.0%} of a copy"
    return f"{result.operation:32} {result.implementation:10} {result.rows:4} x {result.vocab:6}  {figures[:200]}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(BENCH_ROWS))
    parser.add_argument("--vocab", type=int, nargs="+", default=list(BENCH_VOCABS))
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--interpret", action="store_true", help="tiny shapes, interpreted, on any machine")
    args = parser.parse_args(argv)
    tiny = args.interpret
    names = ["xla", "mosaic"] + ["triton"] * bool(not tiny and find_spec("jax_triton"))
    rivals = [name for name in RIVALS if not tiny and find_spec("torch") and find_spec(name)]
    steps = plan(args.rows, args.vocab, names, rivals, tiny)
    bench = Bench(steps, time.monotonic() + args.budget, tiny, args.json)
    timer = threading.Timer(args.budget + GRACE, bench.end)
    timer.start()
    # The timer cannot run where a library keeps the interpreter's lock; this can.
    faulthandler.dump_traceback_later(args.budget + GRACE + 10, exit=True, file=2)
    try:
        if (backend := jax.default_backend()) not in ("gpu", "cuda") and not tiny:
            print(f"kernels_gpu needs an NVIDIA GPU; JAX's backend is {backend!r} (or use --interpret)", flush=True)
            return 2
        return bench.run()
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    os._exit(main())  # the interpreter's own end would wait for compilations that do not come back
