"""Speculation with heads and draft models, from checkpoints in their published layouts to LLM's outputs.

Weights are random, so drafts are seldom right: what is tested is that they change nothing, whatever happens meanwhile.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxserve import LLM, LogitsProcessor, Row, SamplingParams
from jaxserve.speculative.config import AUTO_DRAFTS
from jaxserve.speculative.ngram import NgramProposer

V, D, LAYERS, DRAFT_V = 16, 16, 2, 9
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "intermediate_size": 24,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": LAYERS, "vocab_size": V,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "eos_token_id": 0,
}  # fmt: skip
PROMPTS = [[1, 2], [3], [4, 5, 4, 5], [*range(1, 15), *range(1, 15), 6, 7, 3, 2], [7, 8, 9, 7, 8, 9, 7, 8]]
REQUESTS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=25, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=30, frequency_penalty=0.7, presence_penalty=-0.3, repetition_penalty=1.2),
    SamplingParams(seed=3, max_tokens=40, top_k=4, min_p=0.02, min_tokens=12, stop_token_ids=[2, 5]),
    SamplingParams(seed=4, max_tokens=30, top_p=0.9, logit_bias={3: 2.0, 7: -4.0}, bad_words=["bc", "d"]),
    SamplingParams(seed=5, max_tokens=30, thinking_token_budget=3, temperature=0.8, ignore_eos=True),
    SamplingParams(seed=6, max_tokens=30, extra_args={"step": 5}, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=30, allowed_token_ids=[1, 2, 3, 4, 6], frequency_penalty=2.0),
]
DOCS = Path(__file__).parents[2] / "docs" / "speculative.md"
METHODS = ("eagle", "eagle3", "medusa", "mtp", "draft_model")


class Every(LogitsProcessor):
    """Every extra_args["step"]-th token is forced to be token 0."""

    arguments = ("step",)

    def row(self, params: SamplingParams) -> Any | None:
        step = (params.extra_args or {}).get("step")
        return None if step is None else np.int32(step)

    def empty_row(self) -> Any:
        return np.int32(0)

    def apply(self, logits: Any, row: Row) -> Any:
        forced = (row.output_len + 1) % jnp.maximum(row.params, 1) == 0
        return jnp.where(forced & (jnp.arange(logits.shape[0]) != 0), -jnp.inf, logits)


# ---- checkpoints ----

LINEARS = {
    "self_attn.q_proj": (16, D), "self_attn.k_proj": (8, D), "self_attn.v_proj": (8, D), "self_attn.o_proj": (D, 16),
    "mlp.gate_proj": (24, D), "mlp.up_proj": (24, D), "mlp.down_proj": (D, 24),
}  # fmt: skip
QKV = ("q_proj", "k_proj", "v_proj")


class Weights:
    """Random tensors by name, and the directory they are written to."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.tensors, self._random = directory, {}, np.random.default_rng(seed)

    def linear(self, name: str, rows: int, columns: int, scale: float = 1.5) -> None:
        values = scale * self._random.standard_normal((rows, columns)) / columns**0.5
        self.tensors[f"{name}.weight"] = values.astype(np.float32)

    def norms(self, *names: str) -> None:
        for name in names:
            self.tensors[f"{name}.weight"] = (1 + 0.2 * self._random.standard_normal(D)).astype(np.float32)

    def layer(self, prefix: str, *norms: str, attention_width: int = D) -> None:
        for name, (rows, columns) in LINEARS.items():
            self.linear(
                prefix + name, rows, attention_width if name.endswith(("q_proj", "k_proj", "v_proj")) else columns
            )
        self.norms(*(prefix + name for name in norms))

    def model(self, layers: int) -> None:
        self.linear("model.embed_tokens", V, D)
        self.linear("lm_head", V, D, scale=3.0)
        self.norms("model.norm")
        for i in range(layers):
            self.layer(f"model.layers.{i}.", "input_layernorm", "post_attention_layernorm")

    def write(self, config: dict[str, Any]) -> str:
        self.directory.mkdir()
        save_file(self.tensors, self.directory / "model.safetensors")
        (self.directory / "config.json").write_text(json.dumps(config))
        return str(self.directory)


