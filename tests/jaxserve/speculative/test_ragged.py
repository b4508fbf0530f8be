"""The rows of a step, 1 + K of every request, against the ragged description that vLLM makes of the same batch."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.step import BatchView, window_positions

CASES = json.loads((Path(__file__).parents[2] / "golden" / "sampling_cases.json").read_text())["specmeta"]


@pytest.mark.parametrize(("scheduled", "drafts", "expected"), CASES)
def test_rows_are_those_of_the_ragged_batch(scheduled, drafts, expected):
    """scheduled: cumulative tokens of the requests in one flat batch, in which logits are taken at some places.

    A request's rows are the last 1 + n of its tokens: the newest one, and its n drafts. Here positions count in the
    flat batch; there, indices of targets and bonus count in the rows that have logits.
    """
    k, slots = max(drafts), len(drafts)
    tokens = np.where(np.arange(k) < np.array(drafts)[:, None], 7, -1).astype(np.int32).reshape(slots, k)
    newest = np.array(scheduled, np.int32) - 1 - drafts
    view = BatchView(
        tokens=jnp.zeros((slots, 1), jnp.int32),
        active=jnp.ones(slots, bool),
        block_tables=jnp.zeros((slots, 1), jnp.int32),
        drafts=jnp.asarray(tokens),
        num_tokens=jnp.asarray(newest + 1, jnp.int32),
    )
    used, positions = map(np.asarray, window_positions(view, jnp.ones(slots, bool), k))
    row = np.arange(1 + k)
    is_bonus = row == np.array(drafts)[:, None]
    index = np.cumsum(used).reshape(used.shape) - 1  # of a row among those that have logits
    assert np.cumsum(used[:, 1:].sum(1)).tolist() == expected["cu_draft"]
    assert positions[used].tolist() == expected["logits"]
    assert index[used & ~is_bonus].tolist() == expected["target"]
    assert index[used & is_bonus].tolist() == expected["bonus"]
