"""Keeps the batch on the device in step with the scheduler, and starts the programs. Never waits for the device."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve import batch, step
from jaxserve.batch import MAX_STOP_IDS, BatchState, SlotRow
from jaxserve.config import Buckets, bucket
from jaxserve.kv_manager import KVCacheManager
from jaxserve.programs import Program, Programs
from jaxserve.request import Request, RequestStatus
from jaxserve.scheduler import PrefillChunk, SchedulerOutput
from jaxserve.step import Cache, PrefillPlan, StepOutput
from models.base import ForwardInputs, Model
from pallas_kernels import Filters


@dataclass
class InFlight:
    """A dispatched step: who sits in which row, and the device values that will say what they got."""

    scheduled: SchedulerOutput
    rows: list[tuple[int, Request]]
    output: StepOutput | None


@dataclass
class Collected:
    """A step's results on the host, by request id."""

    tokens: dict[str, list[int]]
    logprobs: dict[str, list[float]]
    errors: dict[str, str]


class Runner:
    """Owns the device values: parameters, page pool, batch. Slot i belongs to `slots[i]`; slots are dense."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh | None,
        buckets: Buckets,
        kv_manager: KVCacheManager,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        vocab_limit: int,
        keep_boundary_hidden: bool,
        params: Any = None,
    ) -> None:
        self.model, self._mesh, self.buckets, self._kv_manager = model, mesh, buckets, kv_manager
        self._block_size, self._vocab_limit = block_size, vocab_limit
        self._whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self.params = model.load_params(mesh) if params is None else params
        self.batch: BatchState = self._place(batch.empty_batch(max_num_seqs, max_model_len, buckets.pages[-1], 0))
        kv = model.init_kv(num_blocks, block_size, mesh)
        boundary = self._make_boundary(kv, num_blocks) if keep_boundary_hidden else None
        self.cache = Cache(kv=kv, boundary=boundary, block_size=block_size)
        self.slots: list[Request] = []
        self._abstract = jax.tree.map(_abstract, (self.params, self.cache, self.batch))
        self.programs = Programs(self._program)

    # ---- one step ----

    def dispatch(self, scheduled: SchedulerOutput) -> InFlight | None:
        """Start what was scheduled; None when that is nothing."""
        self._release_slots()
        for request in scheduled.admitted:
            self._fill_slot(request)
        if scheduled.block_table_changes:
            self._send_block_tables(scheduled.block_table_changes)
        if scheduled.prefill:
            self._prefill(scheduled.prefill)
        rows = [(r.slot, r) for r in scheduled.decode if r.slot is not None]
        if not rows:
            return InFlight(scheduled, rows, None) if scheduled.prefill else None
        output = self._decode(rows)
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()
        return InFlight(scheduled, rows, output)

    @staticmethod
    def collect(flight: InFlight) -> Collected:
        """Wait for a dispatched step and read it."""
        collected = Collected({}, {}, {})
        if flight.output is None:
            return collected
        tokens, logprobs = np.asarray(flight.output.tokens).tolist(), np.asarray(flight.output.logprobs).tolist()
        finite = np.asarray(flight.output.finite).tolist()
        for row, request in flight.rows:
            emitted = [t for t in tokens[row] if t >= 0]
            collected.tokens[request.request_id] = emitted
            collected.logprobs[request.request_id] = logprobs[row][: len(emitted)]
            if not finite[row]:
                collected.errors[request.request_id] = "the model's logits were NaN or left no token possible"
        return collected

    # ---- slots ----

    def _release_slots(self) -> None:
        """Close the gaps left by requests that no longer run; the last slot moves into a gap."""
        for i in reversed(range(len(self.slots))):
            if self.slots[i].status is RequestStatus.RUNNING:
                continue
            self.slots[i].slot = None
            last = self.slots.pop()
            if i < len(self.slots):
                self.batch = self.programs["move",](self.batch, np.int32(len(self.slots)), np.int32(i))
                self.slots[i], last.slot = last, i

    def _fill_slot(self, request: Request) -> None:
        request.slot = len(self.slots)
        self.slots.append(request)
        width = bucket(self.buckets.history, request.num_tokens)
        tokens = np.zeros(width, np.int32)
        tokens[: request.num_tokens] = request.token_ids
        self.batch = self.programs["fill", width](self.batch, np.int32(request.slot), tokens, slot_row(request))

    def _send_block_tables(self, requests: list[Request]) -> None:
        width, slots = self.buckets.pages[-1], len(self.batch.active)
        size = bucket(self.buckets.table_rows, len(requests))
        index = np.full(size, slots, np.int32)  # past the end: dropped
        tables = np.zeros((size, width), np.int32)
        for i, request in enumerate(requests):
            if request.slot is not None:
                blocks = self._kv_manager.block_ids(request)
                index[i] = request.slot
                tables[i, : len(blocks)] = blocks
        self.batch = self.programs["tables", size](self.batch, index, tables)

    # ---- the two programs ----

    def _prefill(self, chunks: list[PrefillChunk]) -> None:
        tile = self.buckets.tile
        tiles = [
            (chunk.request.slot, start, min(tile, chunk.start + chunk.count - start))
            for chunk in chunks
            for start in range(chunk.start, chunk.start + chunk.count, tile)
        ]
        end = max(chunk.start + chunk.count for chunk in chunks)
        pages = bucket(self.buckets.prefill_pages, -(-end // self._block_size))
        plan = np.zeros((3, bucket(self.buckets.prefill_tiles, len(tiles))), np.int32)
        plan[:, : len(tiles)] = np.array(tiles, np.int32).T
        self.cache = self.programs["prefill", plan.shape[1], pages](
            self.params, self.cache, self.batch, PrefillPlan(*plan)
        )

    def _decode(self, rows: list[tuple[int, Request]]) -> StepOutput:
        run = np.zeros(bucket(self.buckets.slots, len(self.slots)), bool)
        run[[row for row, _ in rows]] = True
        # This step's own positions are in flight already.
        longest = max(r.num_tokens + r.num_in_flight for _, r in rows)
        pages = bucket(self.buckets.pages, -(-(longest - 1) // self._block_size))
        self.cache, self.batch, output = self.programs["decode", len(run), pages](
            self.params, self.cache, self.batch, run
        )
        return output

    # ---- programs ----

    def warmup(self, progress: bool = True) -> None:
        """Compile every program that any traffic can ask for."""
        self.programs.warmup(self._keys(), progress)

    def _keys(self) -> Iterator[Hashable]:
        b = self.buckets
        yield ("move",)
        yield from (("fill", n) for n in b.history)
        yield from (("tables", n) for n in b.table_rows)
        yield from (("decode", s, p) for s in b.slots for p in b.pages)
        yield from (("prefill", n, p) for n in b.prefill_tiles for p in b.prefill_pages)

    def _program(self, key: Any) -> Program:
        """The program of a key. Shardings are fixed on the way in and out: what is donated must come back as it was."""
        params, cache, state = self._abstract
        name, *sizes = key
        i32 = partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=self._whole)
        if name == "move":
            return self._compiled_as(key, batch.move_slot, (state, i32(()), i32(())), donated=(0,), outputs=state)
        if name == "fill":
            args: tuple[Any, ...] = (state, i32(()), i32((sizes[0],)), self._abstract_row())
            return self._compiled_as(key, batch.fill_slot, args, donated=(0,), outputs=state)
        if name == "tables":
            args = (state, i32((sizes[0],)), i32((sizes[0], self.buckets.pages[-1])))
            return self._compiled_as(key, batch.set_block_tables, args, donated=(0,), outputs=state)
        if name == "prefill":
            prefill = partial(step.prefill, self.model, self._mesh, self.buckets.tile, sizes[1])
            plan = PrefillPlan(*(i32((sizes[0],)) for _ in range(3)))
            return self._compiled_as(key, prefill, (params, cache, state, plan), donated=(1,), outputs=cache)
        decode = partial(step.decode, self.model, self._mesh, self._vocab_limit, sizes[1])
        run = jax.ShapeDtypeStruct((sizes[0],), jnp.bool_, sharding=self._whole)
        output = StepOutput(*(jax.ShapeDtypeStruct((), jnp.int32, sharding=self._whole) for _ in range(3)))
        return self._compiled_as(
            key, decode, (params, cache, state, run), donated=(1, 2), outputs=(cache, state, output)
        )

    def _compiled_as(
        self, key: Hashable, function: Any, args: tuple[Any, ...], donated: tuple[int, ...], outputs: Any
    ) -> Program:
        shardings = None if self._mesh is None else jax.tree.map(lambda x: x.sharding, outputs)
        return Program(key, jax.jit(function, donate_argnums=donated, out_shardings=shardings), args)

    def _abstract_row(self) -> SlotRow:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=self._whole), self._abstract[2].rows
        )

    def _place(self, tree: Any) -> Any:
        return tree if self._whole is None else jax.device_put(tree, self._whole)

    def _make_boundary(self, kv: Any, num_blocks: int) -> jax.Array:
        inputs = ForwardInputs(*(jax.ShapeDtypeStruct((1, 1), jnp.int32) for _ in range(3)))
        hidden, _ = jax.eval_shape(lambda p, c, x: self.model.forward(p, c, x, self._mesh), self.params, kv, inputs)
        return self._place(jnp.zeros((num_blocks, hidden.shape[-1]), hidden.dtype))


def slot_row(request: Request) -> SlotRow:
    """A request's parameters as device values (NumPy scalars: nothing is compiled to make them)."""
    p = request.sampling_params
    stops = (*sorted(request.eos_token_ids), *p.stop_token_ids)[:MAX_STOP_IDS]  # no EOS ids under ignore_eos
    seed = request.seed & (2**64 - 1)
    return SlotRow(
        num_tokens=np.int32(request.num_tokens),
        prompt_len=np.int32(len(request.prompt_token_ids)),
        max_tokens_total=np.int32(request.max_total_tokens),
        stop_ids=np.array([*stops, *[-1] * (MAX_STOP_IDS - len(stops))], np.int32),
        seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        filters=Filters(
            temperature=_temperature(p.temperature),
            min_p=np.float32(p.min_p),
            top_k=np.int32(max(p.top_k, 0)),
            top_p=np.float32(p.top_p),
        ),
        want_logprob=np.bool_(p.logprobs is not None),
    )


def _temperature(value: float) -> np.float32:
    """In float32, where neither the smallest becomes 0 (greedy) nor the largest infinite."""
    limits = np.finfo(np.float32)
    return np.float32(np.clip(value, limits.tiny, limits.max) if value > 0 else 0)


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    sharding = x.sharding if isinstance(x.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
