"""Speculation on the demo model: how many drafts are accepted, and what they save, by batch size.

    python bench/speculative.py [--json FILE] [--plot FILE.png]          both parts, jaxserve alone
    python bench/speculative.py --peers DIR                              also vLLM without and with n-gram drafts
    python bench/speculative.py --eagle DIR                              also an EAGLE head (bench/train_eagle.py)
    python bench/speculative.py --parts surface --batch 1 8              one part, fewer sizes

`texts`: real drafts for prompts whose answers repeat the prompt (extractive) or do not (open). Engines take turns,
round after round; the table holds medians.

`surface`: drafts of a chosen quality, everything else being real. The answers are known from a run without drafts, and
a proposer hands them out again, each draft spoilt with probability 1 - rate. So acceptance is what was asked for, and
the step's time is measured: rate x K x batch -> speed-up over K = 0, and what num_speculative_tokens="auto" makes of
the same drafts, having learned from three answers. Beside it stands the arithmetic: a step of n = B (1 + K) rows takes
as long as one of B rows up to the ridge T_ridge, where computing takes longer than reading the weights; a step makes
1 + a + a^2 + ... tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peer import Peer, add_peers_option, installed

from jaxserve import LLM, SamplingParams
from jaxserve.speculative import Proposal, SpecDecodingStats, Stateless, cut
from jaxserve.speculative.auto import AutoK, StepTime, expected_tokens, fit_step_time
from models.gguf import demo_model_path

PROMPT_LEN = 96  # the prompts have at most 87 tokens
STORIES = (
    "The harbour bridge was closed on Monday after an inspection found cracks in two of its eleven steel beams. "
    "Engineers said that the cracks were caused by salt water. The repair will take nine weeks and cost four million.",
    "A farmer near the village of Aldern found three Roman coins in a field on Sunday. The museum says that they are "
    "eighteen hundred years old. They can be seen from next week on in the entrance hall, between nine and five.",
    "The library will open two hours later in winter. Readers can return books at any time through the slot beside the "
    "door. Children under twelve need no card. The new reading room has forty seats and is open on Saturdays too.",
    "The night train from Lisbon arrives at ten past seven. Breakfast is served from six o'clock on. Passengers with "
    "bicycles are asked to use the last carriage, since the first three are too narrow for them.",
)
EXTRACTIVE = [f"Repeat the following text word for word.\n\n{story}" for story in STORIES]
OPEN = [
    "Write a short story about a lighthouse keeper.", "Explain how bread is made.", "Why do people like music?",
    "Give me advice for my first day at a new job.",
]  # fmt: skip
PROMPTS = {"extractive": EXTRACTIVE, "open": OPEN}
LEARNING_STEPS = 150  # of auto, from nothing, before the surface's are counted
METHODS: dict[str, dict[str, Any] | None] = {  # one K: engines share compiled programs by the persistent cache
    "K=0": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 7},
    "suffix": {"method": "suffix", "num_speculative_tokens": 7, "suffix_decoding_max_cached_requests": 0},
    "ngram auto": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": "auto"},
}


def make_llm(speculation: dict[str, Any] | None, dtype: str, max_num_seqs: int, tokens: int, **config: Any) -> LLM:
    """One page a request, just long enough for answers of so many tokens: few programs to compile."""
    length = PROMPT_LEN + tokens
    return LLM(
        demo_model_path(), dtype=dtype, max_model_len=length, block_size=length,
        max_num_seqs=max_num_seqs, enable_prefix_caching=False, structured_outputs_config=None,
        speculative_config=speculation, **config,
    )  # fmt: skip


def timed(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> tuple[float, SpecDecodingStats, list[list[int]]]:
    """Output tokens a second, what became of drafts, and the outputs."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    before = llm.stats().speculation.since(SpecDecodingStats(0))
    started = time.perf_counter()
    outputs = [o.outputs[0].token_ids for o in llm.generate(list(prompts), params, use_tqdm=False)]
    seconds = time.perf_counter() - started
    return sum(map(len, outputs)) / seconds, llm.stats().speculation.since(before), outputs


