"""Every implementation against the definition: the same tokens for the same words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import AttentionShape, Drawn, Filters, top_k_top_p_sample
from pallas_kernels.cases import VOCABS, Case, filters_of, sampling_case
from pallas_kernels.draw import MAX_VOCAB

Exact = Callable[..., np.ndarray]

xla = jax.jit(top_k_top_p_sample, static_argnames=("logprob", "implementation"))


def arguments(case: Case) -> tuple[np.ndarray, Filters, np.ndarray]:
    return case.logits, case.filters, case.words


def names_that_differ(case: Case, a: jax.Array, b: jax.Array, among: np.ndarray) -> list[str]:
    """Of the rows `among` [R] bool."""
    differ = (np.asarray(a) != np.asarray(b)) & among
    return [name for name, different in zip(case.names, differ, strict=True) if different]


def assert_same(case: Case, drawn: Drawn, expected: Drawn, among: np.ndarray | bool = True) -> None:
    finite = np.asarray(expected.finite)
    assert names_that_differ(case, drawn.finite, finite, np.broadcast_to(among, finite.shape)) == []
    assert names_that_differ(case, drawn.token, expected.token, finite & among) == []


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("vocab", VOCABS[:4])
def test_tokens_have_the_definitions_probability(exact_distribution: Exact, vocab: int, dtype: Any) -> None:
    """What is drawn is kept by the filters, and the log-probability is its own."""
    case = sampling_case(vocab, dtype=dtype)
    drawn = xla(*arguments(case), mask=case.mask, logprob=True)
    for row, (name, logits) in enumerate(zip(case.names, case.masked, strict=True)):
        ok = name not in ("NaN", "all -inf", "masked, all forbidden")
        assert bool(drawn.finite[row]) == ok, name
        if ok and name != "+inf":
            f = jax.tree.map(lambda x: float(x[row]), case.filters)
            token = int(drawn.token[row])
            if f.temperature == 0:
                assert token == np.argmax(logits), name
            else:
                p = exact_distribution(logits, f.temperature, int(f.top_k), min(1, f.top_p + 2e-6), f.min_p)
                assert p[token] > 0, name
            raw = np.log(exact_distribution(logits)[token])
            assert float(drawn.logprob[row]) == pytest.approx(raw, abs=1e-4), name


def test_words_at_the_ends_draw_the_first_and_the_last_survivor(exact_distribution: Exact) -> None:
    """Of what has a probability that the draw's 44 bits know."""
    case = sampling_case(8193, only="words of")
    drawn = xla(*arguments(case))
    for row, name in enumerate(case.names):
        f = jax.tree.map(lambda x: x[row], case.filters)
        p = exact_distribution(case.logits[row], 1.0, int(f.top_k), float(f.top_p))
        first, *_, last = np.flatnonzero(p > 1e-12)
        wanted = {"words of 0": first, "words of ones": last}.get(name.split(",")[0])
        assert wanted is None or int(drawn.token[row]) == wanted, name


def test_a_nan_is_found_wherever_it_lies() -> None:
    """A maximum of a vectorised loop keeps only some."""
    logits = np.zeros((300, 10000), np.float32)
    logits[np.arange(300), np.arange(300) * 33] = np.nan
    logits[0, 0], logits[299, :2] = np.inf, (np.inf, -np.inf)
    filters = filters_of([{"temperature": 1, "min_p": 0, "top_k": 0, "top_p": 1}] * 300)
    drawn = xla(logits, filters, np.zeros((300, 8), np.uint32))
    assert drawn.finite.tolist() == [True] + [False] * 299
    logits[299, 299 * 33] = 0
    assert bool(xla(logits, filters, np.zeros((300, 8), np.uint32)).finite[299])


@pytest.mark.parametrize("vocab", [*VOCABS, 20225])
def test_mosaic_gives_the_definitions_tokens(vocab: int) -> None:
    """In one block and in several, of which the last is moved back to end with the row: what it sees twice counts
    once."""
    case = sampling_case(vocab)
    expected = xla(*arguments(case), mask=case.mask)
    drawn = top_k_top_p_sample(*arguments(case), mask=case.mask, implementation="mosaic")
    assert_same(case, drawn, expected)


