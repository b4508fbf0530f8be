"""Output tokens per second of jaxserve and its peers on one machine, in one run, taking turns.

    python bench/throughput.py                   jaxserve alone, on the demo model
    python bench/throughput.py --peers DIR       with vLLM and transformers, installed there first (see bench/peers)

Every engine gets the same prompts (about 36 tokens of chat each), makes 64 tokens of each, and is asked in turn, round
after round; the table holds medians. The second table says where jaxserve's step goes, and what memory and arithmetic
would allow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peer import Peer, add_peers_option, installed

from jaxserve import LLM, RequestOutputKind, SamplingParams
from jaxserve.config import bucket
from jaxserve.step import view_of
from models.gguf import demo_model_path
from models.markov import MarkovLM
from pallas_kernels.paged_attention import context_buckets

_REPEATS = 15

QUESTIONS = [
    "Name three primary colors.", "Write a haiku about the sea.", "What is 17 + 25?", "Who wrote Hamlet?",
    "Give me a recipe for bread.", "Why is the sky blue?", "Describe a sunny day.", "What do bees eat?",
]  # fmt: skip
SAMPLING: dict[str, dict[str, float]] = {"greedy": {"temperature": 0.0}, "top_p": {"temperature": 1.0, "top_p": 0.9}}


class Ours:
    def __init__(self, prompts: list[list[int]], dtype: str, max_num_seqs: int) -> None:
        self.prompts = prompts
        self.llm = LLM(demo_model_path(), dtype=dtype, max_model_len=512, max_num_seqs=max_num_seqs,
                       enable_prefix_caching=False, structured_outputs_config=None)  # fmt: skip
        started = time.perf_counter()
        self.llm.warmup()
        self.warmup_seconds = time.perf_counter() - started

    def ask(self, batch: int, tokens: int, sampling: str) -> float:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **SAMPLING[sampling])
        prompts = [self.prompts[i % len(self.prompts)] for i in range(batch)]
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return sum(len(o.outputs[0].token_ids) for o in outputs) / seconds


def chat_prompts(llm_tokenizer: Any) -> list[list[int]]:
    return [
        llm_tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
        )
        for q in QUESTIONS
    ]


def breakdown(ours: Ours, batch: int, context: int) -> dict[str, float]:
    """Milliseconds of one greedy decode step of full slots at about this context: all of it, the forward pass with
    lm_head, lm_head alone; and the two floors."""
    runner = ours.llm.engine.runner
    b = runner.buckets
    slots, full = bucket(b.slots, batch), b.pages[-1]
    pages = bucket(context_buckets(full, 16), -(-context // 16))
    model, params, cache, state = runner.model, runner.params, runner.cache, runner.batch
    length = jnp.full_like(state.rows.num_tokens, context - _REPEATS)
    rows = replace(state.rows, num_tokens=length, max_tokens_total=jnp.full_like(length, state.tokens.shape[1]))
    state = replace(state, active=jnp.ones_like(state.active), rows=rows)
    run = np.ones(slots, bool)
    grammars = None if runner.grammars is None else runner.grammars.values
    forward = runner.programs["forward", slots, full, 0]
    sample = runner.programs["sample", slots, False, grammars is not None, 0]
    hidden = jnp.zeros((slots, model.config.hidden_size), jnp.float32)
    head = jax.jit(model.logits)

    def whole() -> Any:
        nonlocal cache, state
        cache, logits, _ = forward(runner.weights, cache, view_of(state), run)
        state, out = sample(state, logits, run, grammars)
        return out

    def model_alone() -> Any:
        nonlocal cache
        cache, logits, _ = forward(runner.weights, cache, view_of(state), run)
        return logits

    times = {"step": _median_ms(whole), "forward": _median_ms(model_alone)}
    times |= {"lm_head": _median_ms(lambda: head(params, hidden))}
    runner.cache, runner.batch = cache, state
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    kv = slots * pages * sum(x.nbytes for x in jax.tree.leaves(model.init_kv(1, 16, None)))
    flops = 2 * slots * sum(x.size for x in jax.tree.leaves(params) if x.ndim > 1)
    times |= {"weights_mb": weights / 1e6, "kv_mb": kv / 1e6, "gflop": flops / 1e9}
    times["floor_bytes"] = (weights + kv) / _bandwidth() * 1e3
    return times


def host_time(llm: LLM, prompts: list[list[int]], requests: int) -> tuple[float, float, int]:
    """Milliseconds the host works on a step in which everyone decodes (top_p, no stop), its waiting not counted; the
    part of it that starts programs (XLA:CPU runs some of a program in that call); how many such steps. Final outputs
    only, as LLM.generate asks for them."""
    engine = llm.engine
    kind = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=1.0, top_p=0.9, output_kind=kind)
    for i in range(requests):
        engine.add_request(f"host {i}", prompts[i % len(prompts)], params)
    samples = []
    while engine.has_unfinished():
        before = engine.stats()
        engine.step()
        after = engine.stats()
        if after.tokens - before.tokens == requests:
            parts = (after.host_seconds - before.host_seconds, after.dispatch_seconds - before.dispatch_seconds)
            samples.append([1e3 * part for part in parts])
    host, dispatch = (statistics.median(column) for column in zip(*samples, strict=True))
    return host, dispatch, len(samples)


def _median_ms(call: Callable[[], Any], repeats: int = _REPEATS) -> float:
    jax.block_until_ready(call())
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call())
        samples.append(time.perf_counter() - started)
    return statistics.median(samples) * 1e3


def _bandwidth() -> float:
    """Bytes a second of reading 512 MB, measured with a sum."""
    x = jnp.ones((128, 1 << 20), jnp.float32)
    total = jax.jit(lambda x: x.sum(axis=1))
    return x.nbytes / (_median_ms(lambda: total(x), 5) / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    add_peers_option(parser, "vLLM and transformers")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()

    ours = Ours([[1]], args.dtype, max(64, *args.batch))
    ours.prompts = chat_prompts(ours.llm.get_tokenizer())
    engines: dict[str, Any] = {"jaxserve": ours}
    with tempfile.TemporaryDirectory() as temporary:
        prompts = Path(temporary) / "prompts.json"
        prompts.write_text(json.dumps(ours.prompts))
        if args.peers:
            folder = installed(args.peers)
            for name in ("vllm", "transformers"):
                engines[name] = Peer(name, folder, prompts, args.batch, args.tokens, tuple(SAMPLING))
        cases = [(s, b) for s in SAMPLING for b in args.batch]
        results: dict[tuple[str, str, int], list[float]] = {}
        for sampling, batch in cases:
            for _ in range(args.rounds):
                for name, engine in engines.items():
                    rate = engine.ask(batch, args.tokens, sampling)
                    results.setdefault((name, sampling, batch), []).append(rate)
    report(ours, engines, cases, {k: statistics.median(v) for k, v in results.items()}, args)


def report(
    ours: Ours,
    engines: dict[str, Any],
    cases: list[tuple[str, int]],
    rates: dict[tuple[str, str, int], float],
    args: Any,
) -> None:
    model = ours.llm.engine.model
    print(f"\nSmolLM2-135M, {args.tokens} tokens of each prompt; jaxserve in {model.dtype} on jax {jax.__version__}")
    print(f"output tokens/s, median of {args.rounds} rounds; warm-up {ours.warmup_seconds:.0f} s")
    names = list(engines)
    print(f"{'':<10}{'B':>4}" + "".join(f"{n:>14}" for n in names) + "".join(f"{'/ ' + n:>16}" for n in names[1:]))
    for sampling, batch in cases:
        row = [rates[n, sampling, batch] for n in names]
        ratios = "".join(f"{row[0] / x:>16.2f}" for x in row[1:])
        print(f"{sampling:<10}{batch:>4}" + "".join(f"{x:>14.1f}" for x in row) + ratios)

    print("\nOne greedy decode step at 100 tokens of context, ms")
    print(
        f"{'B':>4}{'step':>8}{'forward':>9}{'lm_head':>9}{'weights MB':>12}{'KV MB':>8}"
        f"{'GFLOP':>8}{'bytes floor':>13}{'GFLOP/s':>9}"
    )
    for batch in args.batch:
        t = breakdown(ours, batch, 100)
        rate = t["gflop"] / (t["step"] / 1e3)
        print(f"{batch:>4}{t['step']:>8.1f}{t['forward']:>9.1f}{t['lm_head']:>9.1f}{t['weights_mb']:>12.0f}{t['kv_mb']:>8.1f}"
              f"{t['gflop']:>8.2f}{t['floor_bytes']:>13.1f}{rate:>9.0f}")  # fmt: skip

    print("\nHost work per step at 64 decoding requests, ms (on a CPU it shares the cores with the model)")
    toy = LLM(MarkovLM(np.zeros((256, 256), np.float32)), max_model_len=512, max_num_seqs=64)
    toy.warmup(progress=False)
    for name, llm, prompts in (("SmolLM2-135M", ours.llm, ours.prompts), ("a table", toy, [[1] * 36])):
        host, dispatch, steps = host_time(llm, prompts, 64)
        print(f"{name:<14}{host:>6.2f}, of which starting programs {dispatch:.2f}; median of {steps} steps")
    print(f"programs compiled while serving: {ours.llm.stats().compilations}")
    if args.json:
        args.json.write_text(json.dumps({"/".join(map(str, k)): v for k, v in rates.items()}, indent=1))


if __name__ == "__main__":
    main()