def encoded(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    chats = ([{"role": "user", "content": text}] for text in texts)
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


# ---- real drafts ----


def run_texts(args: argparse.Namespace) -> list[dict[str, Any]]:
    methods = dict(METHODS)
    if args.eagle:
        methods["eagle"] = {"method": "eagle", "model": args.eagle, "num_speculative_tokens": 3}
    engines = {name: make_llm(asked, args.dtype, max(args.batch), args.tokens) for name, asked in methods.items()}
    tokenizer = engines["K=0"].get_tokenizer()
    prompts = {kind: encoded(tokenizer, PROMPTS[kind]) for kind in args.prompts}
    with tempfile.TemporaryDirectory() as folder:
        peers = start_peers(args, prompts, Path(folder)) if args.peers else {}
        results = []
        print(f"\n{'prompts':<12}{'B':>3} {'method':<12}{'tokens/s':>9}{'/ K=0':>7}{'length':>8}  by position")
        for kind, batch in itertools.product(prompts, args.batch):
            rows = one_text_case(engines, peers, kind, prompts[kind], batch, args)
            print_texts(rows)
            results += rows
    for llm in engines.values():
        llm.shutdown()
    return results


def one_text_case(
    engines: dict[str, LLM], peers: dict[tuple[str, str], Peer], kind: str, prompts: list[list[int]], batch: int,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:  # fmt: skip
    some = [prompts[i % len(prompts)] for i in range(batch)]
    rates: dict[str, list[float]] = {}
    found: dict[str, SpecDecodingStats] = {}
    outputs = {name: timed(llm, some, args.tokens)[2] for name, llm in engines.items()}  # compiles
    for _ in range(args.rounds):
        for name, llm in engines.items():
            rate, found[name], _ = timed(llm, some, args.tokens)
            rates.setdefault(name, []).append(rate)
        for (name, of), peer in peers.items():
            if of == kind:
                rates.setdefault(name, []).append(peer.ask(batch, args.tokens, "greedy"))
    same = {name: outputs[name] == outputs["K=0"] for name in engines}
    base = statistics.median(rates["K=0"])
    rows = []
    for name, values in rates.items():
        rate, stats = statistics.median(values), found.get(name)
        drafted = stats is not None and stats.num_drafts > 0
        rows.append({
            "prompts": kind, "batch": batch, "method": name, "tokens_per_s": round(rate, 1),
            "speedup": round(rate / base, 2), "same_output": same.get(name),
            "acceptance_length": round(stats.mean_acceptance_length, 2) if drafted else None,
            "acceptance_by_position": [round(x, 2) for x in stats.acceptance_rate_per_pos] if drafted else [],
        })  # fmt: skip
    return rows


def start_peers(args: argparse.Namespace, prompts: dict[str, Any], folder: Path) -> dict[tuple[str, str], Peer]:
    """vLLM without and with n-gram drafts, for each kind of prompt; one process each."""
    installed(args.peers)
    ngram = METHODS["ngram"]
    peers = {}
    for kind, ids in prompts.items():
        file = folder / f"{kind}.json"
        file.write_text(json.dumps(ids))
        for name, asked in (("vllm K=0", None), ("vllm ngram", ngram)):
            options = [] if asked is None else ["--speculative-config", json.dumps(asked)]
            peers[name, kind] = Peer("vllm", args.peers, file, args.batch, args.tokens, ["greedy"], options)
    return peers


def print_texts(results: list[dict[str, Any]]) -> None:
    for r in results:
        length = "" if r["acceptance_length"] is None else f"{r['acceptance_length']:.2f}"
        by = " ".join(f"{x:.2f}" for x in r["acceptance_by_position"])
        note = "  OTHER OUTPUT" if r["same_output"] is False else ""
        print(f"{r['prompts']:<12}{r['batch']:>3} {r['method']:<12}{r['tokens_per_s']:>9.1f}{r['speedup']:>7.2f}"
              f"{length:>8}  {by}{note}", flush=True)  # fmt: skip


# ---- drafts of a chosen quality ----


@dataclass(frozen=True)
class Oracle(Stateless):
    """Drafts that are right with a given probability. params: answer [length] int32 and rate (), see `set_drafts`.

    Every request has the same prompt and answer; which drafts are spoilt depends on its seed and place.
    """

    num_speculative_tokens: int
    length: int

    @classmethod
    def make(cls, config: Any, target: Any) -> Oracle:
        return cls(config.max_drafts, target.max_model_len)

    def with_num_speculative_tokens(self, count: int) -> Oracle:
        return replace(self, num_speculative_tokens=count)

    def load_params(self, target_params: Any, mesh: Any) -> Any:
        return {"answer": jnp.zeros(self.length, jnp.int32), "rate": jnp.float32(0)}

    def propose(self, params: Any, kv: None, context: Any, mesh: Any) -> Proposal:
        k = self.num_speculative_tokens
        place = context.num_tokens[:, None] - context.prompt_len[:, None] + jnp.arange(k)
        right = params["answer"][jnp.clip(place, 0, self.length - 1)]

        def uniform(seed: jax.Array, place: jax.Array) -> jax.Array:
            return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(seed), place), (k,))

        spoilt = jax.vmap(uniform)(context.seed, context.num_tokens) >= params["rate"]
        return Proposal(cut(jnp.where(spoilt, (right + 1) % 1000, right), context), None, kv)


