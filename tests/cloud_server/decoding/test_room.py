"""How much sessions may hold, and which go: no model, an engine that says how much a step took."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import pytest

from cloud_server import Limits
from cloud_server.decoding import Sessions, SessionStep
from cloud_server.models import Computed
from shared_hooks.errors import IsthmusError, ServerUnavailable, SessionLost, TooLarge
from shared_hooks.sharing import Owner

LIMITS = Limits(
    max_sessions=8,
    max_sessions_per_account=4,
    max_session_bytes=500,
    max_sessions_bytes=1000,
    max_sessions_bytes_per_account=800,
    session_idle_seconds=600,
    idle_seconds=600,
)
A, B, C = Owner("lab", "a"), Owner("lab", "b"), Owner("home", "c")


class Held:
    """A session whose step says by its header how many bytes it adds."""

    open = 0

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes, self.lost = nbytes, ""
        Held.open += 1

    def step(self, header: bytes, payload: memoryview) -> Computed:
        self.nbytes += int(header)
        return Computed.of(b"", (), 0, session_bytes=self.nbytes)

    def fork(self) -> Held:
        return Held(self.nbytes)

    def close(self) -> None:
        Held.open -= 1


class Engine:
    def __init__(self) -> None:
        self.made: list[Held] = []

    def open_session(self, cut: str, following: object = None) -> Held:
        self.made.append(Held())
        return self.made[-1]


class Desk:
    """Asks for steps."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        Held.open = 0
        self.engine, self.sessions = Engine(), Sessions(limits)

    def step(self, owner: Owner, session: int, number: int, nbytes: int = 0, fork: tuple[int, int] = (0, 0)) -> None:
        step = SessionStep(session, number, "cut", *fork, close=False)
        self.sessions.run(self.engine, owner, step, str(nbytes).encode(), memoryview(b""))  # type: ignore[arg-type]

    def why(self, owner: Owner, session: int, number: int) -> str:
        """Why it is lost."""
        with pytest.raises(SessionLost) as lost:
            self.step(owner, session, number)
        return str(lost.value)


def test_account_beyond_its_limit_loses_its_least_recently_used_session() -> None:
    desk = Desk()
    for session in (1, 2, 3, 4):
        desk.step(A, session, 0)
    desk.step(A, 1, 1)
    desk.step(A, 5, 0)
    assert len(desk.sessions) == 4 and desk.sessions.dropped == {"room": 1}
    assert "max_sessions_per_account is 4" in desk.why(A, 2, 1)
    desk.step(A, 1, 2)


def test_beyond_its_bytes_too() -> None:
    desk = Desk()
    for session in (1, 2, 3):
        desk.step(A, session, 0, 250)
    desk.step(A, 1, 1, 100)  # 850 of 800
    assert "max_sessions_bytes_per_account is 800" in desk.why(A, 2, 1)
    assert (len(desk.sessions), desk.sessions.nbytes) == (2, 600)


def test_largest_account_loses_a_session() -> None:
    desk = Desk()
    for session in (1, 2, 3):
        desk.step(A, session, 0, 250)
    desk.step(C, 1, 0, 200)
    desk.step(C, 1, 1, 100)  # 1050 of 1000
    assert "max_sessions_bytes is 1000" in desk.why(A, 1, 1)
    desk.step(C, 1, 2)
    assert desk.sessions.nbytes == 800


def test_largest_holder_loses_its_own_session_if_none_can_be_evicted() -> None:
    """The answer of the step that took too much is given; the next one is reported."""
    desk = Desk()
    desk.step(C, 1, 0, 400)
    desk.step(B, 1, 0, 350)
    desk.step(A, 1, 0, 300)  # 1050 of 1000, and the others hold more: B's account less than A's with it
    assert desk.sessions.nbytes <= 1000
    assert sum(desk.sessions.dropped.values()) == 1
    alone = Desk(dataclasses.replace(LIMITS, max_session_bytes=10_000))
    alone.step(A, 1, 0, 900)
    assert "max_sessions_bytes_per_account" in alone.why(A, 1, 1) and Held.open == 0


