"""Every implementation against the definition: the same tokens for the same words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Filters, top_k_top_p_sample
from pallas_kernels.cases import VOCABS, Case, filters_of, sampling_case
from pallas_kernels.compat import interpret_params, races_found
from pallas_kernels.mosaic.sample import sample_random

Exact = Callable[..., np.ndarray]

xla = jax.jit(top_k_top_p_sample, static_argnames=("logprob", "implementation"))


def arguments(case: Case) -> tuple[np.ndarray, Filters, np.ndarray]:
    return case.logits, case.filters, case.words


@pytest.mark.parametrize("vocab", VOCABS[:4])
def test_tokens_have_the_definitions_probability(exact_distribution: Exact, vocab: int) -> None:
    """What is drawn is kept by the filters, and the log-probability is its own."""
    case = sampling_case(vocab)
    drawn = xla(*arguments(case), logprob=True)
    for row, name in enumerate(case.names):
        ok = name not in ("NaN", "all -inf")
        assert bool(drawn.finite[row]) == ok, name
        if ok and name != "+inf":
            f = jax.tree.map(lambda x: float(x[row]), case.filters)
            token = int(drawn.token[row])
            if f.temperature == 0:
                assert token == np.argmax(case.logits[row]), name
            else:
                p = exact_distribution(case.logits[row], f.temperature, int(f.top_k), min(1, f.top_p + 2e-6), f.min_p)
                assert p[token] > 0, name
            raw = np.log(exact_distribution(case.logits[row])[token])
            assert float(drawn.logprob[row]) == pytest.approx(raw, abs=1e-4), name


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
    expected = xla(*arguments(case))
    drawn = top_k_top_p_sample(*arguments(case), implementation="mosaic")
    assert drawn.finite.tolist() == expected.finite.tolist()
    assert names_that_differ(case, drawn.token, expected.token) == []


def names_that_differ(case: Case, a: jax.Array, b: jax.Array) -> list[str]:
    return [
        name
        for name, x, y in zip(case.names, np.asarray(a), np.asarray(b), strict=True)
        if x != y and name not in ("NaN", "all -inf")
    ]


def test_mosaic_does_not_race() -> None:
    case = sampling_case(16384 + 300, only="top_p 0.9")  # one row by its candidates, one by the whole row
    token, _ = sample_random(
        *map(jnp.asarray, (case.logits,)), case.filters, case.words, None, None, interpret_params(True)
    )
    assert not races_found()
    assert names_that_differ(case, token, xla(*arguments(case)).token) == []


def test_a_mask_is_as_good_as_minus_infinity() -> None:
    rng = np.random.default_rng(0)
    logits, allowed = rng.standard_normal((3, 100)).astype(np.float32), rng.random((3, 100)) < 0.3
    bits = np.pad(allowed, ((0, 0), (0, 28))).reshape(3, 4, 32)
    mask = (bits.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)
    filters = filters_of([{"temperature": t, "min_p": 0, "top_k": k, "top_p": 1} for t, k in ((0, 0), (1, 0), (1, 5))])
    words = rng.integers(0, 2**32, (3, 8), dtype=np.uint32)
    masked = top_k_top_p_sample(logits, filters, words, mask=mask, logprob=True)
    by_hand = xla(np.where(allowed, logits, -np.inf).astype(np.float32), filters, words, logprob=True)
    assert masked.token.tolist() == by_hand.token.tolist()
    assert np.asarray(masked.logprob) == pytest.approx(np.asarray(by_hand.logprob))
    assert allowed[np.arange(3), np.asarray(masked.token)].all()


def test_bfloat16_is_as_good_as_its_values() -> None:
    case = sampling_case(1000, only="top_k 50")
    narrow = jnp.asarray(case.logits, jnp.bfloat16)
    drawn, wide = (xla(x, case.filters, case.words) for x in (narrow, narrow.astype(jnp.float32)))
    assert drawn.token.tolist() == wide.token.tolist()


def test_rows_that_are_not_valid_are_not_drawn() -> None:
    case = sampling_case(1000, only="plain")
    valid = np.arange(len(case.names)) % 2 == 0
    drawn = xla(*arguments(case), valid)
    assert (np.asarray(drawn.token) == np.asarray(xla(*arguments(case)).token))[valid].all()


def test_an_implementation_that_cannot_run_is_refused() -> None:
    call = partial(top_k_top_p_sample, *arguments(sampling_case(100, only="greedy")))
    with pytest.raises(ValueError, match="implementation is 'cuda'; it must be None or one of xla, mosaic, triton"):
        call(implementation="cuda")
    with pytest.raises(ValueError, match="needs an NVIDIA GPU; JAX's backend is 'cpu'"):
        call(implementation="triton")
    with pytest.raises(ValueError, match="cannot be interpreted inside JAX"):
        call(implementation="triton", interpret=True)


def test_shapes_are_checked() -> None:
    logits, filters, words = arguments(sampling_case(100, only="greedy"))
    with pytest.raises(ValueError, match=r"words has shape \(2, 4\); it must be \(2, 8\)"):
        top_k_top_p_sample(logits, filters, words[:, :4])
    with pytest.raises(ValueError, match=r"mask has shape \(2, 3\); it must be \(2, 4\)"):
        top_k_top_p_sample(logits, filters, words, mask=np.zeros((2, 3), np.uint32))


def test_an_implementation_is_part_of_what_is_compiled() -> None:
    case = sampling_case(100, only="top_k 1")
    lower = jax.jit(top_k_top_p_sample, static_argnames=("implementation",)).lower
    default, named = lower(*arguments(case)).as_text(), lower(*arguments(case), implementation="mosaic").as_text()
    assert default == lower(*arguments(case), implementation="xla").as_text()
    assert "callback" in named
    assert "callback" not in default
