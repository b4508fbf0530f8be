"""The scheduler against a simulated device that runs one step behind, on fixed cases and on random traffic.

The simulated device keeps what was written at every (block, offset): the whole prefix up to that token. A program
that reads a position checks that prefix, and the next token is a function of the prefix it *read*, so stale, missing
or foreign KV cannot go unnoticed.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.block_pool import BlockPool
from jaxserve.kv_manager import KVCacheManager, block_hash, root_hash
from jaxserve.request import Request, RequestStatus
from jaxserve.scheduler import PrefillChunk, Scheduler, SchedulerOutput
from jaxserve.scheduler_config import SchedulerConfig

VOCAB, EOS, MAX_LEN = 7, 6, 32
Prefix = tuple[Any, ...]  # salt, then the tokens


@dataclass
class Params:
    max_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] = field(default_factory=list)
    min_tokens: int = 0
    repetition_detection: None = None
    thinking_token_budget: None = None
    penalizes: bool = False


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes and what happens to it."""

    prompt: tuple[int, ...]
    max_tokens: int | None = 4
    step: int = 0
    seed: int = 0
    salt: str | None = None
    ignore_eos: bool = False
    stop: tuple[int, ...] = ()
    priority: int = 0
    grammar_step: int | None = None  # its grammar is compiled by then
    abort_at: tuple[int, int] | None = None  # step, and place within the step
    error_after: int | None = None  # the device reports NaN once this many tokens are out


def next_token(seed: int, prefix: Prefix) -> int:
    return random.Random(repr((seed, prefix[1:]))).randrange(VOCAB)


def alone(arrival: Arrival) -> list[int]:
    """What the request generates when nothing disturbs it."""
    tokens, output = list(arrival.prompt), []
    limit = MAX_LEN if arrival.max_tokens is None else min(MAX_LEN, len(tokens) + arrival.max_tokens)
    while len(tokens) < limit:
        token = next_token(arrival.seed, (None, *tokens))
        tokens.append(token)
        output.append(token)
        if token in arrival.stop or (token == EOS and not arrival.ignore_eos):
            break
    return output


@cache
def chain(prefix: Prefix, block_size: int) -> bytes:
    """Content hash of the block that ends with this prefix."""
    parent = root_hash(prefix[0])
    for i in range(1, len(prefix), block_size):
        parent = block_hash(parent, prefix[i : i + block_size])
    return parent