@pytest.mark.parametrize("vocab", [100, 8193])
def test_mosaic_takes_bfloat16(vocab: int) -> None:
    """The tokens of its values in float32, with ties in every row."""
    case = sampling_case(vocab, dtype=ml_dtypes.bfloat16)
    expected = xla(case.logits.astype(np.float32), case.filters, case.words)
    assert_same(case, top_k_top_p_sample(*arguments(case), implementation="mosaic"), expected)


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_a_mask_is_as_good_as_minus_infinity(implementation: str) -> None:
    case = sampling_case(1000)
    draw = partial(top_k_top_p_sample, logprob=True, implementation=implementation)
    drawn = draw(*arguments(case), mask=case.mask)
    by_hand = draw(case.masked, case.filters, case.words)
    assert_same(case, drawn, by_hand)
    finite = np.asarray(drawn.finite)
    assert case.allowed[finite, np.asarray(drawn.token)[finite]].all()
    assert np.asarray(drawn.logprob)[finite] == pytest.approx(np.asarray(by_hand.logprob)[finite])


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_rows_that_are_not_valid_are_not_drawn(implementation: str) -> None:
    """Nor do they change those that are."""
    case = sampling_case(1000)
    valid = np.arange(len(case.names)) % 2 == 0
    drawn = top_k_top_p_sample(*arguments(case), valid, implementation=implementation)
    assert_same(case, drawn, xla(*arguments(case)), among=valid)


def test_an_implementation_that_cannot_run_is_refused() -> None:
    call = partial(top_k_top_p_sample, *arguments(sampling_case(100, only="greedy")))
    with pytest.raises(ValueError, match="implementation is 'cuda'; it must be None or one of xla, mosaic, triton"):
        call(implementation="cuda")
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU .* 8\.0 or more; JAX's backend is 'cpu'"):
        call(implementation="triton")
    with pytest.raises(ValueError, match="cannot be interpreted inside JAX"):
        call(implementation="triton", interpret=True)
    for name in (None, "xla"):
        with pytest.raises(ValueError, match="interpret means nothing to implementation 'xla'; leave it out"):
            call(implementation=name, interpret=True)
    with pytest.raises(ValueError, match=r"block_shape is AttentionShape.*; it must be None or of type BlockShape"):
        call(implementation="mosaic", block_shape=AttentionShape(2))


def test_shapes_are_checked() -> None:
    logits, filters, words = arguments(sampling_case(100, only="greedy"))
    with pytest.raises(ValueError, match=r"words has shape \(2, 4\); it must be \(2, 8\)"):
        top_k_top_p_sample(logits, filters, words[:, :4])
    with pytest.raises(ValueError, match=r"mask has shape \(2, 3\); it must be \(2, 4\)"):
        top_k_top_p_sample(logits, filters, words, mask=np.zeros((2, 3), np.uint32))
    with pytest.raises(ValueError, match=r"filters.top_k has shape \(\); it must be \(2,\)"):
        top_k_top_p_sample(logits, replace(filters, top_k=50), words)
    with pytest.raises(ValueError, match=r"filters.min_p has shape \(2, 1\); it must be \(2,\)"):
        top_k_top_p_sample(logits, replace(filters, min_p=filters.min_p[:, None]), words)
    with pytest.raises(ValueError, match=r"valid has shape \(3,\); it must be \(2,\)"):
        top_k_top_p_sample(logits, filters, words, np.ones(3, bool))
    with pytest.raises(ValueError, match=r"logits has shape \(100,\); it must be \[R, V\]"):
        top_k_top_p_sample(logits[0], filters, words)


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_a_vocabulary_that_is_too_large_is_refused(implementation: str) -> None:
    _, filters, words = arguments(sampling_case(100, only="greedy"))
    wide = jax.ShapeDtypeStruct((2, MAX_VOCAB + 1), jnp.float32)
    with pytest.raises(ValueError, match=f"vocabulary has {MAX_VOCAB + 1} entries; a draw takes at most {MAX_VOCAB}"):
        jax.eval_shape(partial(top_k_top_p_sample, implementation=implementation), wide, filters, words)


def test_an_implementation_is_part_of_what_is_compiled() -> None:
    case = sampling_case(100, only="top_k 1")
    lower = jax.jit(top_k_top_p_sample, static_argnames=("implementation",)).lower
    default, named = lower(*arguments(case)).as_text(), lower(*arguments(case), implementation="mosaic").as_text()
    assert default == lower(*arguments(case), implementation="xla").as_text()
    assert "callback" in named
    assert "callback" not in default
