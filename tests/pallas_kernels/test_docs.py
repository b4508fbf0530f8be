"""What the documentation shows runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parents[2]


def example(file: str, holding: str) -> str:
    """The one block of Python in a file that contains a string."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if holding in block]
    return block


def run(code: str, **names: Any) -> dict[str, Any]:
    exec(compile(code, "example", "exec"), names)
    return names


def test_the_example_of_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = run(example("docs/kernels.md", "top_k_top_p_sample"))["drawn"]
    assert drawn.token.shape == (4,)
    assert drawn.finite.all()
    assert capsys.readouterr().out


def test_the_example_of_attention() -> None:
    n, queries, heads, group, width, blocks, size = 2, 1, 2, 3, 16, 8, 4
    pool = jnp.ones((blocks, size, heads, width))
    names = run(
        "from pallas_kernels import paged_attention\n" + example("docs/kernels.md", "paged_attention"),
        q=jnp.ones((n, queries, heads, group, width)), k_pool=pool, v_pool=pool,
        block_tables=jnp.arange(6).reshape(n, 3), positions=jnp.full((n, queries), 5),
    )  # fmt: skip
    assert names["out"].shape == (n, queries, heads, group, width)


def test_the_readmes_example() -> None:
    names = run(
        example("README.md", "from pallas_kernels"), jnp=jnp, logits=jax.random.normal(jax.random.key(0), (8, 300))
    )
    assert names["token"].shape == (8,)
