"""Every Mosaic kernel under the interpreter's race detector, on the versions of JAX that are supported."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cases import draft_case, sampling_case
from pallas_kernels.compat import interpret_params, mosaic_kernel, races_found
from pallas_kernels.drafted import Drafted, Proposal, per_row
from pallas_kernels.mosaic import residual, row, sample, weigh
from pallas_kernels.mosaic.verifier import MosaicVerifier


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that have run without a race, in order, watched one by one: the detector knows of the last only."""
    names: list[str] = []

    def watch(module: Any, name: str) -> None:
        kernel = getattr(module, name)

        def run(*arguments: Any) -> Any:
            result = jax.block_until_ready(kernel(*arguments))
            assert not races_found(), name
            names.append(name)
            return result

        monkeypatch.setattr(module, name, run)

    for module, name in (
        (row, "segment_statistics"),
        (sample, "_sample_kernel"),
        (weigh, "_weigh_kernel"),
        (residual, "_run"),
    ):
        watch(module, name)
    return names


def test_sampling_does_not_race(ran: list[str]) -> None:
    """One row by its candidates, one by the whole row, in two blocks of tiles."""
    case = sampling_case(16600, only="top_p 0.9")
    rows = [row for row, name in enumerate(case.names) if name.startswith("top_p 0.9")]
    logits, filters, words = jax.tree.map(
        lambda x: jnp.asarray(x)[jnp.array(rows)], (case.logits, case.filters, case.words)
    )
    sample.sample_random(logits, filters, words, None, None, interpret_params(True))
    assert ran == ["segment_statistics", "_sample_kernel"]


def test_verification_does_not_race(ran: list[str]) -> None:
    """Every branch of the residual: candidates, the whole row, statistics; drawn from and summed."""
    case = draft_case(16600, only="flat")
    window = Drafted(
        jnp.asarray(case.logits),
        jnp.asarray(case.drafts),
        per_row(case.filters, (len(case.names), 3)),
        jnp.ones((len(case.names), 3), bool),
        jnp.asarray(case.words),
    )
    proposal = Proposal(jnp.asarray(case.draft_logits), case.draft_filters)
    verifier = MosaicVerifier(window, proposal, None, interpret_params(True))
    pair = verifier.pair()
    verifier.residual_mass(pair, jnp.full(case.drafts.shape, 0.9))
    slots = np.arange(len(case.names))
    verifier.draw(jnp.zeros(len(slots), jnp.int32), jnp.asarray(slots % 2 == 0), jnp.ones(len(slots)), pair)
    assert ran == ["segment_statistics", "_weigh_kernel"] * 2 + ["_run"] * 2


def test_the_detector_finds_a_race() -> None:
    """A copy that nothing waits for."""

    def body(source: Any, result: Any, shared: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(source, shared, barrier)
        result[...] = shared[...]
        plgpu.barrier_wait(barrier)

    kernel = mosaic_kernel(
        body,
        interpret=interpret_params(True),
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()],
    )

    def raced() -> bool:
        try:
            jax.block_until_ready(kernel(jnp.zeros(128)))
        except Exception as error:  # of 0.12
            return "race" in str(error).lower()
        return races_found()

    assert raced()
