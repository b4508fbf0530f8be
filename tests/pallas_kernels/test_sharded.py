"""Over eight virtual devices: the tokens of one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import top_k_top_p_sample
from pallas_kernels.cases import Case, sampling_case
from pallas_kernels.sharded import by_rows, sample_by_rows, sample_by_vocabulary

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((8,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))


def arguments(mesh: Mesh, case: Case, split: bool = True) -> tuple[Any, ...]:
    logits = jax.device_put(case.logits, NamedSharding(mesh, PartitionSpec(None, "tp" if split else None)))
    return logits, case.filters, case.words, np.arange(len(case.names)) % 7 != 3


def assert_same_tokens(case: Case, drawn: Any, valid: np.ndarray) -> None:
    expected = jax.jit(top_k_top_p_sample)(case.logits, case.filters, case.words, valid)
    assert drawn.finite.tolist() == expected.finite.tolist()
    rows = valid & np.asarray(expected.finite)
    differ = np.asarray(drawn.token) != np.asarray(expected.token)
    assert [case.names[i] for i in np.flatnonzero(differ & rows)] == []


@pytest.mark.parametrize(
    "vocab", [2048, 10000, 8193]
)  # a multiple of 8 * 256, of 8 (29 rows over 8 devices), of neither
def test_rows_dealt_out_give_the_tokens_of_one_device(mesh: Mesh, vocab: int) -> None:
    case = sampling_case(vocab)
    args = arguments(mesh, case, split=vocab % 8 == 0)
    assert_same_tokens(case, jax.jit(partial(sample_by_rows, mesh, "tp"))(*args), args[-1])


@pytest.mark.parametrize("vocab", [2048, 10000, 128])
def test_a_split_vocabulary_gives_the_tokens_of_one_device(mesh: Mesh, vocab: int) -> None:
    """Tiles that lie on two devices; devices that hold fewer tokens than there are candidates."""
    case = sampling_case(vocab)
    args = arguments(mesh, case)
    assert_same_tokens(case, jax.jit(partial(sample_by_vocabulary, mesh, "tp"))(*args), args[-1])


def test_the_logits_are_exchanged_once_and_never_gathered(mesh: Mesh) -> None:
    case = sampling_case(2048)
    by_row = jax.jit(partial(sample_by_rows, mesh, "tp")).lower(*arguments(mesh, case)).compile().as_text()
    assert by_row.count(" all-to-all(") == 1
    by_vocabulary = jax.jit(partial(sample_by_vocabulary, mesh, "tp")).lower(*arguments(mesh, case)).compile().as_text()
    assert " all-to-all(" not in by_vocabulary
    for program in (by_row, by_vocabulary):
        gathers = [line for line in program.splitlines() if " all-gather(" in line]
        assert gathers
        assert not [line for line in gathers if ",2048]" in line]  # however many rows


def test_any_function_of_rows(mesh: Mesh) -> None:
    logits = jnp.arange(11 * 16.0).reshape(11, 16)
    rows = {"scale": jnp.arange(11.0), "name": jnp.arange(11)}
    result = by_rows(mesh, "tp", lambda x, r: {"sum": x.sum(1) * r["scale"], "name": r["name"]}, logits, rows)
    assert np.asarray(result["sum"]) == pytest.approx(np.asarray(logits.sum(1)) * np.arange(11))
    assert result["name"].tolist() == list(range(11))


def test_a_vocabulary_that_cannot_be_split_is_refused(mesh: Mesh) -> None:
    case = sampling_case(100, only="greedy")
    with pytest.raises(ValueError, match="vocabulary has 100 entries; axis 'tp' of 8 devices must divide it"):
        sample_by_vocabulary(
            mesh, "tp", *map(jnp.asarray, case.logits[None]), case.filters, case.words, jnp.ones(2, bool)
        )