def test_a_session_over_its_own_bound_takes_no_step_and_stays() -> None:
    desk = Desk()
    desk.step(A, 1, 0, 501)
    for _ in range(2):
        with pytest.raises(TooLarge, match="max_session_bytes"):
            desk.step(A, 1, 1)
    assert (len(desk.sessions), desk.sessions.nbytes) == (1, 501)


def test_a_copy_needs_room_before_it_is_made() -> None:
    desk = Desk()
    desk.step(A, 1, 0, 450)
    with pytest.raises(ServerUnavailable, match="max_sessions_bytes_per_account is 800"):
        desk.step(A, 2, 0, fork=(1, 1))  # it would push out what it is a copy of
    desk.step(A, 1, 1)
    desk.step(A, 3, 0, 400)  # pushes 1 out, and may be copied no more than that
    assert desk.sessions.nbytes == 400
    desk.step(A, 4, 0, fork=(3, 1))
    assert desk.sessions.nbytes == 800


def test_an_other_clients_session_is_safe_while_it_is_used() -> None:
    desk = Desk()
    for session in (1, 2):
        desk.step(B, session, 0)
        desk.step(A, session, 0)
    desk.step(A, 3, 0)
    assert "max_sessions_per_account" in desk.why(A, 1, 1)  # its own
    desk.step(B, 1, 1)


def test_idle_sessions_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.step(A, 1, 0)
    desk.step(A, 2, 0)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 599)
    desk.sessions.sweep()
    desk.step(A, 2, 1)
    monkeypatch.setattr(time, "monotonic", lambda: now + 700)
    desk.sessions.sweep()
    assert "session_idle_seconds" in desk.why(A, 1, 1) and desk.sessions.dropped == {"idle": 1}
    desk.step(A, 2, 2)


def test_lost_session_is_no_longer_counted() -> None:
    desk = Desk()
    desk.step(A, 1, 0, 100)
    desk.engine.made[0].lost = "its worker was ended"
    desk.sessions.sweep()
    assert desk.sessions.nbytes == 0 and "its worker was ended" in desk.why(A, 1, 1)


def test_many_closed_sessions_leave_nothing() -> None:
    desk = Desk(Limits())
    for session in range(1, 1001):
        desk.step(A, session, 0, 10)
        for number in range(1, 10):
            desk.step(A, session, number, 10)
        if session % 2:
            desk.sessions.run(desk.engine, A, SessionStep(session, 0, "cut", 0, 0, close=True), b"", memoryview(b""))  # type: ignore[arg-type]
    assert desk.sessions.steps == 10_000 and len(desk.sessions) == Held.open == 256  # of one account
    assert desk.sessions.nbytes == 256 * 100
    desk.sessions.close()
    assert (len(desk.sessions), desk.sessions.nbytes, Held.open) == (0, 0, 0)


def test_many_threads_at_once() -> None:
    """Whatever they are refused, the books balance."""
    desk, wrong = Desk(), list[BaseException]()

    def ask(owner: Owner) -> None:
        for number in range(300):
            try:
                desk.step(owner, number % 3 + 1, 0, 40)
                desk.step(owner, number % 3 + 1, 1, 40, (0, 0))
            except IsthmusError:
                pass
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=ask, args=(owner,)) for owner in (A, B, C, A)]
    _together(threads)
    assert not wrong
    assert desk.sessions.nbytes <= LIMITS.max_sessions_bytes
    assert desk.sessions.nbytes == sum(one.nbytes for one in desk.sessions._sessions.values())
    desk.sessions.close()
    assert Held.open == 0 and desk.sessions.nbytes == 0


def _together(threads: list[threading.Thread]) -> None:
    do: tuple[Callable[[threading.Thread], None], ...] = (threading.Thread.start, threading.Thread.join)
    for one in do:
        for thread in threads:
            one(thread)