class Device:
    """Runs programs in dispatch order; knows of requests only what the scheduler's output tells it."""

    def __init__(self, kv: KVCacheManager, max_rows: int, rng: random.Random) -> None:
        self.kv, self.max_rows, self.rng = kv, max_rows, rng
        self.memory: dict[tuple[int, int], Prefix] = {}
        self.tokens: dict[Request, list[int]] = {}
        self.tables: dict[Request, list[int]] = {}

    def dispatch(self, output: SchedulerOutput) -> tuple[dict[str, list[int]], dict[str, str]]:
        for request in [r for r in self.tokens if r.status is not RequestStatus.RUNNING]:
            del self.tokens[request], self.tables[request]
        for request in output.admitted:
            assert request not in self.tokens
            self.tokens[request] = list(request.token_ids)
        assert len(self.tokens) <= self.max_rows
        for request in self._with_slot(output.block_table_changes):
            self.tables[request] = list(self.kv.block_ids(request))
        for chunk in output.prefill:
            if not self._with_slot([chunk.request]):
                continue
            tokens = self.tokens[chunk.request]
            assert chunk.count > 0
            assert chunk.start + chunk.count <= len(tokens) - 1
            self._read(chunk.request, chunk.start)
            for position in range(chunk.start, chunk.start + chunk.count):
                self._write(chunk.request, position, tokens[: position + 1])
        return self._decode(output)

    def _decode(self, output: SchedulerOutput) -> tuple[dict[str, list[int]], dict[str, str]]:
        sampled, errors = {}, {}
        for request in self._with_slot(output.decode):
            arrival: Arrival = cast(Any, request).arrival
            tokens = self.tokens[request]
            start = len(tokens) - 1
            self._read(request, start)
            emitted: list[int] = []
            draft_tokens = list(tokens)
            for row in range(output.num_positions):
                self._write(request, start + row, draft_tokens)
                if not self.tables[request] or start + row >= request.max_total_tokens - 1:
                    token = -1  # read from the null block, and of no consequence
                else:
                    token = next_token(arrival.seed, self._at(request, start + row))
                emitted.append(token)
                if row + 1 == output.num_positions or self.rng.random() < 0.4:  # or the next draft is wrong
                    draft_tokens.append((token + 1) % VOCAB)
                    for late in range(row + 1, output.num_positions):
                        self._write(request, start + late, draft_tokens)
                        draft_tokens.append(0)
                    break
                draft_tokens.append(token)
            tokens += emitted
            sampled[request.request_id] = emitted
            if arrival.error_after is not None and len(tokens) - len(arrival.prompt) > arrival.error_after:
                errors[request.request_id] = "logits are NaN"
        return sampled, errors

    def _with_slot(self, requests: list[Request]) -> list[Request]:
        """All but those aborted after they were scheduled and before the dispatch."""
        missing = [r for r in requests if r not in self.tokens]
        assert all(r.status is RequestStatus.FINISHED_ABORTED for r in missing)
        return [r for r in requests if r in self.tokens]

    def _slot(self, request: Request, position: int) -> tuple[int, int] | None:
        table, size = self.tables[request], self.kv.block_size
        if position // size < len(table):
            return table[position // size], position % size
        return None

    def _at(self, request: Request, position: int) -> Prefix:
        slot = self._slot(request, position)
        assert slot is not None, f"position {position} of {request.request_id} has no block"
        return self.memory[slot]

    def _read(self, request: Request, count: int) -> None:
        if not self.tables[request]:  # aborted between its admission and the dispatch
            assert request.status.is_finished
            return
        for position in range(min(count, request.max_total_tokens - 1)):
            written = self._at(request, position)
            assert written == (request.cache_salt, *self.tokens[request][: position + 1])

    def _write(self, request: Request, position: int, tokens: Sequence[int]) -> None:
        if slot := self._slot(request, position):
            self.memory[slot] = (request.cache_salt, *tokens)


class TracedRequest(Request):
    """A request that remembers its arrival (Request itself has slots)."""

    arrival: Arrival


@dataclass
class Compiling:
    """A grammar that is there from some step on."""

    simulation: Simulation
    step: int

    @property
    def is_ready(self) -> bool:
        return self.simulation.step_index >= self.step


class Simulation:
    """The engine's loop, with every invariant checked on the way."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        *,
        depth: int = 1,
        caching: bool = True,
        watermark: float = 0.0,
        draft_counts: Sequence[int] = (),
    ) -> None:
        """draft_counts: K of one step after the other, over and over; without, always the most."""
        self.config, self.depth, self.step_index = config, depth, 0
        self.pool = BlockPool(num_blocks, caching)
        self.kv = KVCacheManager(self.pool, config.block_size, watermark)
        self.num_drafts = config.num_speculative_tokens
        self.draft_counts = cycle(draft_counts or [self.num_drafts])
        self.scheduler = Scheduler(config, self.kv, self.count_drafts)
        self.device = Device(self.kv, config.max_num_seqs, random.Random(0))
        self.pending: deque[tuple[SchedulerOutput, dict[str, list[int]], dict[str, str]]] = deque()
        self.requests: list[TracedRequest] = []

    def count_drafts(self, num_running: int) -> int:
        assert 1 <= num_running <= self.config.max_num_seqs
        self.num_drafts = next(self.draft_counts)
        return self.num_drafts

    def add(self, arrival: Arrival) -> TracedRequest:
        ready = arrival.grammar_step
        params = Params(arrival.max_tokens, arrival.ignore_eos, list(arrival.stop))
        request = TracedRequest(
            request_id=f"r{len(self.requests)}",
            prompt_token_ids=list(arrival.prompt),
            sampling_params=cast(Any, params),
            max_model_len=self.config.max_model_len,
            eos_token_ids=frozenset([EOS]),
            priority=arrival.priority,
            arrival_time=float(self.step_index),
            cache_salt=arrival.salt,
            constraint=None if ready is None else cast(Any, Compiling(self, ready)),
        )
        request.arrival = arrival
        self.scheduler.add_request(request)
        self.requests.append(request)
        return request

    def step(self) -> SchedulerOutput:
        self._abort(0)
        waiting_before = list(self.scheduler.waiting)
        output = self.scheduler.schedule()
        self._check_output(output, waiting_before)
        self.check_memory()
        self._abort(1)
        self.pending.append((output, *self.device.dispatch(output)))
        self.scheduler.after_dispatch(output)
        self.check_memory()
        self.check_cached_content()
        self._abort(2)
        if len(self.pending) > self.depth:
            self.collect()
        self.check_memory()
        self.check_cached_content()
        self._abort(3)
        self.step_index += 1
        return output

    def collect(self) -> list[Request]:
        return self.scheduler.update_from_output(*self.pending.popleft())

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Plays the traffic to its end; every request must finish within a bound that leaves no room for idling."""
        coming = deque(sorted(arrivals, key=lambda arrival: arrival.step))
        everyone = [*arrivals, *(request.arrival for request in self.requests)]
        work = sum(2 * (len(a.prompt) + min(a.max_tokens or MAX_LEN, MAX_LEN)) + 4 for a in everyone)
        bound = self.step_index + work + max((max(a.step, a.grammar_step or 0) for a in everyone), default=0)
        while coming or self.scheduler.has_unfinished():
            while coming and coming[0].step <= self.step_index:
                self.add(coming.popleft())
            self.step()
            assert self.step_index <= bound, "no progress"
        while self.pending:
            self.collect()
        self.step()  # releases the last slots
        self.check_end()

    def _abort(self, place: int) -> None:
        due = [r for r in self.requests if r.arrival.abort_at == (self.step_index, place)]
        unfinished = [r for r in due if not r.status.is_finished]
        assert self.scheduler.abort([*(r.request_id for r in due), "nobody"]) == unfinished

    # ---- invariants

    def _check_output(self, output: SchedulerOutput, waiting_before: list[Request]) -> None:
        config, scheduler = self.config, self.scheduler
        cost = sum(config.padded(c.count) for c in output.prefill) + output.num_positions * len(output.decode)
        assert cost <= config.max_num_batched_tokens
        assert output.next_drafts == self.num_drafts
        assert output.num_positions in (1, 1 + self.num_drafts)
        assert scheduler.num_running <= config.max_num_seqs
        for queue in (scheduler.running, scheduler.waiting):
            assert [r.order for r in queue] == sorted(r.order for r in queue)
        assert all(r.status is RequestStatus.RUNNING for r in scheduler.running)
        for requests in (output.decode, output.admitted, [c.request for c in output.prefill]):
            assert len(set(requests)) == len(requests)
            assert set(requests) <= set(scheduler.running)
        for request in output.decode:
            assert request.num_computed_tokens == request.num_tokens - 1
            before = request.num_tokens + request.num_in_flight - output.num_positions
            assert before < request.max_total_tokens, "decodes past its end"
            written = min(before + output.num_positions + config.num_lookahead_tokens, request.max_total_tokens) - 1
            assert written <= len(self.kv.block_ids(request)) * config.block_size
            assert not request.awaits_grammar
        assert all(r.num_computed_tokens == 0 and not r.status.is_finished for r in scheduler.waiting)
        threshold = config.long_prefill_token_threshold
        assert not threshold or all(c.count <= threshold for c in output.prefill)
        if not config.enable_chunked_prefill:
            assert all(c.start + c.count == c.request.num_tokens - 1 for c in output.prefill)
        assert not (output.preempted and output.admitted)
        if output.preempted:  # the tail yielded, not anybody more deserving
            assert all(p.order > r.order for p in output.preempted for r in scheduler.running)
        if output.admitted:  # nobody was overtaken, except while waiting for a grammar
            last = max(r.order for r in output.admitted)
            passed = [r for r in waiting_before if r.order < last and r not in output.admitted]
            assert all(r.awaits_grammar for r in passed)
        if any(r.awaits_grammar for r in output.admitted):  # whoever could decode came first
            assert all(r.awaits_grammar for r in scheduler.waiting)

    def check_memory(self) -> None:
        tables = self.kv._tables
        assert set(tables) == {r.request_id for r in self.scheduler.running}
        owners = Counter(block for table in tables.values() for block in table.blocks)
        assert [self.pool.ref_count(b) for b in range(self.pool.num_blocks)] == [
            owners[b] for b in range(self.pool.num_blocks)
        ]
        assert 0 not in owners
        assert set(self.pool._free) == set(range(1, self.pool.num_blocks)) - set(owners)
        content: dict[int, tuple[int, Prefix]] = {}
        for request in self.scheduler.running:
            blocks = tables[request.request_id].blocks
            assert len(set(blocks)) == len(blocks)
            for i, block in enumerate(blocks):
                if owners[block] > 1:  # shared: a full block of the same place in the same text
                    end = (i + 1) * self.config.block_size
                    assert end <= request.num_tokens - 1
                    mine = (i, (request.cache_salt, *request.token_ids[:end]))
                    assert content.setdefault(block, mine) == mine

    def check_cached_content(self) -> None:
        """Whatever can be found has been written, and holds what its hash says."""
        size = self.config.block_size
        assert {h: b for b, h in enumerate(self.pool._hashes) if h is not None} == self.pool._by_hash
        for content_hash, block in self.pool._by_hash.items():
            prefixes = [self.device.memory[block, offset] for offset in range(size)]
            assert chain(prefixes[-1], size) == content_hash
            assert all(p == prefixes[-1][: len(prefixes[-1]) - size + 1 + i] for i, p in enumerate(prefixes))

    def check_end(self) -> None:
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.scheduler.has_unfinished()
        assert self.pool.num_free == self.pool.num_usable
        assert not self.kv._tables
        assert not self.device.tokens
        assert not self.device.tables
        for request in self.requests:
            expected, got = alone(request.arrival), request.output_token_ids
            assert request.token_ids == [*request.arrival.prompt, *got]
            assert request.num_in_flight == 0
            assert request.status.is_finished
            reason = request.status.finish_reason
            if reason in ("abort", "error"):
                assert got == expected[: len(got)]
                assert request.arrival.abort_at if reason == "abort" else request.error
                continue
            assert got == expected
            ended = got[-1] in request.arrival.stop or (got[-1] == EOS and not request.arrival.ignore_eos)
            assert reason == ("stop" if ended else "length")


def make_config(**changes: Any) -> SchedulerConfig:
    base = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=MAX_LEN, block_size=4)
    return replace(base, **changes)


