"""What is reported of a head before its end: a slot once nothing writes there any more, and as it is at the cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import Crossing, EarlyOutput, WrappedModel
from shared_hooks.errors import IsthmusError
from shared_hooks.head import listening
from tests.covering import ALL
from tests.shared_hooks.cutting import head, planned, some_cuts_of
from tests.zoo import CASES, Case
from tests.zoo.compare import same

SOME = [case for number, case in enumerate(CASES) if ALL or number % 3 == 0]


class CallReports:
    """Keeps copies of what it hears. ``takes``: whether it wants to hear."""

    def __init__(self, takes: bool = True) -> None:
        self.takes = takes
        self.crossing: Crossing | None = None
        self.slots: dict[int, tuple[Tensor, ...]] = {}

    def begins(self, crossing: Crossing) -> bool:
        self.crossing = crossing
        self.slots.clear()
        return self.takes

    def final(self, slot: int, pieces: tuple[Tensor, ...]) -> None:
        assert slot not in self.slots
        self.slots[slot] = tuple(piece.clone() for piece in pieces)

    def holds(self, early: EarlyOutput) -> bool:
        """Whether what was announced is what crosses."""
        assert self.crossing is early.crossing
        first = 0
        found = True
        for number, slot in enumerate(early.crossing.slots):
            own = early.pieces[first : first + len(slot.pieces)]
            first += len(slot.pieces)
            found &= number not in self.slots or same(list(self.slots[number]), list(own))
        return found


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_it_is_what_crosses(case: Case) -> None:
    edge = planned(case)
    for cut in some_cuts_of(edge, case):
        reported = CallReports()
        try:
            with listening(reported):
                early = head(edge, case, cut, case.inputs())
        except IsthmusError:
            continue
        if reported.crossing is early.crossing:  # else values were read that ask for more
            assert reported.holds(early), cut


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.relu(self.a(x))
        written = self.b(skip)
        there = self.c(written)
        written += 1
        out: Tensor = self.d(there) + skip + written + x
        return out


def slots_reported(cut: str) -> int:
    reported, x = CallReports(), torch.randn(2, 8)
    with listening(reported):
        early = WrappedModel(Net()).head(cut, x)
    assert reported.holds(early)
    return len(reported.slots)


def test_the_input_and_what_a_layer_in_place_has_left_are_reported_and_what_is_still_to_be_written_is_not() -> None:
    assert slots_reported("a") == 1  # the input; the map itself is there with the cut
    assert slots_reported("b") == 2  # and the skip connection, after ReLU
    assert slots_reported("c") == 3  # and what is written after the cut: only that the tail does
    # written before it, by an operation of no module: there is no moment between that and the end of the last layer
    assert slots_reported("d") == 2


def test_without_a_listener_nothing_is_reported_and_nobody_hears_of_another_thread_or_later() -> None:
    wrapped, x, reported, other = WrappedModel(Net()), torch.randn(2, 8), CallReports(takes=False), CallReports()
    with listening(reported):
        wrapped.head("c", x)
    assert reported.crossing is not None and not reported.slots
    with listening(other):
        pass
    wrapped.head("c", x)
    assert other.crossing is None
