"""More work than the server can do: what cannot be answered in time is refused before it is computed."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest

from cloud_server.access import Caller
from cloud_server.core import Core
from cloud_server.scheduling.fair_queue import Forecast, Payer
from tests.cloud_server.fakes import CoreClient, FakeEngine, cancel
from tests.cloud_server.scheduling.simulation import Job, Simulation
from tests.cloud_server.small import SMALL, Gate
from tests.waiting import eventually

TAKES = 0.01
"""Seconds of a job: the server's capacity is 100 a second."""


class Overloaded(Simulation):
    """Requests with a deadline, refused early as the core does."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self.deadline = deadline
        self.refused: Counter[Payer] = Counter()
        self.late: Counter[Payer] = Counter()
        self.good: Counter[str] = Counter()
        self.longest = 0

    def ask(self, payer: Payer) -> None:
        if self.line.forecast(payer).late(self.deadline) > 0:
            self.refused[payer] += 1
            return
        self.put(payer, TAKES)
        self.longest = max(self.longest, len(self.line))

    def wanted(self, task: Job) -> bool:
        return self.now - task.put_at + self.line.forecast(task.payer).takes <= self.deadline

    def offer(self, payer: Payer, per_second: float, until: float) -> None:
        for number in range(int(until * per_second)):
            self.at((number + 0.5) / per_second, lambda: self.ask(payer))

    def count(self, after: float) -> None:
        """Answers in time, of those asked after the warm-up."""
        for payer, waits in self.waits.items():
            for wait, task in zip(waits, [task for task in self.order if task.payer == payer], strict=True):
                if task.put_at >= after:
                    self.late[payer] += wait + TAKES > self.deadline
                    self.good[payer.account] += wait + TAKES <= self.deadline


class TestFiveTimesWhatTheServerCan:
    """One account offers 4.1 times the capacity, three others 0.3 each."""

    def test_honest_clients_keep_their_share_under_overload(self) -> None:
        run, seconds, warm = Overloaded(deadline=0.3), 40.0, 5.0
        run.offer(Payer("hostile"), 410, seconds)
        honest = [Payer(f"honest {number}") for number in range(3)]
        for payer in honest:
            run.offer(payer, 30, seconds)
        run.run(seconds)
        run.count(warm)
        capacity = (seconds - warm) / TAKES
        good = [run.good[payer.account] for payer in honest]
        assert sum(good) >= 0.95 * 0.75 * capacity, "three of four accounts"
        assert max(good) <= 1.2 * min(good)
        assert sum(run.late[payer] for payer in honest) <= 0.01 * sum(good)
        assert sum(good) + run.good["hostile"] >= 0.95 * capacity, "nothing is computed in vain"
        assert run.longest <= 5 * 0.3 / TAKES

    def test_account_below_its_share_is_unaffected(self) -> None:
        run, seconds = Overloaded(deadline=0.3), 40.0
        run.offer(Payer("hostile"), 480, seconds)
        honest = [Payer(f"honest {number}") for number in range(3)]
        for payer in honest:
            run.offer(payer, 20, seconds)
        run.run(seconds)
        for payer in honest:
            assert not run.refused[payer] and max(run.waits[payer]) <= 4 * TAKES


class TestForecast:
    @pytest.mark.parametrize(
        ("wait", "takes", "left", "late"),
        [
            (0.0, 5.0, 1.0, 0.0),  # nothing waits: it is tried, however long the last ones took
            (0.5, 0.2, 1.0, 0.0),
            (0.9, 0.2, 1.0, 0.1),
            (0.5, 5.0, 1.0, 0.0),  # what the last ones took says nothing where none could be in time
            (2.0, 5.0, 1.0, 1.0),
        ],
    )
    def test_late(self, wait: float, takes: float, left: float, late: float) -> None:
        assert Forecast(wait, takes).late(left) == pytest.approx(late)

    def test_a_bad_moment_passes(self) -> None:
        """Jobs that took long once are tried again, and found to be short."""
        run = Simulation()
        for seconds in itertools.chain([3.0] * 10, [TAKES] * 20):
            run.put(Payer("a"), seconds)
        run.run(100)
        assert run.line.forecast(Payer("a")).takes == pytest.approx(TAKES)


class TestInTheCore:
    """An engine that takes a tenth of a second, and a client with 0.25 s."""

    def known(self, core: Core, client: CoreClient) -> None:
        for id in range(100, 103):
            client.ask(id, b"warm")
            client.answer(id)
        eventually(lambda: core.scheduler.forecast(Payer("address test", "alice")).takes > 0.05)

    def test_a_request_that_would_come_too_late_is_refused_and_learns_when(self) -> None:
        gate = Gate()
        gate.opened.set()

        def slow(payload: memoryview) -> None:
            gate(payload)
            time.sleep(0.1)

        engine = FakeEngine(slow)
        with Core([engine], SMALL) as core:
            client = CoreClient(core)
            self.known(core, client)
            while gate.entered.acquire(blocking=False):
                pass
            gate.opened.clear()
            client.ask(1, b"a")
            gate.wait_entered()
            for id in (2, 3):
                client.ask(id, b"b")
            client.ask(4, b"c", deadline_ms=250)  # 0.2 s of work wait before it, and it takes 0.1
            failed = client.answer(4).failed
            assert failed is not None and failed.error == "ServerUnavailable" and not failed.retry
            assert "more to do than it can" in failed.message and "address test" in failed.message
            assert 0 < failed.retry_after_ms < 10_000
            other = CoreClient(core, client_id="bob", caller=Caller("other:1"))
            other.ask(5, b"d", deadline_ms=60_000)
            gate.opened.set()
            for each, ids in ((client, (1, 2, 3)), (other, (5,))):
                assert all(each.answer(id).reply for id in ids), "who has the time, and other accounts, are answered"
            assert engine.computed == 7

    def test_request_that_waited_past_its_deadline_is_not_computed(self) -> None:
        """It was in time when it came; then the one before it took longer than they do."""
        gate = Gate()
        gate.opened.set()
        engine = FakeEngine(gate)
        with Core([engine], SMALL) as core:
            client = CoreClient(core)
            client.ask(0, b"a")
            client.answer(0)
            gate.opened.clear()
            while gate.entered.acquire(blocking=False):
                pass
            client.ask(1, b"a")
            gate.wait_entered()
            client.ask(2, b"b", deadline_ms=50)
            time.sleep(0.1)
            gate.opened.set()
            failed = client.answer(2).failed
            assert failed is not None and failed.error == "DeadlineExceeded" and engine.computed == 2

    def test_cancelled_requests_are_not_computed(self) -> None:
        gate = Gate()
        engine = FakeEngine(gate)
        with Core([engine], SMALL) as core:
            client, leaver = CoreClient(core), CoreClient(core, client_id="leaver")
            client.ask(1, b"a")
            gate.wait_entered()
            client.ask(2, b"b")
            leaver.ask(3, b"c")
            client.send(cancel(2))
            leaver.leave()
            gate.opened.set()
            assert client.answer(1).reply and client.answer(2).failed
            client.ask(4, b"d")
            assert client.answer(4).reply and engine.computed == 2