# ---- random traffic

optional = st.none
TEXT = (1, 2, 3, 4, 5, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0, 0)

arrivals = st.builds(
    Arrival,
    prompt=st.builds(
        lambda shared, own: TEXT[:shared] + tuple(own),
        st.integers(1, len(TEXT)),
        st.lists(st.integers(0, VOCAB - 1), max_size=4),
    ),
    max_tokens=optional() | st.integers(1, 14),
    step=st.integers(0, 20),
    seed=st.integers(0, 1),
    salt=st.sampled_from([None, None, "a"]),
    ignore_eos=st.booleans(),
    stop=st.sampled_from([(), (), (3,)]),
    priority=st.integers(-1, 1),
    grammar_step=optional() | st.integers(0, 25),
    abort_at=optional() | optional() | st.tuples(st.integers(0, 30), st.integers(0, 3)),
    error_after=optional() | optional() | st.integers(0, 6),
)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    chunked = draw(st.booleans())
    max_num_seqs, tile = draw(st.integers(1, 5)), draw(st.sampled_from([1, 4]))
    minimum = max_num_seqs + tile if chunked else max(max_num_seqs + tile, MAX_LEN)
    return make_config(
        max_num_seqs=max_num_seqs,
        prefill_tile=tile,
        max_num_batched_tokens=minimum + draw(st.integers(0, 20)),
        block_size=draw(st.sampled_from([1, 2, 4])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        enable_chunked_prefill=chunked,
        num_speculative_tokens=(drafts := draw(st.sampled_from([0, 3]))),
        num_lookahead_tokens=draw(st.integers(0, drafts)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])) if chunked else 0,
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    config=configs(),
    traffic=st.lists(arrivals, max_size=9),
    extra_blocks=st.integers(0, 12),
    depth=st.integers(0, 2),
    caching=st.sampled_from([True, True, True, False]),
    watermark=st.sampled_from([0.0, 0.2, 0.9]),
    draft_counts=st.lists(st.integers(0, 3), max_size=5),
)
def test_random_traffic(
    config: SchedulerConfig,
    traffic: list[Arrival],
    extra_blocks: int,
    depth: int,
    caching: bool,
    watermark: float,
    draft_counts: list[int],
) -> None:
    if config.policy == "fcfs":
        traffic = [replace(arrival, priority=0) for arrival in traffic]
    smallest = -(-(MAX_LEN - 1) // config.block_size)  # any request fits, though perhaps alone
    num_blocks = 1 + smallest + extra_blocks
    counts = [min(count, config.num_speculative_tokens) for count in draft_counts]
    Simulation(config, num_blocks, depth=depth, caching=caching, watermark=watermark, draft_counts=counts).run(traffic)


# ---- fixed cases


def test_a_prompt_is_computed_once_for_all_who_come_with_it() -> None:
    """The second waits a step for blocks that the first one writes: blocks are shared when they are written."""
    sim = Simulation(make_config(), 40)
    prompt = tuple(i % VOCAB for i in range(22))
    first, second, third = (sim.add(Arrival(prompt)) for _ in range(3))
    output = sim.step()
    assert [(c.request, c.start, c.count) for c in output.prefill] == [(first, 0, 21)]
    output = sim.step()
    assert [(c.request, c.start, c.count) for c in output.prefill] == [(second, 20, 1), (third, 20, 1)]
    assert (first.num_cached_tokens, second.num_cached_tokens, third.num_cached_tokens) == (0, 20, 20)
    sim.run([])


@pytest.mark.parametrize(("shared", "at_once"), [(4, True), (12, False)])
def test_who_shares_little_of_a_prompt_does_not_wait(shared: int, at_once: bool) -> None:
    sim = Simulation(make_config(), 40)
    first, second = ((5,) * shared + (token,) * (20 - shared) for token in (1, 2))
    a, b = sim.add(Arrival(first)), sim.add(Arrival(second))
    assert sim.step().admitted == ([a, b] if at_once else [a])
    sim.run([])


@pytest.mark.parametrize("threshold", [4, 6])
def test_a_long_prompt_is_waited_for_to_its_end(threshold: int) -> None:
    """Chunk after chunk, also of part of a block."""
    sim = Simulation(make_config(long_prefill_token_threshold=threshold), 40)
    prompt = tuple(i % VOCAB for i in range(22))
    first, second = sim.add(Arrival(prompt)), sim.add(Arrival(prompt))
    while second.num_computed_tokens == 0:
        sim.step()
    assert first.num_computed_tokens >= 20
    assert second.num_cached_tokens == 20
    sim.run([])


def test_drafts_go_on_when_the_only_request_ends() -> None:
    """Another waits for its blocks: it starts in the next step, which has the drafts of one request."""
    asked: list[int] = []
    sim = Simulation(make_config(max_num_batched_tokens=64, num_speculative_tokens=3), 1 + 8)
    sim.scheduler._num_drafts = lambda num_running: asked.append(num_running) or 3 * (num_running > 0)  # type: ignore[func-returns-value]
    sim.draft_counts = iter([])
    sim.num_drafts = 3
    first, second = (sim.add(Arrival((token,) * 17, max_tokens=12, ignore_eos=True)) for token in (1, 2))
    while not second.status.is_finished:
        assert sim.step().next_drafts == 3
    assert min(asked) == 1
    assert first.status.is_finished


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_the_last_token_is_always_computed(length: int, cached: int) -> None:
    sim = Simulation(make_config(), 40)
    prompt = tuple(i % VOCAB for i in range(length))
    sim.run([Arrival(prompt), Arrival(prompt, step=3)])
    assert sim.requests[1].num_cached_tokens == cached
    assert sim.scheduler.stats().prefix_hit_tokens == cached
    assert sim.scheduler.stats().prefix_queried_tokens == 2 * length


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_preempted_while_a_step_is_in_flight(drafts: int, depth: int) -> None:
    config = make_config(num_speculative_tokens=drafts, max_num_seqs=3)
    sim = Simulation(config, 1 + 8, depth=depth)
    sim.run([Arrival((1, 2, 3, i), max_tokens=20, ignore_eos=True) for i in range(3)])
    assert sim.scheduler.stats().num_preemptions > 0
    assert any(r.num_preemptions for r in sim.requests)


def test_preempted_request_resumes_only_after_its_tokens_are_collected() -> None:
    sim = Simulation(make_config(max_num_seqs=2), 1 + 8, depth=1)
    older, younger = (sim.add(Arrival((1, 2, i), max_tokens=28, ignore_eos=True)) for i in range(2))
    while not (output := sim.scheduler.schedule()).preempted:
        sim.pending.append((output, *sim.device.dispatch(output)))
        sim.scheduler.after_dispatch(output)
        if len(sim.pending) > 1:
            sim.collect()
    assert output.preempted == [younger]
    assert younger.status is RequestStatus.PREEMPTED
    assert younger.num_in_flight == 1
    assert younger.num_computed_tokens == 0
    assert sim.kv.block_ids(younger) == []
    sim.pending.append((output, *sim.device.dispatch(output)))
    before = younger.num_tokens
    sim.scheduler.finish(older, RequestStatus.FINISHED_STOPPED)  # room for the younger one, but not yet
    output = sim.scheduler.schedule()
    assert not output.prefill + output.decode
    assert younger.status is RequestStatus.PREEMPTED
    sim.pending.append((output, *sim.device.dispatch(output)))
    sim.collect()
    assert younger.num_tokens == before + 1
    assert younger.num_in_flight == 0
    assert sim.scheduler.schedule().admitted == [younger]


def test_priority_decides_who_yields_and_who_is_next() -> None:
    sim = Simulation(make_config(policy="priority", max_num_seqs=2), 1 + 8)
    low = sim.add(Arrival((1, 2, 3), max_tokens=20, ignore_eos=True, priority=5))
    sim.step()
    late = sim.add(Arrival((1, 2, 4), max_tokens=20, ignore_eos=True, priority=1))
    high = sim.add(Arrival((1, 2, 5), max_tokens=20, ignore_eos=True, priority=0))
    assert sim.step().admitted == [high]
    while sim.scheduler.has_unfinished():
        sim.step()
    assert low.num_preemptions > 0
    assert high.num_preemptions == 0
    finished = [r.finished_time for r in (high, late, low)]
    assert None not in finished
    assert finished == sorted(cast(list[float], finished))
    sim.run([])


def test_grammar_in_the_making_holds_up_nobody_else() -> None:
    sim = Simulation(make_config(max_num_seqs=2), 40)
    compiling = sim.add(Arrival((1, 2), grammar_step=3))
    others = [sim.add(Arrival((3, i))) for i in range(3)]
    assert sim.step().admitted == others[:2]
    assert compiling.status is RequestStatus.WAITING_FOR_GRAMMAR
    sim.run([])
    assert compiling.first_scheduled_time is not None
    assert others[0].finished_time is not None
    assert compiling.first_scheduled_time > others[0].finished_time


def test_prompt_is_computed_while_its_grammar_is_compiled() -> None:
    sim = Simulation(make_config(), 40)
    compiling, other = sim.add(Arrival((1, 2, 3, 4, 5), grammar_step=4)), sim.add(Arrival((3,)))
    first = sim.step()
    assert first.admitted == [other, compiling]
    assert [c.request for c in first.prefill] == [compiling]
    assert first.decode == [other]
    while sim.step_index < 4:
        assert compiling not in sim.step().decode
    assert compiling in sim.step().decode
    sim.run([])


def test_long_prompts_are_chunked_and_decodes_go_on() -> None:
    sim = Simulation(make_config(max_num_batched_tokens=12, prefill_tile=4, long_prefill_token_threshold=6), 40)
    short = sim.add(Arrival((1,), max_tokens=20, ignore_eos=True))
    assert sim.step().decode == [short]
    long = sim.add(Arrival(TEXT))
    chunks: list[PrefillChunk] = []
    while not chunks or sum(c.count for c in chunks) < len(TEXT) - 1:
        output = sim.step()
        assert short in output.decode
        assert len(output.prefill) == 1
        chunks += output.prefill
    assert [(c.start, c.count) for c in chunks] == [(0, 6), (6, 6), (12, 5)]
    assert long in output.decode  # in the step of its last chunk
    sim.run([])


def test_drafts_are_cut_where_the_budget_is_short() -> None:
    sim = Simulation(make_config(num_speculative_tokens=3, max_num_batched_tokens=9, max_num_seqs=4), 40)
    for i in range(4):
        sim.add(Arrival((i,), max_tokens=20, ignore_eos=True))
    assert sim.step().num_positions == 1
    assert sim.scheduler.num_running == 4
    sim.scheduler.abort(["r0", "r1"])
    sim.requests = sim.requests[2:]
    assert sim.step().num_positions == 4  # two rows of four and a tile are nine
    sim.run([])


def test_end_in_flight_is_not_decoded_again() -> None:
    sim = Simulation(make_config(), 40)
    request = sim.add(Arrival((1, 2), max_tokens=1, ignore_eos=True))
    assert sim.step().decode == [request]
    assert sim.step().decode == []
    assert request.status is RequestStatus.FINISHED_LENGTH


def test_stop_reason_and_tokens_past_the_end() -> None:
    sim = Simulation(make_config(num_speculative_tokens=3), 40)
    request = sim.add(Arrival((1, 2), max_tokens=20, stop=(5,)))
    output = sim.scheduler.schedule()
    assert sim.scheduler.update_from_output(output, {"r0": [4, 5, 1]}) == [request]
    assert request.output_token_ids == [4, 5]
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_STOPPED, 5)
    request = sim.add(Arrival((1, 2), max_tokens=20))
    sim.scheduler.update_from_output(sim.scheduler.schedule(), {"r1": [EOS]})
    assert (request.status.finish_reason, request.stop_reason) == ("stop", None)


