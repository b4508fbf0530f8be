"""Which request sits in which slot of the batch. Slots are dense: the first n are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.request import Request, RequestStatus
from jaxserve.sampling.processor import AddedRequest, BatchUpdate


@dataclass(frozen=True)
class SlotChanges:
    """What the device has to do, in this order: fill the slots of `added`, then copy slots (source, target)."""

    added: Sequence[Request]
    moved: Sequence[tuple[int, int]]
    update: BatchUpdate | None  # the same, as logits processors are told; None when nothing changed


class SlotTable:
    """Slot i belongs to requests[i], which holds i in `slot`."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def update(self, admitted: Sequence[Request]) -> SlotChanges:
        """Take out requests that no longer run and seat the admitted: in the lowest gaps first, then at the end. Gaps
        that are left are closed by the last requests, which none of the admitted is."""
        gaps = [i for i, request in enumerate(self.requests) if request.status is not RequestStatus.RUNNING]
        for i in gaps:
            self.requests[i].slot = None
        seats = [*gaps, *range(len(self.requests), len(self.requests) + len(admitted))]
        for seat, request in zip(seats, admitted, strict=False):
            request.slot = seat
            self.requests[seat : seat + 1] = [request]
        removed = gaps[len(admitted) :]
        moved = self._close(removed)
        if not admitted and not removed:
            return SlotChanges((), (), None)
        added = [_added(request) for request in admitted]
        return SlotChanges(admitted, moved, BatchUpdate(len(self.requests), removed, added, moved))

    def _close(self, gaps: Sequence[int]) -> list[tuple[int, int]]:
        """Moves (source, target) that leave none of the gaps, given in ascending order."""
        moved = []
        left = list(gaps)
        while left:
            last = self.requests.pop()
            source = len(self.requests)
            if source == left[-1]:
                left.pop()
                continue
            target = left.pop(0)
            self.requests[target], last.slot = last, target
            moved.append((source, target))
        return moved


def _added(request: Request) -> AddedRequest:
    assert request.slot is not None
    return AddedRequest(request.slot, request.sampling_params, request.prompt_token_ids, request.output_token_ids)