def run_surface(args: argparse.Namespace) -> dict[str, Any]:
    speculation = {"method": "custom", "proposer": Oracle.make, "num_speculative_tokens": "auto"}
    llm = make_llm(speculation, args.dtype, max(args.batch), args.surface_tokens)
    counts = llm.engine._speculation.draft_counts
    prompt = encoded(llm.get_tokenizer(), OPEN[:1])[0]
    use(llm, 0)
    answer = timed(llm, [prompt], args.surface_tokens)[2][0]
    rows = []
    for batch, rate in itertools.product(args.batch, args.rates):
        set_drafts(llm, answer, rate)
        rows += one_surface_case(llm, counts, [prompt] * batch, rate, args)
        print(f"{batch} requests, rate {rate}: {[r['speedup'] for r in rows[-1 - len(counts) :]]}", flush=True)
    times = step_times(rows, args.rates)
    fit = fit_step_time(*(np.array(column, float) for column in zip(*times, strict=True)))
    llm.shutdown()
    result = {"rows": rows, "ridge_rows": fit.ridge, "step": vars(fit), "counts": list(counts)}
    print_surface(result, fit)
    return result


def use(llm: LLM, choice: int | AutoK) -> None:
    """A fixed K, or what `choice` says and learns."""
    automatic = isinstance(choice, AutoK)
    speculation: Any = llm.engine._speculation
    speculation._auto = choice if automatic else None
    speculation.drafts_for = choice.choose if automatic else lambda num_running: choice


def set_drafts(llm: LLM, answer: list[int], rate: float) -> None:
    runner = llm.engine.runner
    padded = np.zeros(llm.engine.max_model_len, np.int32)
    padded[: len(answer)] = answer
    runner.weights = replace(runner.weights, proposer={"answer": jnp.asarray(padded), "rate": jnp.float32(rate)})


