"""Output tokens per second of transformers' `generate` on a CPU, run by the python of its own environment.

Loads the model once, warms up, prints "ready" and then answers one JSON line per JSON line on stdin, until end of file:

    {"batch": 8, "tokens": 64, "sampling": "greedy"}  ->  {"tokens_per_s": 130.1, "seconds": 3.935}

so that a driver can keep several peers alive and ask them in turn. With --rounds N it asks itself instead: N rounds
over every sampling and batch size, one JSON line each. The time is that of the whole call, prefill included.
"""

import argparse
import itertools
import json
import os
import sys
import time
from typing import Any, TextIO

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "top_p": {"do_sample": True, "temperature": 1.0, "top_p": 0.9, "top_k": 0},
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
}


class Peer:
    def __init__(self, model: str, prompts: list[list[int]]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.prompts = prompts
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.model.generation_config.eos_token_id = None  # never stops early

    def run(self, batch: int, tokens: int, sampling: str) -> dict[str, float]:
        import torch

        prompts = list(itertools.islice(itertools.cycle(self.prompts), batch))
        width = max(map(len, prompts))
        start = time.perf_counter()
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        outputs = self.model.generate(ids, attention_mask=mask, max_new_tokens=tokens, **SAMPLING[sampling])
        seconds = time.perf_counter() - start
        assert outputs.shape == (batch, width + tokens)
        return {"tokens_per_s": round(batch * tokens / seconds, 2), "seconds": round(seconds, 4)}


def claim_stdout() -> TextIO:
    """Returns the real stdout and sends whatever else is printed there to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder: config, safetensors, tokenizer")
    parser.add_argument("--prompts", required=True, help="JSON file: a list of prompts, each a list of token ids")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="batch sizes to warm up")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each prompt")
    parser.add_argument("--sampling", nargs="+", choices=list(SAMPLING), default=["greedy"], help="kinds to warm up")
    parser.add_argument("--rounds", type=int, default=0, help="measure N times and exit; 0: serve stdin")
    args = parser.parse_args()

    out = claim_stdout()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with open(args.prompts, encoding="utf-8") as file:
        peer = Peer(args.model, json.load(file))
    cases: list[dict[str, Any]] = [
        {"batch": batch, "tokens": args.tokens, "sampling": sampling}
        for sampling in args.sampling
        for batch in args.batch
    ]
    for case in cases:
        peer.run(**case)
    print("ready", file=out)
    if args.rounds:
        for case in cases * args.rounds:
            print(json.dumps(case | peer.run(**case)), file=out)
    else:
        for line in sys.stdin:
            print(json.dumps(peer.run(**json.loads(line))), file=out)


if __name__ == "__main__":
    main()
