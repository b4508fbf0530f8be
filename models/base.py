"""What the engine asks of a model: a handful of pure functions over values that the engine owns.

Axes used here: N query groups (request slots in decode, tiles of one prompt in prefill), Q query positions in
a group, P pages in a group's block table, L layers, D model width, V logits width.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

Params = Any  # a pytree of arrays
KVCache = Any  # a pytree of arrays whose page axis the model chooses; empty for a model without state
Array = Any  # a leaf of a state pytree: jax.Array on the device, NumPy on the way there, abstract when compiling


@struct.dataclass
class ForwardInputs:
    """One batch of query groups. Every position of a group belongs to one request.

    A position of -1 is padding: nothing is stored for it and its hidden state means nothing. Positions of a
    group are consecutive, and every earlier position of the request is stored already or in the same call.
    """

    tokens: Array  # [N, Q] int32
    positions: Array  # [N, Q] int32, -1 = padding
    block_tables: Array  # [N, P] int32 page ids; page 0 belongs to nobody and takes what padding writes
    stored: Array | None = None  # [N] int32: what is stored of positions before this one stays as it is

    @property
    def written(self) -> jax.Array:
        """[N, Q] int32, the positions to store; -1 for those that are stored already, and for padding."""
        if self.stored is None:
            return self.positions
        return jnp.where(self.positions >= self.stored[:, None], self.positions, -1)


def page_of(block_tables: jax.Array, positions: jax.Array, block_size: int) -> jax.Array:
    """Page of each position [N, Q]; page 0 for padding and for positions the table does not cover."""
    index = jnp.maximum(positions, 0) // block_size
    page = jnp.take_along_axis(block_tables, index, axis=1, mode="clip")
    return jnp.where((positions >= 0) & (index < block_tables.shape[1]), page, 0)


@runtime_checkable
class Model(Protocol):
    """A functional model. Implementations are hashable and hold no arrays of their own state but their source.

    `LLM(model)` accepts any object with these members, so a user's own model needs no registration. See
    `models.markov.MarkovLM` for the smallest complete one.
    """

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits; ids from the tokenizer's size up to V are padding and never emitted."""

    @property
    def max_model_len(self) -> int:
        """Most positions (prompt and output) the model was made for."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an output unless the request says ignore_eos."""

    def load_params(self, mesh: Mesh | None) -> Params:
        """Weights, placed on `mesh` (None: the default device)."""

    def init_kv(self, num_blocks: int, block_size: int, mesh: Mesh | None) -> KVCache:
        """Zeroed page pool of `num_blocks` pages of `block_size` positions."""

    def forward(
        self, params: Params, kv: KVCache, inputs: ForwardInputs, mesh: Mesh | None
    ) -> tuple[jax.Array, KVCache]:
        """Store the inputs' keys and values, return hidden states [N, Q, D] and the new cache. Jit-compiled."""

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """[R, D] -> [R, V] float32. Jit-compiled."""
