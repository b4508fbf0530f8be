"""Keeps the batch on the device in step with the scheduler, and starts the programs. Never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve import batch
from jaxserve.batch import BatchState, SlotRow
from jaxserve.config import Buckets, bucket
from jaxserve.kv_manager import KVCacheManager
from jaxserve.last_step import StepOutput
from jaxserve.programs import Programs
from jaxserve.request import Request
from jaxserve.sampling.logprobs import Logprobs, TokenLogprobs, most_probable, token_logprobs
from jaxserve.sampling.slots import by_device
from jaxserve.scheduler import PrefillChunk, SchedulerOutput
from jaxserve.slot_row import slot_row
from jaxserve.slot_table import SlotTable
from jaxserve.speculative.continuation import empty_continuation
from jaxserve.speculative.suffix import SuffixProposer
from jaxserve.step import Cache, Hidden, Parts, PrefillPlan, Weights, view_of
from jaxserve.step_programs import StepPrograms
from jaxserve.structured.device import DEAD, EXHAUSTED, GrammarRow
from jaxserve.structured.tables import GrammarTables


@dataclass(frozen=True)
class Tile:
    """Positions [start, start + count) of a prompt."""

    request: Request
    start: int
    count: int

    def planned(self) -> tuple[int, ...]:
        """In the order of PrefillPlan."""
        request = self.request
        number = 0 if request.scores is None else request.scores.number
        return request.slot or 0, self.start, self.count, request.num_stored_tokens, number


@dataclass
class InFlight:
    """A step on its way: who sits in which row, and the device values that will say what they got.

    run, logits, hidden: what `sample` needs of `start`. output: once it is sampled.
    """

    scheduled: SchedulerOutput
    rows: list[tuple[int, Request]]
    scores: list[tuple[list[Tile], Logprobs]]
    run: np.ndarray
    logits: jax.Array | None = None
    hidden: Hidden | None = None
    output: StepOutput | None = None

    @property
    def matched(self) -> list[tuple[int, Request]]:
        """The rows whose masks the host makes, once it knows the tokens of the step before."""
        return [(row, r) for row, r in self.rows if r.constraint is not None and r.constraint.is_on_host]


@dataclass
class Collected:
    """A step's results on the host, by request id."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # where wanted, one for each token
    errors: dict[str, str] = field(default_factory=dict)
    num_drafts: dict[str, int] = field(default_factory=dict)  # verified
    complete: set[str] = field(default_factory=set)  # whose grammar leaves nothing more to say
    num_violations: int = 0  # of a grammar: faults of this program


