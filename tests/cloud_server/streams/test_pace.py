"""What taking an account's frames may cost while others send."""

from __future__ import annotations

import pytest

from cloud_server.streams.probe import BURST_SECONDS, KEPT, MOST_SECONDS, PRESENT_SECONDS, AccountPace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_expensive_account_waits_and_others_do_not(clock: Clock) -> None:
    pace = AccountPace(0.25, clock)
    pace.spent("honest", 0.001)
    pace.spent("hostile", BURST_SECONDS)
    assert pace.wait("hostile") == 0
    pace.spent("hostile", 0.05)
    assert pace.wait("hostile") == pytest.approx(0.2) and pace.wait("honest") == 0
    clock.now += 0.1
    assert pace.wait("hostile") == pytest.approx(0.1)
    pace.spent("honest", 0.001)
    pace.spent("hostile", 1e6)
    assert pace.wait("hostile") == MOST_SECONDS


def test_lone_account_neither_waits_nor_owes(clock: Clock) -> None:
    pace = AccountPace(0.25, clock)
    for _ in range(100):
        pace.spent("one", 1.0)
        assert pace.wait("one") == 0
        clock.now += 1.0
    pace.spent("other", 0.001)
    assert pace.wait("one") == 0
    pace.spent("one", BURST_SECONDS + 0.05)
    assert pace.wait("one") > 0
    clock.now += PRESENT_SECONDS + 0.1  # the other one sends nothing more
    pace.spent("one", 1.0)
    assert pace.wait("one") == 0


def test_accounts_are_forgotten(clock: Clock) -> None:
    pace = AccountPace(0.25, clock)
    for number in range(3 * KEPT):
        pace.spent(f"{number}", 0.1)
    assert len(pace._owed) == KEPT


def test_an_account_has_one_turn_on_all_its_streams() -> None:
    pace = AccountPace(0.25)
    turn = pace.turn("one")
    assert pace.turn("one") is turn and pace.turn("other") is not turn
    with turn, pace.turn("other"):
        pass
    del turn
    assert len(pace._turns) == 0