def one_surface_case(
    llm: LLM, counts: Sequence[int], prompts: list[list[int]], rate: float, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every K, and auto once it has seen LEARNING_STEPS, in turn; medians."""
    auto = AutoK(counts, llm.engine.runner.buckets.slots)
    choices: dict[str, int | AutoK] = {f"K={k}": k for k in counts} | {"auto": auto}
    speeds: dict[str, list[float]] = {name: [] for name in choices}
    lengths: dict[str, float] = {}
    for turn in range(args.rounds + 1):
        for name, choice in choices.items():
            use(llm, choice)
            while choice is auto and auto.num_observed < LEARNING_STEPS:
                timed(llm, prompts, args.surface_tokens)
            speed, found, _ = timed(llm, prompts, args.surface_tokens)
            lengths[name] = found.mean_acceptance_length if found.num_drafts else 1.0
            if turn:
                speeds[name].append(speed)
    base = statistics.median(speeds["K=0"])
    return [
        {"batch": len(prompts), "rate": rate, "choice": name, "tokens_per_s": round(statistics.median(values), 1),
         "speedup": round(statistics.median(values) / base, 3), "acceptance_length": round(lengths[name], 2)}
        for name, values in speeds.items()
    ]  # fmt: skip


def step_times(rows: list[dict[str, Any]], rates: Sequence[float]) -> list[tuple[int, int, float]]:
    """(rows, drafts, seconds) of a step for every batch and K, from the speeds at the highest rate."""
    return [
        (r["batch"] * (1 + int(r["choice"][2:])), int(r["choice"][2:]),
         r["batch"] * r["acceptance_length"] / r["tokens_per_s"])
        for r in rows
        if r["choice"] != "auto" and r["rate"] == max(rates)
    ]  # fmt: skip


def predicted(fit: StepTime, batch: int, rate: float, k: int) -> float:
    """The speed-up over K = 0 by the arithmetic."""
    tokens = expected_tokens(np.full(max(k, 1), rate))[k]
    t0, t = (float(fit(np.array(batch * (1 + drafts)), np.array(drafts))) for drafts in (0, k))
    return float(tokens * t0 / t)


def print_surface(result: dict[str, Any], fit: StepTime) -> None:
    ks = [f"K={k}" for k in result["counts"]]
    print(f"\nspeed-up over K=0, measured (by the arithmetic); T_ridge = {result['ridge_rows']:.1f} rows a step here")
    print(f"{'B':>3}{'rate':>6}" + "".join(f"{k:>14}" for k in ks[1:]) + f"{'auto':>8}{'auto / best':>13}")
    for (batch, rate), group in itertools.groupby(result["rows"], key=lambda r: (r["batch"], r["rate"])):
        speed = {r["choice"]: r["speedup"] for r in group}
        cells = "".join(f"{speed[k]:>7.2f} ({predicted(fit, batch, rate, int(k[2:])):.2f})" for k in ks[1:])
        best = max(speed[k] for k in ks)
        print(f"{batch:>3}{rate:>6.2f}{cells}{speed['auto']:>8.2f}{speed['auto'] / best:>13.2f}")


def plot(result: dict[str, Any], file: Path) -> None:
    """Speed-up against K, a panel for each batch size, a colour for each rate; dashed: the arithmetic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows, fit = result["rows"], StepTime(**result["step"])
    batches, rates = (sorted({r[name] for r in rows}) for name in ("batch", "rate"))
    figure, panels = plt.subplots(1, len(batches), figsize=(4.5 * len(batches), 4), sharey=True, squeeze=False)
    for batch, axes in zip(batches, panels[0], strict=True):
        for rate, colour in zip(rates, plt.get_cmap("viridis")(np.linspace(0, 0.85, len(rates))), strict=True):
            cells = [r for r in rows if (r["batch"], r["rate"]) == (batch, rate)]
            fixed = [(int(r["choice"][2:]), r["speedup"]) for r in cells if r["choice"] != "auto"]
            axes.plot(*zip(*fixed, strict=True), "o-", color=colour, label=f"acceptance {rate}")
            line = [(k, predicted(fit, batch, rate, k)) for k, _ in fixed]
            axes.plot(*zip(*line, strict=True), "--", color=colour, alpha=0.6)
            axes.axhline(next(r["speedup"] for r in cells if r["choice"] == "auto"), color=colour, lw=0.6, ls=":")
        axes.axhline(1, color="black", lw=0.8)
        ridge = result["ridge_rows"] / batch - 1
        if 0 < ridge < result["counts"][-1]:
            axes.axvline(ridge, color="red", lw=0.8)
        axes.set(title=f"{batch} requests", xlabel="drafts K")
    panels[0][0].set_ylabel("speed-up over K = 0\n(dashed: arithmetic, dotted: auto, red: T_ridge)")
    panels[0][-1].legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("texts", "surface"), default=["texts", "surface"])
    parser.add_argument("--prompts", nargs="+", choices=tuple(PROMPTS), default=list(PROMPTS), help="of the texts")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.3, 0.6, 0.9], help="acceptance of a draft")
    parser.add_argument("--surface-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--eagle", help="directory of an EAGLE head for the demo model")
    add_peers_option(parser, "vLLM")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw the surface (needs matplotlib, extra bench)")
    args = parser.parse_args()
    print(f"SmolLM2-135M-Instruct, {args.dtype}, jax {jax.__version__} on {jax.devices()[0].device_kind}")
    print(subprocess.run(["uptime"], capture_output=True, text=True, check=False).stdout.strip())
    found: dict[str, Any] = {}
    if "texts" in args.parts:
        found["texts"] = run_texts(args)
    if "surface" in args.parts:
        found["surface"] = run_surface(args)
        if args.plot:
            plot(found["surface"], args.plot)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
