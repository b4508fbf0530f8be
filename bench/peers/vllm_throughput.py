"""Output tokens per second of vLLM on a CPU, run by the python of vLLM's own environment.

Loads the model once, warms up, prints "ready" and then answers one JSON line per JSON line on stdin, until end of file:

    {"batch": 8, "tokens": 64, "sampling": "greedy"}  ->  {"tokens_per_s": 230.1, "seconds": 2.225}

so that a driver can keep several peers alive and ask them in turn. With "structured": NAME beside them, output is held
to a grammar of --structured FILE, a JSON object of StructuredOutputsParams by name. With --rounds N it asks itself
instead: N rounds over every sampling and batch size, one JSON line each. The time is that of the whole call, prefill
included.
"""

import argparse
import itertools
import json
import os
import sys
import time
from typing import Any, TextIO

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "temperature": {"temperature": 0.7},
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",  # two threads, on cores 0 and 1
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Peer:
    def __init__(
        self,
        model: str,
        prompts: list[list[int]],
        speculation: dict[str, Any] | None,
        grammars: dict[str, dict[str, Any]],
    ) -> None:
        from vllm import LLM

        self.prompts, self.grammars = prompts, grammars
        self.llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=2048,
            enable_prefix_caching=False,  # every round sends the same prompts
            generation_config="vllm",  # no sampling defaults from the model's folder
            speculative_config=speculation,
        )

    def run(self, batch: int, tokens: int, sampling: str, structured: str | None = None) -> dict[str, float]:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **SAMPLING[sampling])
        if structured is not None:
            params.structured_outputs = StructuredOutputsParams(**self.grammars[structured])
        prompts = [{"prompt_token_ids": ids} for ids in itertools.islice(itertools.cycle(self.prompts), batch)]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(output.outputs[0].token_ids) for output in outputs] == [tokens] * batch
        return {"tokens_per_s": round(batch * tokens / seconds, 2), "seconds": round(seconds, 4)}


def claim_stdout() -> TextIO:
    """Returns the real stdout and sends whatever else is printed there, by child processes too, to stderr."""
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
    parser.add_argument("--speculative-config", type=json.loads, help="vLLM's option of that name: a JSON object")
    parser.add_argument("--structured", help="JSON file: grammars by name")
    parser.add_argument("--rounds", type=int, default=0, help="measure N times and exit; 0: serve stdin")
    args = parser.parse_args()

    out = claim_stdout()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with open(args.prompts, encoding="utf-8") as file:
        prompts = json.load(file)
    grammars = {}
    if args.structured:
        with open(args.structured, encoding="utf-8") as file:
            grammars = json.load(file)
    peer = Peer(args.model, prompts, args.speculative_config, grammars)
    cases: list[dict[str, Any]] = [
        {"batch": batch, "tokens": args.tokens, "sampling": sampling}
        for sampling in args.sampling
        for batch in args.batch
    ]
    for case in cases:
        peer.run(**case)
    for name in grammars:
        peer.run(**cases[0], structured=name)
    print("ready", file=out)
    if args.rounds:
        for case in cases * args.rounds:
            print(json.dumps(case | peer.run(**case)), file=out)
    else:
        for line in sys.stdin:
            print(json.dumps(peer.run(**json.loads(line))), file=out)


if __name__ == "__main__":
    main()