def write_eagle(path: Path) -> str:
    weights = Weights(path, 1)
    weights.linear("fc", D, 2 * D)
    weights.layer("layers.0.", "post_attention_layernorm")
    return weights.write(CONFIG | {"num_hidden_layers": 1, "bias": False})


def write_eagle3(path: Path) -> str:
    weights = Weights(path, 2)
    weights.linear("fc", D, 3 * D)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    weights.layer("midlayer.", *norms, attention_width=2 * D)
    weights.norms("norm")
    weights.linear("lm_head", DRAFT_V, D, scale=3.0)
    ids = np.sort(np.random.default_rng(3).permutation(V)[:DRAFT_V])
    weights.tensors |= {"d2t": ids - np.arange(DRAFT_V), "t2d": np.isin(np.arange(V), ids)}
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 0, 1]}
    changes = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT_V}
    return weights.write(CONFIG | changes | {"eagle_config": layers})


def write_medusa(path: Path, heads: int = 7) -> str:
    weights = Weights(path, 4)
    for i in range(heads):
        weights.linear(f"{i}.0.linear", D, D)
        weights.tensors[f"{i}.0.linear.bias"] = np.full(D, 0.1, np.float32)
        weights.linear(f"{i}.1", V, D, scale=3.0)
    return weights.write({"medusa_num_heads": heads, "medusa_num_layers": 1, "hidden_size": D, "vocab_size": V})


def add_mtp(weights: Weights) -> None:
    """The module as one more layer of the target's own checkpoint."""
    prefix = f"model.layers.{LAYERS}."
    weights.linear(prefix + "eh_proj", D, 2 * D)
    weights.layer(prefix, "input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm")
    weights.tensors[prefix + "embed_tokens.weight"] = weights.tensors["model.embed_tokens.weight"]
    weights.tensors[prefix + "shared_head.head.weight"] = weights.tensors["lm_head.weight"]