class Runner:
    """Owns the device values: parameters, page pool, batch."""

    def __init__(
        self,
        parts: Parts,
        buckets: Buckets,
        kv_manager: KVCacheManager,
        weights: Weights,
        cache: Cache,
        *,
        max_model_len: int,
        draft_counts: tuple[int, ...] = (0,),
        suffix: SuffixProposer | None = None,
        draft_logits: bool = False,
        grammar_bytes: int = 0,
    ) -> None:
        """draft_counts: every K that may be scheduled. suffix: drafts made on the host. draft_logits: drafts are drawn.
        grammar_bytes: memory for grammars' tables; 0: no request has a grammar."""
        self.parts, self.buckets, self._kv_manager = parts, buckets, kv_manager
        self.model, self.sampler, mesh = parts.model, parts.sampler, parts.mesh
        self._block_size, self._suffix, self._max_drafts = cache.block_size, suffix, draft_counts[-1]
        self._whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self.weights, self.cache = weights, cache
        row = batch.empty_row(self.sampler.processors, self.sampler.max_listed)
        slots, pages, vocab = buckets.slots[-1], buckets.pages[-1], parts.model.vocab_size
        state = batch.empty_batch(slots, max_model_len, pages, self._max_drafts, row, vocab, draft_logits)
        own = by_device((state.use, state.draft_logits), mesh)
        self.batch: BatchState = replace(
            self._place(replace(state, draft_logits=None)), use=own[0], draft_logits=own[1]
        )
        self.slots = SlotTable()
        abstract_weights, abstract_cache, abstract_batch = jax.tree.map(_abstract, (weights, cache, self.batch))
        self.grammars = None
        if grammar_bytes:
            self.grammars = GrammarTables(grammar_bytes, slots, self._max_drafts, vocab, self._place)
        # Probabilistic drafts come with what they were drawn from, which the host cannot add to.
        self._host_forced = grammar_bytes > 0 and self._max_drafts > 0 and not draft_logits
        self._step_programs = StepPrograms(
            parts,
            buckets,
            abstract_weights,
            abstract_cache,
            abstract_batch,
            draft_counts,
            host_drafts=suffix is not None or self._host_forced,
            grammars=None if self.grammars is None else jax.tree.map(_abstract, self.grammars.values),
        )
        self.programs = Programs(self._step_programs.program)

    @property
    def params(self) -> Any:
        """The model's weights."""
        return self.weights.model

    # ---- one step ----

    def start(self, scheduled: SchedulerOutput) -> InFlight | None:
        """Start what was scheduled, up to the logits; None when that is nothing."""
        self._update_slots(scheduled.admitted)
        if scheduled.block_table_changes:
            self._send_block_tables(scheduled.block_table_changes)
        rows = [(r.slot, r) for r in scheduled.decode if r.slot is not None]
        if self.grammars is not None:
            self._hold_to_grammars(self.grammars, rows)
        scores = self._prefill(scheduled.prefill)
        if not rows and not scheduled.prefill:
            return None
        run = np.zeros(bucket(self.buckets.slots, len(self.slots.requests)), bool)
        run[[row for row, _ in rows]] = True
        flight = InFlight(scheduled, rows, scores, run)
        if rows:
            self._forward(flight)
        return flight

    def sample(self, flight: InFlight) -> dict[str, str]:
        """From the logits on; never waits where no masks are made on the host. Returns the errors of those masks, by
        request id: the step goes on without them."""
        if not flight.rows:
            return {}
        errors = {} if self.grammars is None else self._send_masks(self.grammars, flight)
        output = self._sample(flight)
        if not any(request.sampling_params.wants_logprobs for _, request in flight.rows):
            output = replace(output, logprobs=None)
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()
        flight.output, flight.logits, flight.hidden = output, None, None
        return errors

    def collect(self, flight: InFlight) -> Collected:
        """Wait for a sampled step and read it."""
        collected = Collected()
        for tiles, found in flight.scores:
            _take_scores(tiles, found)
        if flight.output is None:
            return collected
        output: StepOutput = jax.tree.map(np.asarray, flight.output)
        tokens, finite, n_drafts = (x.tolist() for x in (output.tokens, output.finite, output.n_drafts))
        for row, request in flight.rows:
            emitted = [t for t in tokens[row] if t >= 0]
            collected.tokens[request.request_id] = emitted
            collected.num_drafts[request.request_id] = n_drafts[row]
            logprobs, p = output.logprobs, request.sampling_params
            if logprobs is not None and p.wants_logprobs:
                collected.logprobs[request.request_id] = [
                    token_logprobs(logprobs, (row, j), token, p.logprobs or 0, p.logprob_token_ids or ())
                    for j, token in enumerate(emitted)
                ]
            if not finite[row]:
                collected.errors[request.request_id] = self._reason(request)
        if output.grammar is not None:
            _take_grammar_flags(flight, output.grammar.tolist(), collected)
        return collected

    # ---- slots ----

    def _update_slots(self, admitted: Sequence[Request]) -> None:
        if self.grammars is not None:
            self.grammars.release()
        changes = self.slots.update(admitted)
        for request in changes.added:
            width = bucket(self.buckets.history, request.num_tokens)
            tokens = np.zeros(width, np.int32)
            tokens[: request.num_tokens] = request.token_ids
            row = self._row(request)
            slot = np.int32(request.slot or 0)
            self.batch = self.programs["fill", width](self.batch, slot, tokens, row)
        for source, target in changes.moved:
            self.batch = self.programs["move",](self.batch, np.int32(source), np.int32(target))
        for processor in self.sampler.processors:
            processor.update_state(changes.update)

    def _row(self, request: Request) -> SlotRow:
        rows = list(zip(self.sampler.processors, request.processor_rows, strict=True))
        return replace(
            slot_row(request, self.sampler.max_listed),
            uses=np.array([row is not None for _, row in rows], bool),
            processors=tuple(p.empty_row() if row is None else row for p, row in rows),
        )

    def _reason(self, request: Request) -> str:
        """Why a request had nothing to draw from."""
        for processor, row in zip(self.sampler.processors, request.processor_rows, strict=True):
            if row is not None and (reason := processor.failure(row)):
                return reason
        return "the model's logits were NaN or left no token possible"

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

    def _prefill(self, chunks: list[PrefillChunk]) -> list[tuple[list[Tile], Logprobs]]:
        """Start the prefill of chunks; what scores of prompts it will give."""
        size = self.buckets.tile
        tiles = [
            Tile(chunk.request, start, min(size, chunk.start + chunk.count - start))
            for chunk in chunks
            for start in range(chunk.start, chunk.start + chunk.count, size)
        ]
        plain = [t for t in tiles if t.request.scores is None or t.request.scores.is_complete]
        if plain:
            self.cache = self._run_tiles("prefill", self.buckets.prefill_tiles, plain)
        scored = [t for t in tiles if t.request.scores is not None and not t.request.scores.is_complete]
        if not scored:
            return []
        self.cache, found = self._run_tiles("score", self.buckets.score_tiles, scored)
        for array in jax.tree.leaves(found):
            array.copy_to_host_async()
        return [(scored, found)]

    def _run_tiles(self, program: str, buckets: tuple[int, ...], tiles: list[Tile]) -> Any:
        end = max(tile.start + tile.count for tile in tiles)
        pages = bucket(self.buckets.prefill_pages, -(-end // self._block_size))
        plan = np.zeros((5, bucket(buckets, len(tiles))), np.int32)
        plan[:, : len(tiles)] = np.array([tile.planned() for tile in tiles], np.int32).T
        return self.programs[program, plan.shape[1], pages](
            self.weights, self.cache, view_of(self.batch), PrefillPlan(*plan)
        )

    def _forward(self, flight: InFlight) -> None:
        """Logits of each row's newest token and of the drafts to be verified."""
        scheduled, rows, run = flight.scheduled, flight.rows, flight.run
        drafts = scheduled.num_positions - 1
        if drafts:
            self._send_drafts(rows, run, drafts)
        # This step's own positions are in flight already.
        longest = max(r.num_tokens + r.num_in_flight for _, r in rows)
        key = "forward", len(run), self._pages(longest - 1), drafts
        self.cache, flight.logits, flight.hidden = self.programs[key](
            self.weights, self.cache, view_of(self.batch), run
        )

    def _sample(self, flight: InFlight) -> StepOutput:
        """Tokens, and drafts for the step after."""
        scheduled, run, hidden = flight.scheduled, flight.run, flight.hidden
        drafts, next_drafts, slots = scheduled.num_positions - 1, scheduled.next_drafts, len(flight.run)
        shaped = any(request.is_shaped for request in self.slots.requests)
        held = self.grammars is not None and self.grammars.num_held > 0
        structured = self._step_programs.structured(held)
        grammars = self.grammars.values if structured and self.grammars is not None else None
        self.batch, output = self.programs["sample", slots, shaped, structured, drafts](
            self.batch, flight.logits, run, grammars
        )
        if next_drafts in self._step_programs.proposed_counts:
            longest = max(r.num_tokens + r.num_in_flight for _, r in flight.rows)
            pages = self.buckets.pages[-1] if self.cache.draft_kv is None else self._pages(longest + next_drafts)
            verified = self._step_programs.verified(drafts, held)
            draft_kv, self.batch = self.programs["propose", slots, pages, verified, next_drafts](
                self.weights, self.cache.draft_kv, self.batch, hidden, output.n_emitted, run
            )
            self.cache = replace(self.cache, draft_kv=draft_kv)
        return output

    def _pages(self, positions: int) -> int:
        return bucket(self.buckets.pages, min(-(-positions // self._block_size), self.buckets.pages[-1]))

    def _send_drafts(self, rows: list[tuple[int, Request]], run: np.ndarray, drafts: int) -> None:
        """Drafts that follow what is known here; the device takes those that follow what was said since."""
        expected = empty_continuation(len(run), self._max_drafts)
        count = expected.tokens.shape[1]
        for row, request in rows:
            tokens: Sequence[int] = ()
            if self._host_forced and request.constraint is not None:
                tokens = request.constraint.forced(count)
            if not tokens and self._suffix is not None:
                tokens, expected.most[row] = self._suffix.expect(request.token_ids, 1 + self._max_drafts)
            expected.start[row] = request.num_tokens
            expected.tokens[row, : len(tokens)] = tokens
        if (expected.tokens[:, 0] >= 0).any():
            self.batch = self.programs["continue", len(run), drafts](self.batch, expected, run)

    # ---- grammars ----

    def _hold_to_grammars(self, grammars: GrammarTables, rows: list[tuple[int, Request]]) -> None:
        """Tell the device of grammars that it does not know yet, of requests that are about to decode."""
        new = [(row, r) for row, r in rows if r.constraint is not None and not grammars.holds(r)]
        if not new:
            return
        size = bucket(self.buckets.table_rows, len(new))
        slots = np.full(size, len(self.batch.active), np.int32)  # past the end: dropped
        places = np.zeros((3, size), np.int32)
        for i, (row, request) in enumerate(new):
            slots[i] = row
            places[:, i] = grammars.hold(request, self.programs)
        classes, start, state = places
        self.batch = self.programs["grammars", size](self.batch, slots, GrammarRow(classes, start), state)

    def _send_masks(self, grammars: GrammarTables, flight: InFlight) -> dict[str, str]:
        """The masks that matchers make, for each row of their requests."""
        matched = [(row, r) for row, r in flight.matched if not r.status.is_finished]
        if not matched:
            return {}
        drafts = flight.scheduled.num_positions - 1
        # A copy: the array is about to be donated.
        on_device = np.array(self.batch.drafts) if drafts else np.zeros((len(flight.run), 0), np.int32)
        made = grammars.fill(matched, on_device[:, :drafts])
        size = bucket(self.buckets.mask_rows, len(made.words))
        index = np.full((2, size), len(self.batch.active), np.int32)  # past the end: dropped
        index[:, : len(made.words)] = made.rows
        words = np.zeros((size, made.words.shape[1]), np.uint32)
        words[: len(made.words)] = made.words
        grammars.values = self.programs["masks", size](grammars.values, index, words)
        return made.errors

    def warmup(self, progress: bool = True) -> None:
        """Compile every program that any traffic can ask for."""
        self.programs.warmup(self._step_programs.keys(), progress)

    def release(self) -> None:
        """Let go of everything on the device, for good."""
        del self.weights, self.cache, self.batch
        self.grammars = None
        self.programs.clear()

    def _place(self, tree: Any) -> Any:
        return tree if self._whole is None else jax.device_put(tree, self._whole)


def _take_grammar_flags(flight: InFlight, flags: list[int], collected: Collected) -> None:
    for row, request in flight.rows:
        if request.constraint is None or request.constraint.is_on_host:
            continue
        if flags[row] == DEAD:
            collected.num_violations += 1
            collected.errors[request.request_id] = "the output left its grammar: a fault of jaxserve"
        elif flags[row] == EXHAUSTED:
            collected.complete.add(request.request_id)


def _take_scores(tiles: list[Tile], found: Logprobs) -> None:
    host = jax.tree.map(np.asarray, found)
    for i, tile in enumerate(tiles):
        if (scores := tile.request.scores) is not None:
            own = most_probable(jax.tree.map(lambda x, i=i, n=tile.count: x[i, :n], host), scores.number)
            scores.put(tile.start + 1, jax.tree.map(np.array, own))  # copies, which do not keep the whole step's


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    sharding = x.sharding if isinstance(x.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