def test_error_ends_one_request() -> None:
    sim = Simulation(make_config(), 40)
    sim.run([Arrival((1, 2), max_tokens=9, ignore_eos=True, error_after=i) for i in (2, None)])
    failed, fine = sim.requests
    assert (failed.status.finish_reason, failed.error, len(failed.output_token_ids)) == ("error", "logits are NaN", 2)
    assert fine.status.finish_reason == "length"


def test_id_can_be_used_again_while_the_old_step_is_in_flight() -> None:
    sim = Simulation(make_config(), 40)
    old = sim.add(Arrival((1, 2)))
    output = sim.scheduler.schedule()
    sim.scheduler.abort(["r0"])
    sim.requests.clear()
    new = sim.add(Arrival((1, 2)))
    assert sim.scheduler.update_from_output(output, {"r0": [1]}) == []
    assert old.output_token_ids == new.output_token_ids == []


def test_requests_that_can_never_run_are_refused() -> None:
    sim = Simulation(make_config(), 1 + 2)
    sim.add(Arrival((1, 2), max_tokens=7))  # 8 positions of KV: the newest token needs none
    with pytest.raises(ValueError, match=r"need 9 KV positions, but the whole KV cache has 8"):
        sim.add(Arrival((1, 2), max_tokens=8))
    with pytest.raises(ValueError, match=r"prompt_token_ids must have 1 to 31 tokens.*got 32"):
        sim.add(Arrival((1,) * MAX_LEN))
    with pytest.raises(ValueError, match="got 0 tokens"):
        sim.add(Arrival(()))
    with pytest.raises(ValueError, match="priority must be 0"):
        sim.add(Arrival((1,), priority=1))
    sim.requests.clear()
    with pytest.raises(ValueError, match="'r0' is already in use"):
        sim.add(Arrival((1,)))
    assert sim.scheduler.num_waiting == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"policy": "random"}, "policy must be 'fcfs' or 'priority', got 'random'"),
        ({"max_num_batched_tokens": 4}, r"max_num_seqs \+ prefill_tile = 5, got 4"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 31}, "without chunked prefill = 32, got 31"),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 8}, "long_prefill_token_threshold"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**changes)
