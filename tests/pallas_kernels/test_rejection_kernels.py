"""Verification by kernels: the definition's tokens for the same random numbers, for every method."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import BlockShape, Proposal, Verified, rejection_sample
from pallas_kernels.cases import DraftCase, draft_case

static = jax.jit(rejection_sample, static_argnames=("method", "implementation", "interpret", "block_shape"))


def verify(case: DraftCase, method: str, paired: bool, **options: Any) -> Verified:
    more: dict[str, Any] = {} if method == "coupled" else {"uniforms": case.uniforms}
    if method == "synthetic":
        more["rates"] = case.rates
    if paired:
        more["proposal"] = Proposal(case.draft_logits, case.draft_filters)
    return static(case.logits, case.drafts, case.filters, case.words, method=method, **more, **options)


def assert_same(case: DraftCase, got: Verified, expected: Verified) -> None:
    differ = (np.asarray(got.tokens) != np.asarray(expected.tokens)).any(axis=1)
    assert [name for name, different in zip(case.names, differ, strict=True) if different] == []
    assert got.n_accepted.tolist() == expected.n_accepted.tolist()
    assert got.finite.tolist() == expected.finite.tolist()


@pytest.mark.parametrize(("vocab", "method", "paired"), [(16600, "block", True), (100, "standard", False)])
def test_kernels_give_the_definitions_tokens(vocab: int, method: str, paired: bool) -> None:
    """Every kernel, on every slot: in one block of tiles, and in two, of which the last overlaps the first."""
    case = draft_case(vocab)
    expected = verify(case, method, paired)
    assert 0 < expected.n_accepted.sum() < 2 * len(case.names)
    assert_same(case, verify(case, method, paired, implementation="mosaic"), expected)


@pytest.mark.parametrize(
    ("method", "paired"), [("coupled", False), ("standard", True), ("block", False), ("synthetic", False)]
)
def test_every_method(method: str, paired: bool) -> None:
    """The others on few slots: their kernels are those of the test above."""
    case = draft_case(100, only="top_")
    shape = BlockShape(tiles=16, part=32, chunk=64)
    assert_same(
        case, verify(case, method, paired, implementation="mosaic", block_shape=shape), verify(case, method, paired)
    )
