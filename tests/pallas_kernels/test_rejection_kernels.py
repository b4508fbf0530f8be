"""Verification by kernels: the definition's tokens for the same random numbers, for every method."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import BlockShape, Proposal, Verified, rejection_sample
from pallas_kernels.cases import DraftCase, draft_case, filters_of
from pallas_kernels.draw import MAX_VOCAB
from pallas_kernels.rejection import MAX_DRAFTS


def verify(case: DraftCase, method: str, paired: bool, **options: Any) -> Verified:
    """Kernels are compiled each on its own, so that methods share them; of the reference all is one program."""
    more: dict[str, Any] = {} if method == "coupled" else {"uniforms": case.uniforms}
    if method == "synthetic":
        more["rates"] = case.rates
    if paired:
        more["proposal"] = jax.tree.map(jnp.asarray, case.proposal)
    call = partial(rejection_sample, method=method, **options)
    call = call if "implementation" in options else jax.jit(call)
    return call(*map(jnp.asarray, (case.logits, case.drafts)), case.filters, case.words, **more)


def assert_same(case: DraftCase, got: Verified, expected: Verified) -> None:
    differ = (np.asarray(got.tokens) != np.asarray(expected.tokens)).any(axis=1)
    assert [name for name, different in zip(case.names, differ, strict=True) if different] == []
    assert got.n_accepted.tolist() == expected.n_accepted.tolist()
    assert got.finite.tolist() == expected.finite.tolist()


METHODS = [("standard", True), ("standard", False), ("block", True), ("block", False), ("synthetic", False),
           ("coupled", False)]  # fmt: skip


@pytest.mark.parametrize(
    ("vocab", "method", "paired"),
    [(100, *method) for method in METHODS] + [(8193, *METHODS[i]) for i in (1, 2, 5)],
)
def test_kernels_give_the_definitions_tokens(vocab: int, method: str, paired: bool) -> None:
    """On every slot. At 8193 by three methods, which go through all the kernels' branches; all would take longer."""
    case = draft_case(vocab)
    expected = verify(case, method, paired)
    assert 0 < expected.n_accepted.sum() < 2 * len(case.names)
    assert expected.finite.tolist() == [name != "all -inf in the first row" for name in case.names]
    assert_same(case, verify(case, method, paired, implementation="mosaic"), expected)


@pytest.mark.parametrize("vocab", [16600, 128256])
def test_kernels_at_other_vocabularies(vocab: int) -> None:
    """In several blocks of tiles, of which the last of 16600 overlaps the first. By block verification beside a q,
    which starts every kernel there is; all methods would take minutes."""
    case = draft_case(vocab)
    expected = verify(case, "block", True)
    assert_same(case, verify(case, "block", True, implementation="mosaic"), expected)


@pytest.mark.parametrize(("method", "paired"), [("block", True), ("coupled", False)])
def test_kernels_take_bfloat16(method: str, paired: bool) -> None:
    """The tokens of its values in float32, for logits and drafts' logits, beside slots that do not count."""
    case = draft_case(8193, dtype=ml_dtypes.bfloat16)
    valid = np.arange(len(case.names)) % 5 != 1
    wide = replace(case, logits=case.logits.astype(np.float32), draft_logits=case.draft_logits.astype(np.float32))
    got = verify(case, method, paired, valid=valid, implementation="mosaic")
    assert_same(case, got, verify(wide, method, paired, valid=valid))
    assert (np.asarray(got.tokens)[~valid] == -1).all()


@pytest.mark.parametrize(("method", "paired"), [("coupled", False), ("standard", True), ("block", True)])
def test_as_many_drafts_as_there_can_be(method: str, paired: bool) -> None:
    """Nearly all of them kept, since p and q are nearly the same; coupled stops early."""
    rng, vocab = np.random.default_rng(0), 300
    logits = (3 * rng.standard_normal((1, 1 + MAX_DRAFTS, vocab))).astype(np.float32)
    draft_logits = logits[:, :-1] + (0.01 * rng.standard_normal((1, MAX_DRAFTS, vocab))).astype(np.float32)
    if method == "coupled":
        logits[:, :100, 7] = 50.0  # so that a hundred drafts are right
        draft_logits[:, :, 7] = 50.0
    plain = filters_of([{"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}])
    case = DraftCase(
        names=("plain",),
        logits=logits,
        drafts=np.argmax(draft_logits + rng.gumbel(size=draft_logits.shape), axis=2).astype(np.int32),
        filters=plain,
        words=rng.integers(0, 2**32, (1, 1 + MAX_DRAFTS, 8), dtype=np.uint32),
        uniforms=rng.random((1, MAX_DRAFTS), np.float32),
        draft_logits=draft_logits,
        draft_filters=plain,
        rates=np.ones(MAX_DRAFTS, np.float32),
    )
    expected = verify(case, method, paired)
    assert expected.n_accepted[0] > 50
    assert_same(case, verify(case, method, paired, implementation="mosaic"), expected)


def test_a_short_row_in_blocks_of_another_shape() -> None:
    case = draft_case(100, only="top_p")
    shape = BlockShape(tiles=16, part=32, chunk=64)
    got = verify(case, "standard", True, implementation="mosaic", block_shape=shape)
    assert_same(case, got, verify(case, "standard", True))


def test_an_implementation_that_cannot_run_is_refused() -> None:
    case = draft_case(100, only="greedy")
    with pytest.raises(ValueError, match="implementation is 'triton'; it must be None or one of xla, mosaic"):
        verify(case, "coupled", False, implementation="triton")
    with pytest.raises(ValueError, match="block_shape means nothing to implementation 'xla'; leave it out"):
        verify(case, "standard", False, block_shape=BlockShape())


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize(("method", "paired"), METHODS)
def test_a_vocabulary_that_is_too_large_is_refused(method: str, paired: bool, implementation: str) -> None:
    case = draft_case(100, only="greedy")
    rows, shape = len(case.names), jax.ShapeDtypeStruct
    logits = shape((rows, 3, MAX_VOCAB + 1), jnp.float32)
    more: dict[str, Any] = {} if method == "coupled" else {"uniforms": case.uniforms}
    if method == "synthetic":
        more["rates"] = case.rates
    if paired:
        more["proposal"] = Proposal(shape((rows, 2, MAX_VOCAB + 1), jnp.float32), case.draft_filters)
    call = partial(rejection_sample, method=method, implementation=implementation)
    with pytest.raises(ValueError, match=f"vocabulary has {MAX_VOCAB + 1} entries; a draw takes at most {MAX_VOCAB}"):
        jax.eval_shape(call, logits, case.drafts, case.filters, case.words, **more)
