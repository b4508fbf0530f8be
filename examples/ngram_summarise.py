"""Where n-gram speculation pays: answers that quote the prompt. The same words, in fewer steps.

    python examples/ngram_summarise.py                      the demo model SmolLM2-135M-Instruct, if installed
    python examples/ngram_summarise.py --model PATH         a Hugging Face directory or a .gguf file
    python examples/ngram_summarise.py --method suffix      drafts by frequency, also from earlier answers

The model is asked to summarise a report and to quote from it. Drafts are what followed, earlier in the text, the words
that were just said: no second model, no training. The answer is generated twice, without and with drafts; both are
timed after a first run that compiles.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from jaxserve import LLM, RequestOutput, SamplingParams
from models.gguf import demo_model_path

REPORT = """\
The harbour bridge was closed on Monday after an inspection found cracks in two of its eleven steel beams. Engineers \
said that the cracks were caused by salt water that had reached the steel through broken paint. The city council voted \
to spend four million dollars on the repair, which will take nine weeks. Until the bridge opens again, buses will use \
the tunnel under the river, and the ferry will run every ten minutes from six in the morning until midnight. Shop \
owners near the bridge asked the council for help, because they expect to lose a third of their customers. The council \
promised to decide about their request at its next meeting on the first of March."""
QUESTION = "Repeat this report word for word, then summarise it in one sentence.\n\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--method", choices=("ngram", "suffix"), default="ngram")
    parser.add_argument("--drafts", type=int, default=7, help="a step, at most (default: 7)")
    parser.add_argument("--max-tokens", type=int, default=220, help="of the answer (default: 220)")
    args = parser.parse_args(argv)
    model = args.model or demo_model_path()
    if model is None:
        parser.error("the demo model is not installed: give --model PATH")
    speculation: dict[str, Any] = {"method": args.method, "num_speculative_tokens": args.drafts}
    if args.method == "ngram":
        speculation |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    plain, plain_seconds = answer(model, None, args.max_tokens)
    drafted, seconds = answer(model, speculation, args.max_tokens)
    report(plain, plain_seconds, drafted, seconds)


def answer(model: Any, speculation: dict[str, Any] | None, max_tokens: int) -> tuple[RequestOutput, float]:
    """The model's answer, and the seconds it took once everything was compiled."""
    llm = LLM(model, max_model_len=1024, max_num_seqs=1, speculative_config=speculation, enable_prefix_caching=False)
    messages = [{"role": "user", "content": QUESTION + REPORT}]
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    llm.chat(messages, params, use_tqdm=False)
    started = time.perf_counter()
    output = llm.chat(messages, params, use_tqdm=False)[0]
    seconds = time.perf_counter() - started
    llm.shutdown()
    return output, seconds


def report(plain: RequestOutput, plain_seconds: float, drafted: RequestOutput, seconds: float) -> None:
    metrics, count = drafted.metrics, len(drafted.outputs[0].token_ids)
    assert metrics is not None
    print(drafted.outputs[0].text.strip())
    print(f"\nwithout drafts  {count / plain_seconds:8.1f} tokens/s")
    print(f"with drafts     {count / seconds:8.1f} tokens/s, {plain_seconds / seconds:.2f} times as fast")
    print(f"drafts          {metrics.num_accepted_tokens} of {metrics.num_draft_tokens} accepted")
    same = plain.outputs[0].token_ids == drafted.outputs[0].token_ids
    print(f"the answer      {'the same' if same else 'NOT the same'} token for token")


if __name__ == "__main__":
    main()
