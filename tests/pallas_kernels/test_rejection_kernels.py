"""Verification by kernels: the definition's tokens for the same random numbers, for every method."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import BlockShape, Proposal, Verified, rejection_sample
from pallas_kernels.cases import DraftCase, draft_case


def verify(case: DraftCase, method: str, paired: bool, **options: Any) -> Verified:
    """Kernels are compiled each on its own, so that methods share them; of the reference all is one program."""
    more: dict[str, Any] = {} if method == "coupled" else {"uniforms": case.uniforms}
    if method == "synthetic":
        more["rates"] = case.rates
    if paired:
        more["proposal"] = Proposal(case.draft_logits, case.draft_filters)
    call = partial(rejection_sample, method=method, **options)
    call = call if options else jax.jit(call)
    return call(*map(jnp.asarray, (case.logits, case.drafts)), case.filters, case.words, **more)


def assert_same(case: DraftCase, got: Verified, expected: Verified) -> None:
    differ = (np.asarray(got.tokens) != np.asarray(expected.tokens)).any(axis=1)
    assert [name for name, different in zip(case.names, differ, strict=True) if different] == []
    assert got.n_accepted.tolist() == expected.n_accepted.tolist()
    assert got.finite.tolist() == expected.finite.tolist()


METHODS = [("standard", True), ("standard", False), ("block", True), ("block", False), ("synthetic", False),
           ("coupled", False)]  # fmt: skip


@pytest.mark.parametrize(("method", "paired"), METHODS)
def test_kernels_give_the_definitions_tokens(method: str, paired: bool) -> None:
    """On every slot, in two blocks of tiles of which the last overlaps the first."""
    case = draft_case(16600)
    expected = verify(case, method, paired)
    assert 0 < expected.n_accepted.sum() < 2 * len(case.names)
    assert_same(case, verify(case, method, paired, implementation="mosaic"), expected)


@pytest.mark.parametrize("vocab", [8193, 128256])
def test_kernels_at_other_vocabularies(vocab: int) -> None:
    """By block verification beside a q, which starts every kernel there is."""
    case = draft_case(vocab)
    expected = verify(case, "block", True)
    assert_same(case, verify(case, "block", True, implementation="mosaic"), expected)


def test_a_short_row_in_blocks_of_another_shape() -> None:
    case = draft_case(100, only="top_")
    shape = BlockShape(tiles=16, part=32, chunk=64)
    got = verify(case, "standard", True, implementation="mosaic", block_shape=shape)
    assert_same(case, got, verify(case, "standard", True))


def test_an_implementation_that_cannot_run_is_refused() -> None:
    case = draft_case(100, only="greedy")
    with pytest.raises(ValueError, match="implementation is 'triton'; it must be None or one of xla, mosaic"):
        verify(case, "coupled", False, implementation="triton")
    with pytest.raises(ValueError, match="block_shape means nothing to implementation 'xla'; leave it out"):
        verify(case, "standard", False, block_shape=BlockShape())
