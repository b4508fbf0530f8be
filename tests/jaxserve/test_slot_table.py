"""Who sits in which slot: what the device and the processors are told, replayed, is where everybody is."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import BatchUpdate, LogitsProcessor, Row, SamplingParams
from jaxserve.request import Request, RequestStatus
from jaxserve.slot_table import SlotChanges, SlotTable


def replay(seats: dict[int, Any], update: BatchUpdate) -> dict[int, Any]:
    """The slots after an update, as a processor keeps them: removed, added, moved. Never reads an empty slot."""
    seats = dict(seats)
    for index in update.removed:
        del seats[index]
    for added in update.added:
        seats[added.index] = added.output_token_ids
    for source, target in update.moved:
        assert target not in seats, "a move must not cover somebody"
        seats[target] = seats.pop(source)
    return seats


def replay_on_device(slots: dict[int, Any], changes: SlotChanges) -> dict[int, Any]:
    """The device knows no removal: it fills, then copies."""
    slots = dict(slots) | {request.slot_when_filled: request for request in changes.added}
    for source, target in changes.moved:
        slots[target] = slots[source]
    return slots


class FilledRequest(Request):
    """Remembers where it was first seated: moves of the same update come after the fill."""

    slot_when_filled: int


def new_request(number: int) -> FilledRequest:
    request = FilledRequest(
        request_id=str(number), prompt_token_ids=[number], sampling_params=SamplingParams(), max_model_len=8
    )
    request.status = RequestStatus.RUNNING
    return request


# Each step: which of those that run (by index modulo their number) stop, and how many come.
steps = st.lists(st.tuples(st.lists(st.integers(0, 50), max_size=5), st.integers(0, 4)), max_size=30)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_replayed_updates_are_where_everybody_sits(traffic: list[tuple[list[int], int]]) -> None:
    table, seats, device = SlotTable(), {}, {}
    running: list[FilledRequest] = []
    count = 0
    for leaving, number in traffic:
        for index in {i % len(running) for i in leaving} if running else ():
            running[index].status = RequestStatus.FINISHED_STOPPED if index % 2 else RequestStatus.PREEMPTED
        left = [r for r in running if r.status is not RequestStatus.RUNNING]
        admitted = [new_request(count + i) for i in range(number)]
        count += number
        changes = table.update(admitted)
        running = [r for r in running if r not in left] + admitted

        if changes.update is None:
            assert not left
            assert not admitted
            continue
        for request, added in zip(changes.added, changes.update.added, strict=True):
            request.slot_when_filled = added.index
            assert added.params is request.sampling_params
            assert added.prompt_token_ids is request.prompt_token_ids
            assert added.output_token_ids is request.output_token_ids, "by reference: it grows"
        seats, device = replay(seats, changes.update), replay_on_device(device, changes)
        assert list(changes.added) == admitted
        assert list(changes.moved) == list(changes.update.moved)
        assert changes.update.batch_size == len(running) == len(table.requests)
        assert set(table.requests) == set(running)
        assert all(r.slot is None for r in left)
        assert sorted(seats) == list(range(len(running))), "dense"
        for slot, request in enumerate(table.requests):
            assert request.slot == slot
            assert seats[slot] is request.output_token_ids
            assert device[slot] is request


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.sets(st.integers(0, 7)), st.integers(0, 10))
def test_no_more_is_done_than_needed(taken: int, leaving: set[int], coming: int) -> None:
    """The fewest moves, and a slot that is freed and filled at once is in `added` alone."""
    table = SlotTable()
    first = [new_request(i) for i in range(taken)]
    table.update(first)
    gaps = {i for i in leaving if i < taken}
    for index in gaps:
        first[index].status = RequestStatus.FINISHED_LENGTH
    update = table.update([new_request(100 + i) for i in range(coming)]).update
    if update is None:
        assert not gaps
        assert not coming
        return
    assert len({added.index for added in update.added}) == coming
    assert not {added.index for added in update.added} & set(update.removed)
    after = taken - len(gaps) + coming
    assert set(update.removed) <= gaps
    assert len(update.removed) == max(0, len(gaps) - coming)
    assert len(update.moved) == sum(slot < after for slot in update.removed)


class Watcher(LogitsProcessor):
    """Keeps a model of the slots from the updates alone."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seats: dict[int, Any] = {}
        self.calls = self.unchanged = 0

    def row(self, params: SamplingParams) -> None:
        return None

    def empty_row(self) -> tuple[()]:
        return ()

    def apply(self, logits: Any, row: Row) -> Any:
        return logits

    def update_state(self, update: BatchUpdate | None) -> None:
        self.calls += 1
        self.unchanged += update is None
        if update is not None:
            self.seats = replay(self.seats, update)
            assert sorted(self.seats) == list(range(update.batch_size))


def test_a_processor_is_told_of_everything_the_engine_does(make_engine: Any, random_markov: Any) -> None:
    """Requests of many lengths, aborts and preemptions; after every step the processor knows who sits where, and what
    they have written."""
    model = random_markov(8)
    engine = make_engine(
        model, max_num_seqs=4, max_model_len=64, num_blocks=7, block_size=8, logits_processors=[Watcher]
    )
    watcher = engine.runner.sampler.processors[-1]
    for i in range(14):
        engine.add_request(str(i), [i % 8] * (1 + i), SamplingParams(max_tokens=3 + 5 * (i % 5), seed=i))
    for number in range(5000):
        if not engine.has_unfinished():
            break
        engine.step()
        if number == 12:
            engine.abort(["3", "9", "13"])
        requests = engine.runner.slots.requests
        assert set(watcher.seats) == set(range(len(requests)))
        assert all(watcher.seats[slot] is r.output_token_ids for slot, r in enumerate(requests))
    assert not engine.has_unfinished()
    assert engine.scheduler.stats().num_preemptions > 0, "the pool was meant to be too small"
    assert 0 < watcher.unchanged < watcher.calls
