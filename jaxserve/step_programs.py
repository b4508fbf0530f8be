"""The engine's compiled programs: what their keys are, and how each is lowered from abstract arguments.

("move",)  ("fill", length)  ("tables", rows)  ("prefill", tiles, pages)  ("score", tiles, pages)
("forward", slots, pages)  ("sample", slots, shaped)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve import batch, step
from jaxserve.batch import BatchState, SlotRow
from jaxserve.config import Buckets
from jaxserve.programs import Program
from jaxserve.sampling.sampler import Sampler
from jaxserve.step import Cache, PrefillPlan
from models.base import Model
from models.sharding import sharding


@dataclass(frozen=True)
class StepPrograms:
    """params, cache, state: abstract values with the shardings of the real ones. Shardings are fixed on the way in and
    out: what is donated must come back as it was."""

    model: Model
    sampler: Sampler
    mesh: Mesh | None
    buckets: Buckets
    params: Any
    cache: Cache
    state: BatchState

    def keys(self) -> Iterator[Hashable]:
        """Everything that any traffic can ask for."""
        b = self.buckets
        yield ("move",)
        yield from (("fill", n) for n in b.history)
        yield from (("tables", n) for n in b.table_rows)
        yield from (("prefill", n, p) for n in b.prefill_tiles for p in b.prefill_pages)
        yield from (("score", n, p) for n in b.score_tiles for p in b.prefill_pages)
        yield from (("forward", s, p) for s in b.slots for p in b.pages)
        yield from (("sample", s, shaped) for s in b.slots for shaped in (False, True))

    def program(self, key: Any) -> Program:
        """The program of a key."""
        name, *sizes = key
        return getattr(self, f"_{name}")(key, *sizes)

    def _move(self, key: Hashable) -> Program:
        move = partial(batch.move_slot, self.mesh)
        return self._program(key, move, (self.state, self._i32(), self._i32()), donated=(0,), outputs=self.state)

    def _fill(self, key: Hashable, length: int) -> Program:
        fill = partial(batch.fill_slot, self.mesh, self.sampler.markers)
        args = (self.state, self._i32(), self._i32(length), self._row())
        return self._program(key, fill, args, donated=(0,), outputs=self.state)

    def _tables(self, key: Hashable, rows: int) -> Program:
        args = (self.state, self._i32(rows), self._i32(rows, self.buckets.pages[-1]))
        return self._program(key, batch.set_block_tables, args, donated=(0,), outputs=self.state)

    def _prefill(self, key: Hashable, tiles: int, pages: int) -> Program:
        prefill = partial(step.prefill, self.model, self.mesh, self.buckets.tile, pages)
        return self._program(key, prefill, self._tile_args(tiles), donated=(1,), outputs=self.cache)

    def _score(self, key: Hashable, tiles: int, pages: int) -> Program:
        score = partial(step.score, self.sampler, self.model, self.mesh, self.buckets.tile, pages)
        args = self._tile_args(tiles)
        found = jax.tree.map(lambda x: self._array(x.dtype, *x.shape), jax.eval_shape(score, *args)[1])
        return self._program(key, score, args, donated=(1,), outputs=(self.cache, found))

    def _tile_args(self, tiles: int) -> tuple[Any, ...]:
        plan = PrefillPlan(*(self._i32(tiles) for _ in range(5)))
        return self.params, self.cache, step.view_of(self.state), plan

    def _forward(self, key: Hashable, slots: int, pages: int) -> Program:
        forward = partial(step.forward, self.model, self.mesh, pages)
        args = (self.params, self.cache, step.view_of(self.state), self._array(jnp.bool_, slots))
        return self._program(key, forward, args, donated=(1,), outputs=(self.cache, self._logits(slots)))

    def _sample(self, key: Hashable, slots: int, shaped: bool) -> Program:
        sample = partial(step.sample, self.sampler, self.mesh, shaped)
        args = (self.state, self._logits(slots), self._array(jnp.bool_, slots))
        output = jax.tree.map(lambda x: self._array(x.dtype, *x.shape), jax.eval_shape(sample, *args)[1])
        return self._program(key, sample, args, donated=(0,), outputs=(self.state, output))

    def _program(
        self, key: Hashable, function: Any, args: tuple[Any, ...], donated: tuple[int, ...], outputs: Any
    ) -> Program:
        shardings = None if self.mesh is None else jax.tree.map(lambda x: x.sharding, outputs)
        return Program(key, jax.jit(function, donate_argnums=donated, out_shardings=shardings), args)

    def _array(self, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        whole = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def _i32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._array(jnp.int32, *shape)

    def _row(self) -> SlotRow:
        return jax.tree.map(lambda x: self._array(x.dtype, *x.shape[1:]), self.state.rows)

    def _logits(self, slots: int) -> jax.ShapeDtypeStruct:
        """Of 1+K rows a slot, split by vocabulary where the mesh divides it."""
        rows, vocab = slots * (1 + self.state.drafts.shape[1]), self.model.vocab_size
        placed = sharding((None, "vocab"), (rows, vocab), self.mesh)
        return jax.ShapeDtypeStruct((rows, vocab), jnp.float32, sharding=placed)
