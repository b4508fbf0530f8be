"""Draws, counted: each path gives its tokens at their rates, and nothing from outside the support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxserve import LLM, LogitsProcessor, Row, SamplingParams
from jaxserve.sampling.sampler import Sampler, Window

V, ROWS, ROUNDS = 8, 2048, 64  # 131072 draws of a path
LOGITS = np.array([1.0, 0.5, 0.0, -0.5, 2.0, 1.5, -1.0, -2.0], np.float32)
WORST = 1e-6  # p-value of a chi-square; the seeds are fixed, so a pass stays a pass


class Halve(LogitsProcessor):
    """Halves all log-weights."""

    argmax_invariant = True
    arguments = ("halve",)

    def row(self, params: SamplingParams) -> Any | None:
        return () if (params.extra_args or {}).get("halve") else None

    def empty_row(self) -> Any:
        return ()

    def apply(self, logits: Any, row: Row) -> Any:
        return logits / 2


def seeds(*shape: int, first: int = 0) -> np.ndarray:
    """Consecutive ones, as users give them: [..., 2] uint32."""
    numbers = first + np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)
    return np.stack([numbers >> np.uint64(32), numbers & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)


@pytest.fixture(scope="module")
def draw_many(make_window: Callable[..., Any], each_row: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """Tokens [rounds * rows, 1+K] of one request under as many seeds, logits [1+K, V]."""

    def drawn(sampler: Sampler, logits: Any, window: Window, use: Any, seeds: Any) -> jax.Array:
        def wide(x: Any) -> jax.Array:
            return jnp.broadcast_to(x, (seeds.shape[1], *x.shape[1:]))

        def one(seed: jax.Array) -> jax.Array:
            rows = jax.tree.map(wide, window)
            rows = rows.replace(rows=rows.rows.replace(seed=seed))
            return each_row(sampler, wide(logits[None]), rows, jax.tree.map(wide, use)).token

        return jax.lax.map(one, seeds).reshape(-1, logits.shape[0])

    compiled = jax.jit(drawn, static_argnums=0)

    def run(sampler: Sampler, logits: np.ndarray, request: Any, seeds: np.ndarray) -> np.ndarray:
        window, use = make_window(sampler, [request], logits.shape[0] - 1, logits.shape[1])
        return np.asarray(compiled(sampler, logits, window, use, seeds))

    return run


def check(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square over the support; nothing outside of it."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    inside = probabilities > 0
    assert counts[~inside].sum() == 0, "a token outside the support"
    if inside.sum() > 1:
        expected = probabilities[inside] / probabilities[inside].sum() * len(tokens)
        assert stats.chisquare(counts[inside], expected).pvalue > WORST, (counts, expected)


PENALTIES = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": -0.25}
PATHS = {
    "plain": {},
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2, "temperature": 2.0},
    "top_k and top_p": {"top_k": 5, "top_p": 0.9, "temperature": 1.5},
    "allowed ids": {"allowed_token_ids": [0, 2, 7]},
    "bias": {"logit_bias": {4: -100, 7: 3.0}},
    "bad words": {"bad_words": ["ca", "dcb"]},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": [4, 5]},
    "penalties": PENALTIES,
    "custom": {"extra_args": {"halve": True}},
    "min_p and custom": {"min_p": 0.2, "extra_args": {"halve": True}, "temperature": 2.0},
    "everything": PENALTIES | {
        "allowed_token_ids": [0, 1, 2, 4, 5, 7], "bad_words": ["ca"], "min_tokens": 2, "stop_token_ids": [5],
        "logit_bias": {7: 3.0}, "temperature": 1.5, "min_p": 0.01, "top_k": 5, "top_p": 0.97,
        "extra_args": {"halve": True},
    },
}  # fmt: skip


def shaped(settings: dict[str, Any], output: list[int]) -> np.ndarray:
    """LOGITS [V] float64 after the prompt [6] and an output, for the settings that PATHS uses."""
    x = LOGITS.astype(np.float64)
    removed = set(range(V)) - set(settings.get("allowed_token_ids", range(V)))
    removed |= {0} if "ca" in settings.get("bad_words", []) and output[-1:] == [2] else set()
    removed |= {1} if "dcb" in settings.get("bad_words", []) and output[-2:] == [3, 2] else set()
    removed |= set(settings.get("stop_token_ids", [])) if len(output) < settings.get("min_tokens", 0) else set()
    x[list(removed)] = -np.inf
    for token, bias in settings.get("logit_bias", {}).items():
        x[token] += bias
    if "repetition_penalty" in settings:
        for token in {6, *output}:
            x[token] = x[token] / 2 if x[token] > 0 else x[token] * 2
        for token in set(output):
            x[token] += 0.25 - 0.5 * output.count(token)
    return x


def probabilities(settings: dict[str, Any], output: list[int], exact: Callable[..., np.ndarray]) -> np.ndarray:
    x = shaped(settings, output)
    filters = {name: settings[name] for name in ("temperature", "min_p", "top_k", "top_p") if name in settings}
    if "extra_args" not in settings:
        return exact(x, **filters)
    before = exact(x, filters.get("temperature", 1.0), min_p=filters.get("min_p", 0.0))
    with np.errstate(divide="ignore"):
        return exact(np.log(before) / 2, top_k=filters.get("top_k", 0), top_p=filters.get("top_p", 1.0))


@pytest.mark.parametrize("path", PATHS)
def test_every_path_draws_its_tokens_at_their_rates(
    make_sampler: Any, draw_many: Any, asked: Any, exact_distribution: Any, path: str
) -> None:
    """In a window of three drafts, each row with a distribution of its own."""
    sampler = make_sampler(V, (Halve,), max_logprobs=0)
    request = asked(SamplingParams(**PATHS[path]), (6,), (3,), (2, 0, 2))
    tokens = draw_many(sampler, np.tile(LOGITS, (4, 1)), request, seeds(ROUNDS, ROWS))
    for row in range(4):
        check(tokens[:, row], probabilities(PATHS[path], [3, 2, 0, 2][: 1 + row], exact_distribution))


TAILS: list[dict[str, Any]] = [
    {},
    {"min_p": 1e-7},
    {"top_k": 3},
    {"top_p": 0.9999999},
    {"extra_args": {"halve": True}},
]


@pytest.mark.parametrize("settings", TAILS, ids=str)
def test_tails_appear_at_their_rate(make_sampler: Any, draw_many: Any, asked: Any, settings: Any) -> None:
    """A token of probability 1e-5 among 2^22 draws: 42 expected."""
    logits = np.log(np.array([1 - 1e-5 - 1e-9, 1e-5, 1e-9], np.float64))
    if "extra_args" in settings:
        logits = 2 * logits
    tokens = draw_many(_light(make_sampler), logits[None].astype(np.float32), asked(SamplingParams(**settings)),
                       seeds(32, 131072, first=1 << 33)).ravel()  # fmt: skip
    counts = np.bincount(tokens, minlength=3)
    assert stats.binomtest(int(counts[1]), len(tokens), 1e-5).pvalue > 1e-4, counts
    assert counts[2] <= 2


def _light(make_sampler: Any) -> Sampler:
    """Without the built-in processors, whose parameters of so many rows take memory."""
    full = make_sampler(3, (Halve,), max_logprobs=0)
    return Sampler(vocab_limit=3, processors=full.processors[-1:], max_logprobs=0)


def test_positions_of_one_seed_are_as_good_as_seeds(
    make_sampler: Any, make_window: Any, asked: Any, exact_distribution: Any
) -> None:
    """What one request draws along its output: rates, and pairs of neighbours as if independent."""
    sampler = _light_of(make_sampler)
    window, use = make_window(sampler, [asked(SamplingParams())], 0, V)
    count = 1 << 17

    @jax.jit
    def along(window: Window, use: Any, numbers: jax.Array) -> jax.Array:
        wide = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape[1:])), (window, use))
        rows = wide[0].replace(rows=wide[0].rows.replace(num_tokens=numbers))
        return sampler.verify(jnp.broadcast_to(LOGITS, (count, 1, V)), rows, wide[1]).tokens[:, 0]

    tokens = np.asarray(along(window, use, 1 + np.arange(count, dtype=np.int32)))
    exact = exact_distribution(LOGITS)
    check(tokens, exact)
    check(tokens[:-1:2] * V + tokens[1::2], np.outer(exact, exact).ravel())


def test_neighbouring_seeds_are_independent(
    make_sampler: Any, draw_many: Any, asked: Any, exact_distribution: Any
) -> None:
    tokens = draw_many(_light_of(make_sampler), LOGITS[None], asked(SamplingParams()), seeds(1, 1 << 17)).ravel()
    exact = exact_distribution(LOGITS)
    check(tokens[:-1:2] * V + tokens[1::2], np.outer(exact, exact).ravel())


def _light_of(make_sampler: Any) -> Sampler:
    return Sampler(vocab_limit=V, processors=make_sampler(V, (Halve,), max_logprobs=0).processors[-1:], max_logprobs=0)


def test_through_llm_generate(random_markov: Callable[..., Any], exact_distribution: Callable[..., np.ndarray]) -> None:
    """A crowd of three kinds of requests: how often each token follows each other one, 130000 times in all."""
    vocab, length, copies = 6, 480, 90
    model = random_markov(vocab, order=1, spread=1.0)
    kinds = [{"temperature": 0.7}, {"top_k": 4, "top_p": 0.9}, {"min_p": 0.1, "temperature": 1.6}]
    params = [SamplingParams(max_tokens=length, **kind) for _ in range(copies) for kind in kinds]
    llm = LLM(model, max_num_seqs=64, max_model_len=512, seed=3)
    outputs = llm.generate([[i % vocab] for i in range(len(params))], params, use_tqdm=False)
    for i, kind in enumerate(kinds):
        followed = np.zeros((vocab, vocab), int)
        for output in outputs[i :: len(kinds)]:
            text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            np.add.at(followed, (text[:-1], text[1:]), 1)
        assert followed.sum() == copies * length
        for token in range(vocab):
            expected = exact_distribution(model.table[token], **kind)
            assert followed[token].sum() > 500
            check(np.repeat(np.arange(vocab), followed[token]), expected)
