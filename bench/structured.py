"""What structured output costs and gains: tokens per second with and without it, taking turns in one run.

    python bench/structured.py [--batch 1 8 32 64] [--tokens 64] [--rounds 5] [--json FILE]
    python bench/structured.py --peers DIR                  also vLLM, whose grammars are xgrammar's
    python bench/structured.py --tekken FILE                on Mistral's vocabulary, with random weights

On the demo model unless --tekken names a file in Mistral's format (one comes with the package mistral-common). Every
mode makes the same number of tokens of the same prompt, one token a step but where a grammar forces drafts:

    free           no grammar
    table          a regular expression that no text leaves early, held by a table on the device
    matcher        the same language, held by a matcher on the host
    json           JSON objects with long keys, held by a table
    json matcher   the same, held by a matcher
    json + K       held by a table, with drafts of what the grammar forces (--forced K)
    matcher + K    the same by a matcher

The second table says what a grammar costs the host in a step, matchers' masks alone, and how much is sent to the
device; the third what compiling costs the first token of a prompt that is computed meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from peer import Peer, add_peers_option, installed
from structured_compile import tekken_vocabulary
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import models
from jaxserve import LLM, SamplingParams, StructuredOutputsParams
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
RECORDS = {"type": "array", "items": OBJECT, "minItems": 2, "maxItems": 2}
LONG = {"regex": CHARACTERS + "{1,900}"}
JSON: dict[str, Any] = {"json": RECORDS}
TABLE, MATCHER = {"backend": "table"}, {"backend": "llguidance"}
MODES: dict[str, tuple[str, dict[str, Any] | None]] = {  # engine, grammar
    "free": ("plain", None),
    "table": ("plain", LONG | TABLE),
    "matcher": ("plain", LONG | MATCHER),
    "json": ("plain", JSON | TABLE),
    "json matcher": ("plain", JSON | MATCHER),
    "json + K": ("forced", JSON | TABLE),
    "matcher + K": ("forced", JSON | MATCHER),
}
VLLM = {"vllm free": None, "vllm regex": "regex", "vllm json": "json"}
COMPILED: dict[str, dict[str, Any]] = {
    "choice of 3": {"choice": ["positive", "negative", "neutral"]},
    "phone number": {"regex": r"\+[0-9]{1,3} [0-9]{3}-[0-9]{4}"},
    "flat object": {"json": OBJECT},
    "nested object": {"json": {"type": "object", "properties": {"a": OBJECT, "b": OBJECT}, "required": ["a"]}},
    "enum of 200": {"json": {"enum": [f"value {i * 7919}" for i in range(200)]}},
    "any object": {"json_object": True},
    "arithmetic": {"grammar": 'start: term ("+" term)*\nterm: /[0-9]+/ | "(" start ")"'},
}
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    "eos_token_id": 2,
}  # fmt: skip
PROMPT = "List the customers of a bank as JSON records."


def make_engines(args: argparse.Namespace) -> dict[str, LLM]:
    """One without drafts, and one with drafts of what grammars force."""
    model: Any = demo_model_path()
    tokenizer = None
    if args.tekken:
        tokenizer = tekken_tokenizer(args.tekken)
        model = models.from_config(TINY | {"vocab_size": len(tokenizer)})
    common: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": max(args.batch), "enable_prefix_caching": False}
    return {
        name: LLM(model, tokenizer, structured_outputs_config={"num_forced_tokens": forced}, **common)
        for name, forced in (("plain", 0), ("forced", args.forced))
    }


def tekken_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """A file in Mistral's format, which lists tokens by rank, as a byte-level BPE: each token's merges are the pairs of
    earlier tokens that make it."""
    spelled = tekken_vocabulary(file).token_bytes
    alphabet = bytes_to_unicode()
    written = {b: "".join(alphabet[c] for c in b) for b in spelled if b}
    ids = {b: i for i, b in enumerate(spelled) if b}
    special = {f"<special_{i}>": i for i, b in enumerate(spelled) if b is None}
    merges = []
    for token in ids:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ids and token[i:] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(written[left], written[right]) for left, right in pairs]
    backend = Tokenizer(BPE(special | {written[b]: i for b, i in ids.items()}, merges))
    pattern = json.loads(file.read_text())["config"]["pattern"]
    backend.pre_tokenizer = Sequence([Split(Regex(pattern), "isolated"), ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def ask(llm: LLM, prompt: list[int], batch: int, tokens: int, grammar: dict[str, Any] | None) -> dict[str, float]:
    """Output tokens a second, and of a step: microseconds of the host and of its masks, bytes of these."""
    asked = None if grammar is None else StructuredOutputsParams(**grammar)
    params = SamplingParams(
        max_tokens=tokens, ignore_eos=True, temperature=0.7, seed=1, detokenize=False, structured_outputs=asked
    )
    before, started = llm.stats(), time.perf_counter()
    outputs = llm.generate([prompt] * batch, params, use_tqdm=False)
    seconds, after = time.perf_counter() - started, llm.stats()
    made = sum(len(o.outputs[0].token_ids) for o in outputs)
    ended = [o.outputs[0] for o in outputs if len(o.outputs[0].token_ids) < tokens]
    assert not ended, f"a text ended early: {ended[0].finish_reason}, {ended[0].error}, {grammar}"
    steps = after.num_steps - before.num_steps
    return {
        "rate": made / seconds,
        "steps": steps,
        "host_us": 1e6 * (after.host_seconds - before.host_seconds) / steps,
        "mask_us": 1e6 * (after.mask_seconds - before.mask_seconds) / steps,
        "mask_bytes": (after.mask_bytes - before.mask_bytes) / steps,
    }


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


def start_peer(args: argparse.Namespace, prompt: list[int], folder: Path) -> Peer:
    installed(args.peers)
    prompts, grammars = folder / "prompts.json", folder / "grammars.json"
    prompts.write_text(json.dumps([prompt]))
    grammars.write_text(json.dumps({"regex": LONG, "json": JSON}))
    options = ["--structured", str(grammars)]
    return Peer("vllm", args.peers, prompts, args.batch, args.tokens, ["temperature"], options)


def measure(args: argparse.Namespace, engines: dict[str, LLM], prompt: list[int]) -> dict[tuple[str, int], Any]:
    """Medians of every mode and batch; all take turns."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        peer = start_peer(args, prompt, Path(folder)) if args.peers else None
        for batch in args.batch:
            for engine, grammar in [*MODES.values()] * 2:  # compiles grammars and programs before anything is timed
                ask(engines[engine], prompt, batch, args.tokens, grammar)
            for _ in range(args.rounds):
                for mode, (engine, grammar) in MODES.items():
                    figures = ask(engines[engine], prompt, batch, args.tokens, grammar)
                    found.setdefault((mode, batch), []).append(figures)
                for mode, name in VLLM.items() if peer else ():
                    rate = peer.ask(batch, args.tokens, "temperature", structured=name)
                    found.setdefault((mode, batch), []).append({"rate": rate})
            print(f"{batch} requests measured", flush=True)
    return {
        key: {name: statistics.median(f[name] for f in rounds) for name in rounds[0]} for key, rounds in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forced", type=int, default=3, help="K, drafts of what a grammar forces")
    parser.add_argument("--tekken", type=Path, help="a vocabulary in Mistral's format, for a tiny random model")
    add_peers_option(parser, "vLLM")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.peers and args.tekken:
        parser.error("--peers run the demo model, without --tekken")

    engines = make_engines(args)
    llm = engines["plain"]
    if args.tekken:
        prompt = llm.get_tokenizer().encode(PROMPT)
    else:
        prompt = llm.get_tokenizer().apply_chat_template(
            [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=False
        )
    medians = measure(args, engines, prompt)
    vocab = llm.engine.model.vocab_size
    name = "a random model" if args.tekken else "SmolLM2-135M"
    print(f"\n{name}, {vocab} tokens, {args.tokens} of each prompt, {os.cpu_count()} cores, jax {jax.__version__}")
    report(medians, args)
    compiled = compile_times(llm, prompt)
    print("\nFirst token of a prompt of 300 tokens, ms (median of 5): no grammar, a new one, one that is kept")
    for name, row in compiled.items():
        print(f"{name:<16}" + "".join(f"{row[kind]:>10.1f}" for kind in ("free", "first", "kept")))
    if args.json:
        figures = {f"{mode}/{batch}": row for (mode, batch), row in medians.items()}
        args.json.write_text(json.dumps({"rates": figures, "first_token_ms": compiled}, indent=1))
    for engine in engines.values():
        engine.shutdown()


def report(medians: dict[tuple[str, int], dict[str, float]], args: argparse.Namespace) -> None:
    modes = [mode for mode in (*MODES, *VLLM) if (mode, args.batch[0]) in medians]

    def table(title: str, modes: list[str], cell: Any) -> None:
        print(f"\n{title}\n{'B':>4}" + "".join(f"{mode.replace('+ K', f'+ {args.forced}'):>16}" for mode in modes))
        for batch in args.batch:
            print(f"{batch:>4}" + "".join(f"{cell(medians[mode, batch], mode, batch):>16}" for mode in modes))

    def rate(row: dict[str, float], mode: str, batch: int) -> str:
        free = medians["vllm free" if mode in VLLM else "free", batch]["rate"]
        return f"{row['rate']:.1f} {row['rate'] / free:5.2f}"

    table(f"output tokens/s, median of {args.rounds} rounds, and the engine's ratio to no grammar", modes, rate)
    own = list(MODES)
    table(
        "host us a step, of it us of matchers' masks", own, lambda row, *_: f"{row['host_us']:.0f} {row['mask_us']:.0f}"
    )
    table("bytes of masks sent to the device a step", own, lambda row, *_: f"{row['mask_bytes']:.0f}")
    if peers := [mode for mode in VLLM if mode in modes]:
        ours = {"vllm free": "free", "vllm regex": "table", "vllm json": "json + K"}
        ratio = lambda row, mode, batch: f"{medians[ours[mode], batch]['rate'] / row['rate']:.2f}"  # noqa: E731
        table("jaxserve (free, table, json + K) / vLLM", peers, ratio)


if __name__ == "__main__":
    main()
