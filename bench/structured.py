"""What structured output costs and gains: tokens per second with and without it, taking turns in one run.

    python bench/structured.py [--batch 1 8 32] [--tokens 64] [--rounds 5] [--json FILE]

On the demo model. Every mode makes the same number of tokens of the same prompts:

    free         no grammar
    table        a regular expression that no text leaves early, held by a table on the device
    matcher      the same language, held by a matcher on the host
    json         a JSON object with long keys, held by a table, one token a step
    json forced  the same, with drafts of what the grammar forces

The second table says what a grammar costs the host and the link to the device in a step; the third what it takes to
compile, and to the first token of a prompt that is computed meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.engine import EngineStats
from models.gguf import demo_model_path

CHARACTERS = r"[A-Za-z0-9 ,.:;!?'()\n-]"
KEYS = [
    "customer_identification_number",
    "preferred_contact_method",
    "subscription_renewal_date",
    "billing_address_city",
]
OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {
        KEYS[0]: {"type": "integer", "minimum": 0, "maximum": 9999},
        KEYS[1]: {"enum": ["electronic mail", "telephone", "registered letter"]},
        KEYS[2]: {"type": "string", "format": "date"},
        KEYS[3]: {"type": "string", "maxLength": 12},
    },
    "required": KEYS,
    "additionalProperties": False,
}
RECORDS = {"type": "array", "items": OBJECT, "minItems": 12, "maxItems": 12}
LONG = {"regex": CHARACTERS + "{1,900}"}
MODES: dict[str, tuple[str, dict[str, Any] | None]] = {  # engine, grammar
    "free": ("plain", None),
    "table": ("plain", LONG | {"backend": "table"}),
    "matcher": ("plain", LONG | {"backend": "llguidance"}),
    "json": ("plain", {"json": RECORDS, "backend": "table"}),
    "json forced": ("forced", {"json": RECORDS, "backend": "table"}),
}
COMPILED: dict[str, dict[str, Any]] = {
    "choice of 3": {"choice": ["positive", "negative", "neutral"]},
    "phone number": {"regex": r"\+[0-9]{1,3} [0-9]{3}-[0-9]{4}"},
    "flat object": {"json": OBJECT},
    "nested object": {"json": {"type": "object", "properties": {"a": OBJECT, "b": OBJECT}, "required": ["a"]}},
    "enum of 200": {"json": {"enum": [f"value {i * 7919}" for i in range(200)]}},
    "any object": {"json_object": True},
    "arithmetic": {"grammar": 'start: term ("+" term)*\nterm: /[0-9]+/ | "(" start ")"'},
}
PROMPT = "List the customers of a bank as JSON records."


def make_engines(batches: list[int], tokens: int) -> dict[str, LLM]:
    common: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": max(batches), "enable_prefix_caching": False}
    return {
        name: LLM(demo_model_path(), structured_outputs_config={"num_forced_tokens": forced}, **common)
        for name, forced in (("plain", 0), ("forced", tokens))
    }


def ask(llm: LLM, prompt: list[int], batch: int, tokens: int, grammar: dict[str, Any] | None) -> dict[str, float]:
    asked = None if grammar is None else StructuredOutputsParams(**grammar)
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, temperature=0.7, seed=1, detokenize=False, structured_outputs=asked
    )
    before, started = llm.stats(), time.perf_counter()
    outputs = llm.generate([prompt] * batch, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    made = sum(len(o.outputs[0].token_ids) for o in outputs)
    assert made == batch * tokens, "a grammar ended early"
    return {"rate": made / seconds, **_per_step(before, llm.stats())}


def _per_step(before: EngineStats, after: EngineStats) -> dict[str, float]:
    steps = after.num_steps - before.num_steps
    return {"steps": steps, "host_us": 1e6 * (after.host_seconds - before.host_seconds) / steps}


def compile_times(llm: LLM, prompt: list[int], repeats: int = 5) -> dict[str, dict[str, float]]:
    """Milliseconds to the first token of a prompt of 300 tokens: without a grammar, with one for the first time, and
    once it is kept. What a grammar is new by is its stop id."""
    long = (prompt * 40)[:300]
    rows = {}
    number = 0
    for name, grammar in COMPILED.items():
        asked = StructuredOutputsParams(**grammar)
        times: dict[str, list[float]] = {"free": [], "first": [], "kept": []}
        for _ in range(repeats):
            number += 1
            for kind in times:
                params = SamplingParams(
                    max_tokens=1, stop_token_ids=[number], structured_outputs=None if kind == "free" else asked
                )
                started = time.perf_counter()
                llm.generate([long], params, use_tqdm=False)
                times[kind].append(1e3 * (time.perf_counter() - started))
        rows[name] = {kind: statistics.median(values) for kind, values in times.items()}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forced", type=int, default=4, help="drafts of what a grammar forces")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()

    engines = make_engines(args.batch, args.forced)
    llm = engines["plain"]
    prompt = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=False
    )
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for batch in args.batch:
        for engine, grammar in [*MODES.values()] * 2:  # compiles grammars and programs before anything is timed
            ask(engines[engine], prompt, batch, args.tokens, grammar)
        for _ in range(args.rounds):
            for mode, (engine, grammar) in MODES.items():
                figures = ask(engines[engine], prompt, batch, args.tokens, grammar)
                found.setdefault((mode, batch), []).append(figures)
    medians = {
        key: {name: statistics.median(f[name] for f in rounds) for name in rounds[0]} for key, rounds in found.items()
    }
    report(medians, llm.engine.model.vocab_size, args)
    compiled = compile_times(llm, prompt)
    print("\nFirst token of a prompt of 300 tokens, ms (median of 5): no grammar, a new one, one that is kept")
    for name, row in compiled.items():
        print(f"{name:<16}" + "".join(f"{row[kind]:>10.1f}" for kind in ("free", "first", "kept")))
    if args.json:
        figures = {f"{mode}/{batch}": row for (mode, batch), row in medians.items()}
        args.json.write_text(json.dumps({"rates": figures, "first_token_ms": compiled}, indent=1))


def report(medians: dict[tuple[str, int], dict[str, float]], vocab: int, args: Any) -> None:
    print(f"\nSmolLM2-135M, {args.tokens} tokens of each prompt, {os.cpu_count()} cores")
    print(f"output tokens/s, median of {args.rounds} rounds, and the ratio to no grammar")
    print(f"{'B':>4}" + "".join(f"{mode:>20}" for mode in MODES))
    for batch in args.batch:
        free = medians["free", batch]["rate"]
        cells = [f"{medians[mode, batch]['rate']:>12.1f} {medians[mode, batch]['rate'] / free:>7.2f}" for mode in MODES]
        print(f"{batch:>4}" + "".join(cells))
    print("\nhost us a step, and bytes of masks sent to the device a step")
    print(f"{'B':>4}" + "".join(f"{mode:>20}" for mode in MODES))
    for batch in args.batch:
        sent = {"matcher": batch * -(-vocab // 32) * 4}
        cells = [f"{medians[mode, batch]['host_us']:>11.0f} {sent.get(mode, 0):>8}" for mode in MODES]
        print(f"{batch:>4}" + "".join(cells))


if __name__ == "__main__":
    main()