def write_model(path: Path, seed: int, layers: int, mtp: bool = False) -> str:
    weights = Weights(path, seed)
    weights.model(layers)
    if mtp:
        add_mtp(weights)
    tokenizer = Tokenizer(models.WordLevel({chr(ord("a") + i): i for i in range(V)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    written = weights.write(CONFIG | {"num_hidden_layers": layers} | ({"num_nextn_predict_layers": 1} if mtp else {}))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return written


@pytest.fixture(scope="module")
def paths(tmp_path_factory: Any) -> dict[str, str]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "target": write_model(root / "target", 0, LAYERS, mtp=True),
        "draft_model": write_model(root / "draft_model", 5, 1),
        "eagle": write_eagle(root / "eagle"),
        "eagle3": write_eagle3(root / "eagle3"),
        "medusa": write_medusa(root / "medusa"),
    }


@pytest.fixture(scope="module")
def make_llm(paths: dict[str, str]) -> Callable[..., LLM]:
    """An LLM that drafts by a method (None: none); keywords are LLM's, those in `speculation` the configuration's.

    Four requests run at once, memory and token budget are short: prompts come in chunks, and requests are preempted.
    """

    def make(method: str | None, speculation: dict[str, Any] | None = None, **config: Any) -> LLM:
        asked = None
        if method is not None:
            asked = {"method": method, "num_speculative_tokens": 3} | (speculation or {})
            if method in paths:
                asked = {"model": paths[method]} | asked
        drafts = asked["num_speculative_tokens"] if asked else 0
        drafts = AUTO_DRAFTS if drafts == "auto" else drafts
        defaults = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "num_blocks": 8}
        defaults |= {"max_num_batched_tokens": 4 * (1 + drafts) + 17, "logits_processors": [Every]}
        defaults |= {"reasoning_config": {"start": [9], "end": [10, 11]}, "speculative_config": asked}
        return LLM(paths["target"], **(defaults | config))

    return make


@pytest.fixture(scope="module")
def served(make_llm: Callable[..., LLM]) -> Callable[[str, int], LLM]:
    """One LLM for each method and K."""
    return functools.cache(lambda method, k: make_llm(method, {"num_speculative_tokens": k}))


def answers(llm: LLM) -> list[tuple[list[int], str | None]]:
    """Of all requests, after which every page must be free again."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(2 * len(REQUESTS))]
    outputs = [o.outputs[0] for o in llm.generate(prompts, REQUESTS * 2, use_tqdm=False)]
    pool = llm.engine.kv.pool
    assert pool.num_free == pool.num_usable
    return [(o.token_ids, o.finish_reason) for o in outputs]


@pytest.fixture(scope="module")
def plain(make_llm: Callable[..., LLM]) -> list[tuple[list[int], str | None]]:
    return answers(make_llm(None, num_blocks=40))


# ---- speculation changes nothing ----


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("method", METHODS)
def test_the_tokens_are_those_without_speculation(served: Any, plain: Any, method: str, k: int) -> None:
    """With preemption and prompts in chunks; and in a second round with pages from the cache."""
    llm = served(method, k)
    assert answers(llm) == plain
    stats = llm.stats()
    assert stats.scheduler.num_preemptions > 0
    for cached in (0, 16):
        prompt = {"prompt_token_ids": PROMPTS[3], "cache_salt": "new"}
        again = llm.generate(prompt, REQUESTS[3], use_tqdm=False)[0]
        assert (again.num_cached_tokens, again.outputs[0].token_ids) == (cached, plain[3][0])
    assert stats.speculation.num_drafts > 50
    assert stats.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_aborts_with_drafts_in_flight_leak_nothing(served: Any, plain: Any, method: str) -> None:
    llm = served(method, 3)
    random, engine = np.random.default_rng(0), llm.engine
    for i in range(12):
        engine.add_request(f"a{i}", PROMPTS[i % len(PROMPTS)], REQUESTS[i % len(REQUESTS)])
        for _ in range(int(random.integers(0, 4))):
            engine.step()
        if i % 2:
            engine.abort([f"a{random.integers(0, i + 1)}"])
    engine.abort([f"a{i}" for i in range(12)])
    assert answers(llm) == plain  # which looks for pages that are not free


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize(
    ("method", "speculation"),
    [
        *((method, {}) for method in ("eagle", "medusa", "draft_model")),
        *((method, {"draft_tensor_parallel_size": 1}) for method in ("eagle3", "draft_model")),
        ("ngram", {"prompt_lookup_min": 1, "prompt_lookup_max": 3}),
    ],
)
def test_the_tokens_are_those_of_one_device(
    make_llm: Any, plain: Any, method: str, speculation: dict[str, Any]
) -> None:
    """With the target over two devices, and the proposer over both or copied to each."""
    llm = make_llm(method, speculation, tensor_parallel_size=2)
    assert answers(llm) == plain
    assert llm.stats().speculation.num_accepted_tokens > 0


def test_a_proposer_of_ones_own(make_llm: Any, plain: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """The example of the documentation, and one by the name of an entry point."""
    code = next(block for block in DOCS.read_text().split("```") if "class Again" in block).removeprefix("python")
    names: dict[str, Any] = {"__name__": __name__}
    exec(code, names)
    llm = make_llm("custom", names["speculative_config"])
    assert answers(llm) == plain
    assert llm.stats().speculation.num_accepted_tokens > 0
    (tmp_path / "again.py").write_text(
        "from jaxserve.speculative.ngram import NgramProposer\n"
        "def make(config, target): return NgramProposer(config.max_drafts, 1, 2)\n"
    )
    info = tmp_path / "again-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: again\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jaxserve.proposers]\nagain = again:make\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(make_llm("custom", {"proposer": "again"}).engine.runner.parts.proposer, NgramProposer)


@pytest.mark.parametrize(
    ("method", "speculation"),
    [
        ("eagle3", {}),
        ("mtp", {"rejection_sample_method": "block"}),
        ("medusa", {"rejection_sample_method": "standard"}),
        ("draft_model", {"draft_sample_method": "probabilistic"}),
        ("suffix", {}),
        ("medusa", {"num_speculative_tokens": "auto"}),  # of 0 to 2: there are two heads
    ],
    ids=lambda x: x if isinstance(x, str) else "_".join(map(str, x.values())),
)
def test_nothing_is_compiled_after_warm_up(
    make_llm: Any, compilations: list[str], tmp_path: Path, method: str, speculation: dict[str, Any]
) -> None:
    if method == "medusa":
        speculation = speculation | {"model": write_medusa(tmp_path / "two", 2)}
    llm = make_llm(method, {"num_speculative_tokens": 2} | speculation, max_num_seqs=1, max_model_len=56)
    llm.warmup(progress=False)
    del compilations[:]
    answers(llm)
    assert compilations == []
    assert llm.stats().compilations == 0


# ---- drafts that are drawn ----


@pytest.mark.parametrize(("method", "verification"), [("eagle3", "block"), ("medusa", "standard")])
def test_drawn_drafts_leave_the_distribution(make_llm: Any, triples: Any, method: str, verification: str) -> None:
    """Three tokens behind a prompt, of many requests: greedy ones as without drafts, others as often."""
    speculation = {"draft_sample_method": "probabilistic", "rejection_sample_method": verification}
    llm = make_llm(method, speculation, num_blocks=40, max_num_batched_tokens=200)  # four requests in step
    counts, greedy = triples(llm)
    expected, expected_greedy = triples(None)
    assert greedy == expected_greedy
    assert llm.stats().speculation.num_accepted_tokens > 100
    often = counts + expected >= 10
    table = [[*row[often], row[~often].sum() + 1] for row in (counts, expected)]
    p = scipy.stats.chi2_contingency(table).pvalue
    assert p > 1e-4, p


@pytest.fixture(scope="module")
def triples(make_llm: Any) -> Callable[[LLM | None], tuple[np.ndarray, list[int]]]:
    """How often each string of three tokens comes (None: without drafts), and a greedy output."""

    def count(llm: LLM) -> tuple[np.ndarray, list[int]]:
        params = SamplingParams(n=1200, seed=7, top_k=5, temperature=3.0, max_tokens=3, ignore_eos=True)
        greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        many, one = llm.generate([[1, 2, 3]] * 2, [params, greedy], use_tqdm=False)
        counts = np.zeros((V,) * 3, int)
        np.add.at(counts, tuple(np.array([o.token_ids for o in many.outputs]).T), 1)
        return counts, one.outputs[0].token_ids

    plain = count(make_llm(None, num_blocks=40))
    return lambda llm: plain if llm is None else count(llm)


def test_automatic_drafts_are_as_many_as_there_are_heads(make_llm: Any, plain: Any, tmp_path: Path) -> None:
    few = {"model": write_medusa(tmp_path / "few", 4), "num_speculative_tokens": "auto"}
    llm = make_llm("medusa", few)
    assert answers(llm) == plain
    assert len(llm.stats().speculation.num_accepted_tokens_per_pos) == 4
    with pytest.raises(ValueError, match=r"num_speculative_tokens .*\[0, 4\]"):
        make_llm("medusa", few | {"num_speculative_tokens": 5})


# ---- what heads are given ----


def write_echo(path: Path, method: str, target: str) -> str:
    """Heads that hand their hidden state through to the target's lm_head: K times they draft its newest choice."""
    lm_head = load_file(Path(target) / "model.safetensors")["lm_head.weight"]
    if method == "medusa":
        written = Path(write_medusa(path, 3))
        tensors = load_file(written / "model.safetensors")
        tensors |= {name: np.zeros_like(x) for name, x in tensors.items() if ".0.linear" in name}
        tensors |= {f"{i}.1.weight": lm_head for i in range(3)}
    else:
        written = Path(write_eagle(path))
        tensors = load_file(written / "model.safetensors")
        tensors |= {name: np.zeros_like(x) for name, x in tensors.items() if "o_proj" in name or "down_proj" in name}
        tensors["fc.weight"] = np.eye(D, 2 * D, D, dtype=np.float32)
    save_file(tensors, written / "model.safetensors")
    return str(written)


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_heads_are_given_the_hidden_state_of_the_newest_token(
    make_llm: Any, paths: Any, tmp_path: Path, method: str
) -> None:
    """Whatever was accepted of the window before, after chunks of prefill, and behind preemption."""
    llm = make_llm(method, {"model": write_echo(tmp_path / "echo", method, paths["target"])})
    runner, seen = llm.engine.runner, Counter[int]()
    sample = runner.sample

    def watch(flight: Any) -> Any:
        logits = np.asarray(flight.logits).reshape(len(flight.run), -1, V) if flight.rows else None
        errors = sample(flight)
        drafts = np.array(runner.batch.drafts)
        for row, request in flight.rows:
            count = int(flight.output.n_emitted[row])
            drafted = drafts[row][drafts[row] >= 0].tolist()
            if not request.status.is_finished and count:
                assert drafted == [int(np.argmax(logits[row, count - 1]))] * len(drafted)
                seen[count] += len(drafted)
        return errors

    runner.sample = watch
    greedy = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    params = [SamplingParams(**greedy), SamplingParams(**greedy, logit_bias={5: 100}), SamplingParams(**greedy)]
    llm.generate([[1, 2, 3], [4] * 25, list(range(12))] * 2, params * 2, use_tqdm=False)
    assert llm.engine.scheduler.stats().num_preemptions > 0
    assert seen[1] > 60
    assert seen[4] > 12  # all three drafts were right


# ---- what is accepted, and what is reused ----


@pytest.mark.parametrize(("draft", "low", "high"), [("target", 1.0, 1.0), ("draft_model", 0.0, 0.3)])
def test_acceptance_is_that_of_the_draft_model(
    make_llm: Any, paths: Any, caplog: Any, draft: str, low: float, high: float
) -> None:
    """The target's own weights are always right about greedy tokens, others seldom; what is said is the same."""
    params = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)
    llm = make_llm("draft_model", {"model": paths[draft]}, disable_log_stats=False)
    with caplog.at_level(logging.INFO, "jaxserve"):
        outputs = [x.generate([1, 2, 3], params, use_tqdm=False)[0] for x in (make_llm(None), llm)]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    found, metrics = llm.stats().speculation, outputs[1].metrics
    assert metrics.num_accepted_tokens_per_pos == found.num_accepted_tokens_per_pos
    assert (metrics.num_drafts, metrics.num_draft_tokens) == (found.num_drafts, found.num_draft_tokens)
    (line,) = (m for m in caplog.messages if "SpecDecoding" in m)
    assert f"Accepted: {found.num_accepted_tokens} tokens, Drafted: {found.num_draft_tokens} tokens" in line
    assert low <= found.acceptance_rate <= high
    if low == 1.0:
        assert found.num_drafts == 10  # the first token, then ten windows of four


