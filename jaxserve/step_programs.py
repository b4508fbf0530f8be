"""The engine's compiled programs: what their keys are, and how each is lowered from abstract arguments.

("move",)  ("fill", length)  ("tables", rows)  ("prefill", tiles, pages)  ("score", tiles, pages)
("forward", slots, pages, drafts)  ("sample", slots, shaped, structured, drafts)
("propose", slots, pages, drafts verified (0 where nobody has to know), drafts)  ("continue", slots, drafts)
("upload",)  ("masks", rows)  ("grammars", rows)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve import batch, last_step, step
from jaxserve.batch import BatchState, SlotRow
from jaxserve.config import Buckets
from jaxserve.programs import Program
from jaxserve.speculative.continuation import empty_continuation
from jaxserve.step import Cache, Hidden, Parts, PrefillPlan, Weights
from jaxserve.structured.device import GrammarRow, Grammars, put_host_masks, put_words
from jaxserve.structured.pool import CHUNK
from models.sharding import sharding


@dataclass(frozen=True)
class StepPrograms:
    """weights, cache, state: abstract values with the shardings of the real ones. Shardings are fixed on the way in and
    out: what is donated must come back as it was. draft_counts: every K that can be asked for."""

    parts: Parts
    buckets: Buckets
    weights: Weights
    cache: Cache
    state: BatchState
    draft_counts: tuple[int, ...] = (0,)
    host_drafts: bool = False  # made on the host, from what it knew a step ago
    grammars: Grammars | None = None  # where requests may have grammars

    def keys(self) -> Iterator[Hashable]:
        """Everything that any traffic can ask for."""
        b, counts = self.buckets, self.draft_counts
        yield ("move",)
        yield from (("fill", n) for n in b.history)
        yield from (("tables", n) for n in b.table_rows)
        yield from (("prefill", n, p) for n in b.prefill_tiles for p in b.prefill_pages)
        yield from (("score", n, p) for n in b.score_tiles for p in b.prefill_pages)
        yield from (("forward", s, p, k) for s in b.slots for p in b.pages for k in counts)
        kinds = [(shaped, s) for s in sorted({self.structured(h) for h in self._held}) for shaped in (False, True)]
        yield from (("sample", s, *kind, k) for s in b.slots for kind in kinds for k in counts)
        if self.grammars is not None:
            yield ("upload",)
            yield from (("grammars", n) for n in b.table_rows)
            yield from (("masks", n) for n in b.mask_rows)
        if self.parts.proposer is not None:
            pages = b.pages if self.cache.draft_kv is not None else b.pages[-1:]
            verified = sorted({self.verified(k, held) for k in counts for held in self._held})
            proposed = self.proposed_counts
            yield from (("propose", s, p, j, k) for s in b.slots for p in pages for j in verified for k in proposed)
        if self.host_drafts:
            yield from (("continue", s, k) for s in b.slots for k in counts if k)

    def program(self, key: Any) -> Program:
        """The program of a key."""
        name, *sizes = key
        return getattr(self, f"_{name}")(key, *sizes)

    def _move(self, key: Hashable) -> Program:
        move = partial(batch.move_slot, self.parts.mesh)
        return self._program(key, move, (self.state, self._i32(), self._i32()), donated=(0,), outputs=self.state)

    def _fill(self, key: Hashable, length: int) -> Program:
        fill = partial(batch.fill_slot, self.parts.mesh, self.parts.sampler.markers)
        args = (self.state, self._i32(), self._i32(length), self._row())
        return self._program(key, fill, args, donated=(0,), outputs=self.state)

    def _tables(self, key: Hashable, rows: int) -> Program:
        args = (self.state, self._i32(rows), self._i32(rows, self.buckets.pages[-1]))
        return self._program(key, batch.set_block_tables, args, donated=(0,), outputs=self.state)

    def _prefill(self, key: Hashable, tiles: int, pages: int) -> Program:
        prefill = partial(step.prefill, self.parts, self.buckets.tile, pages)
        return self._program(key, prefill, self._tile_args(tiles), donated=(1,), outputs=self.cache)

    def _score(self, key: Hashable, tiles: int, pages: int) -> Program:
        score = partial(step.score, self.parts, self.buckets.tile, pages)
        args = self._tile_args(tiles)
        found = self._whole(jax.eval_shape(score, *args)[1])
        return self._program(key, score, args, donated=(1,), outputs=(self.cache, found))

    def _tile_args(self, tiles: int) -> tuple[Any, ...]:
        plan = PrefillPlan(*(self._i32(tiles) for _ in range(5)))
        return self.weights, self.cache, step.view_of(self.state), plan

    def _forward(self, key: Hashable, slots: int, pages: int, drafts: int) -> Program:
        forward = partial(step.forward, self.parts, drafts, pages)
        args = (self.weights, self.cache, step.view_of(self.state), self._run(slots))
        outputs = (self.cache, self._logits(slots, drafts), self._hidden(slots, drafts))
        return self._program(key, forward, args, donated=(1,), outputs=outputs)

    def _sample(self, key: Hashable, slots: int, shaped: bool, structured: bool, drafts: int) -> Program:
        sample = partial(last_step.sample, self.parts, shaped, drafts)
        args = (self.state, self._logits(slots, drafts), self._run(slots), self.grammars if structured else None)
        output = self._whole(jax.eval_shape(sample, *args)[1])
        return self._program(key, sample, args, donated=(0,), outputs=(self.state, output))

    def _propose(self, key: Hashable, slots: int, pages: int, verified: int, drafts: int) -> Program:
        propose = partial(last_step.propose, self.parts, drafts, pages, verified)
        hidden, n_emitted = self._hidden(slots, verified), self._i32(slots)
        args = (self.weights, self.cache.draft_kv, self.state, hidden, n_emitted, self._run(slots))
        return self._program(key, propose, args, donated=(1, 2), outputs=(self.cache.draft_kv, self.state))

    def _continue(self, key: Hashable, slots: int, drafts: int) -> Program:
        continue_with = partial(last_step.continue_with, self.parts, drafts)
        expected = self._whole(empty_continuation(slots, self.draft_counts[-1]))
        args = (self.state, expected, self._run(slots))
        return self._program(key, continue_with, args, donated=(0,), outputs=self.state)

    def _upload(self, key: Hashable) -> Program:
        args = (self.grammars, self._i32(), self._array(jnp.uint32, CHUNK))
        return self._program(key, put_words, args, donated=(0,), outputs=self.grammars)

    def _masks(self, key: Hashable, rows: int) -> Program:
        assert self.grammars is not None
        words = self.grammars.host_masks.shape[-1]
        args = (self.grammars, self._i32(2, rows), self._array(jnp.uint32, rows, words))
        return self._program(key, put_host_masks, args, donated=(0,), outputs=self.grammars)

    def _grammars(self, key: Hashable, rows: int) -> Program:
        args = (self.state, self._i32(rows), GrammarRow(self._i32(rows), self._i32(rows)), self._i32(rows))
        return self._program(key, batch.set_grammars, args, donated=(0,), outputs=self.state)

    @property
    def proposed_counts(self) -> tuple[int, ...]:
        """The K for which a proposer runs: not for 0, unless it has to store KV of what was said."""
        if self.parts.proposer is None:
            return ()
        return tuple(k for k in self.draft_counts if k or self.cache.draft_kv is not None)

    def structured(self, held: bool) -> bool:
        """Whether a step is held to grammars; `held`: some request of it has one."""
        return held or (self.parts.always_masks and self.grammars is not None)

    def verified(self, drafts: int, held: bool) -> int:
        """What a proposer is told of the K before it: that where it reads hidden states, and where it has KV and some
        request has a grammar, whose drafts are none of its own; else 0."""
        may_be_foreign = held and self.cache.draft_kv is not None
        return drafts if self.cache.boundary is not None or may_be_foreign else 0

    @property
    def _held(self) -> tuple[bool, ...]:
        return (False,) if self.grammars is None else (False, True)

    def _program(
        self, key: Hashable, function: Any, args: tuple[Any, ...], donated: tuple[int, ...], outputs: Any
    ) -> Program:
        mesh = self.parts.mesh
        shardings = None if mesh is None else jax.tree.map(lambda x: x.sharding, outputs)
        return Program(key, jax.jit(function, donate_argnums=donated, out_shardings=shardings), args)

    def _array(self, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        mesh = self.parts.mesh
        whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def _whole(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: self._array(x.dtype, *x.shape), tree)

    def _i32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._array(jnp.int32, *shape)

    def _run(self, slots: int) -> jax.ShapeDtypeStruct:
        return self._array(jnp.bool_, slots)

    def _row(self) -> SlotRow:
        return jax.tree.map(lambda x: self._array(x.dtype, *x.shape[1:]), self.state.rows)

    def _logits(self, slots: int, drafts: int) -> jax.ShapeDtypeStruct:
        """Of 1+K rows a slot, split by vocabulary where the mesh divides it."""
        shape = (slots * (1 + drafts), self.parts.model.vocab_size)
        placed = sharding((None, "vocab"), shape, self.parts.mesh)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)

    def _hidden(self, slots: int, drafts: int) -> Hidden | None:
        """What `forward` gives a proposer."""
        if self.cache.boundary is None:
            return None
        forward = partial(step.forward, self.parts, drafts, self.buckets.pages[0])
        args = (self.weights, self.cache, step.view_of(self.state), self._run(slots))
        return self._whole(jax.eval_shape(forward, *args)[2])
