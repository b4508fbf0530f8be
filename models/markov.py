"""A toy model whose output distribution is known in closed form: next-token logits are a table row.

The whole engine around it (scheduler, pages, prefill, sampling, streaming) can be tested statistically, since the
probability of any output is a product of table entries. It is also the smallest complete `models.base.Model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.base import ForwardInputs, page_of


@dataclass(frozen=True, eq=False)
class MarkovLM:
    """logits(next | last) = table[last], or table[last but one, last] with a three-dimensional table.

    table: float32 [V, V] (order 1) or [V + 1, V, V] (order 2; row V of the first axis stands for "no token before").
    The tokens themselves are its "KV": order 2 reads the token before through the block table, so a wrong page
    shows as a wrong distribution.
    Raises ValueError for a table of another shape.
    """

    table: np.ndarray
    max_model_len: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    dtype: ClassVar[str] = "float32"

    def __post_init__(self) -> None:
        shape = self.table.shape
        v = shape[-1] if shape else 0
        if v == 0 or shape not in ((v, v), (v + 1, v, v)):
            raise ValueError(f"table has shape {shape}; expected [V, V] or [V + 1, V, V]")

    @property
    def vocab_size(self) -> int:
        return int(self.table.shape[-1])

    def load_params(self, mesh: Mesh | None) -> jax.Array:
        rows = jnp.asarray(self.table, jnp.float32).reshape(-1, self.vocab_size)
        return rows if mesh is None else jax.device_put(rows, NamedSharding(mesh, PartitionSpec()))

    def init_kv(self, num_blocks: int, block_size: int, mesh: Mesh | None) -> jax.Array:
        pool = jnp.zeros((num_blocks, block_size), jnp.int32)
        return pool if mesh is None else jax.device_put(pool, NamedSharding(mesh, PartitionSpec()))

    def forward(
        self, params: jax.Array, kv: jax.Array, inputs: ForwardInputs, mesh: Mesh | None
    ) -> tuple[jax.Array, jax.Array]:
        tokens, positions, tables = inputs.tokens, inputs.positions, inputs.block_tables
        size = kv.shape[1]
        kv = kv.at[page_of(tables, inputs.written, size), positions % size].set(tokens)
        row = tokens
        if self.table.ndim == 3:
            before = kv[page_of(tables, positions - 1, size), (positions - 1) % size]
            row = jnp.where(positions > 0, before, self.vocab_size) * self.vocab_size + tokens
        return row[..., None], kv  # the hidden state is the row's number

    def logits(self, params: jax.Array, hidden: jax.Array) -> jax.Array:
        return params[hidden[:, 0]]