def test_every_cached_block_is_reused(make_llm: Any) -> None:
    """A prompt of 2050 tokens that shares 2000: all 125 blocks, and drafts are those of a prompt without a cache."""
    random = np.random.default_rng(0)
    first = random.integers(1, V, 2050).tolist()
    second = first[:2000] + random.integers(1, V, 50).tolist()
    params = SamplingParams(temperature=0, max_tokens=29, ignore_eos=True)
    sizes = {"max_num_seqs": 1, "max_model_len": 2080, "num_blocks": 300, "max_num_batched_tokens": 1024}
    found = []
    for prompts in ([first, second], [second]):
        llm = make_llm("eagle", logits_processors=[], **sizes)
        for prompt in prompts:
            before = np.array(llm.stats().speculation.num_accepted_tokens_per_pos)
            output = llm.generate(prompt, params, use_tqdm=False)[0]
        accepted = np.array(llm.stats().speculation.num_accepted_tokens_per_pos) - before
        found.append((output.num_cached_tokens // 16, output.outputs[0].token_ids, accepted.tolist()))
    assert [cached for cached, _, _ in found] == [125, 0]
    assert found[0][1:] == found[1][1:]
    assert sum(found[0][2]) > 0


def test_pages_keep_what_the_head_reads(make_llm: Any) -> None:
    """EAGLE-3's target keeps three layers' states with every page, beside the last one."""
    for method, width in (("eagle3", 4 * D), ("medusa", D)):
        assert make_llm(method).engine.runner.cache.boundary.shape == (8, width)
