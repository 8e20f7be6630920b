"""Jobs that are done together: who is taken along, what each pays, and how long a worker waits for them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from cloud_server.work.line import Line, Place
from cloud_server.work.payer import Payer
from cloud_server.work.workers import Did, Job, Workers
from tests.waiting import PATIENCE, eventually

KIN = "a model and a cut"


def group(line: Line[str], most: int) -> list[Place[str]]:
    first = line.take()
    return [] if first is None else [first, *line.take_alike({first.batch_key}, most - 1)]


def served(line: Line[str], most: int, seconds: float = 1.0) -> list[str]:
    """One group, done in ``seconds``."""
    places = group(line, most)
    for place in places:
        line.done(place, seconds / len(places))
    return [place.job for place in places]


class TestWhoIsTakenAlong:
    def test_jobs_of_one_kin_of_all_clients(self) -> None:
        line: Line[str] = Line()
        for number, batch_key in enumerate((KIN, "another cut", KIN, None, KIN)):
            line.put(f"{number}", Payer(f"{number}"), batch_key)
        assert [served(line, 16) for _ in range(4)] == [["0", "2", "4"], ["1"], ["3"], []]

    def test_jobs_without_kin_are_never_together(self) -> None:
        line: Line[str] = Line()
        for number in range(3):
            line.put(f"{number}", Payer(f"{number}"))
        assert [len(served(line, 16)) for _ in range(3)] == [1, 1, 1]

    def test_a_clients_jobs_are_done_in_their_order(self) -> None:
        line: Line[str] = Line()
        for job, batch_key in (("a1", KIN), ("a2", KIN), ("a3", None), ("a4", KIN)):
            line.put(job, Payer("a"), batch_key)
        line.put("b1", Payer("b"), KIN)
        assert [served(line, 16) for _ in range(3)] == [["a1", "a2", "b1"], ["a3"], ["a4"]]

    def test_rows_are_what_is_bounded_and_smaller_jobs_fill_what_is_left(self) -> None:
        line: Line[str] = Line()
        for job, rows in (("a", 2), ("b", 3), ("c", 1), ("d", 2)):
            line.put(job, Payer(job), KIN, rows)
        first = line.take()
        assert first is not None and line.waiting(KIN) == 6
        assert [place.job for place in line.take_alike({first.batch_key}, 3 - first.rows)] == ["c"]
        assert line.waiting(KIN) == 5

    def test_one_that_has_left_is_not_taken(self) -> None:
        line: Line[str] = Line()
        places = [line.put(f"{number}", Payer(f"{number}"), KIN) for number in range(3)]
        line.remove(places[1])
        assert served(line, 16) == ["0", "2"] and not line._batch_keys


class TestFairness:
    def test_who_asks_little_is_in_the_next_group_however_many_the_others_have_in_line(self) -> None:
        line: Line[str] = Line()
        for number in range(40):
            line.put("heavy", Payer("heavy", f"{number % 8}"), KIN)
        for _ in range(3):
            served(line, 4)
        line.put("light", Payer("light"), KIN)
        assert "light" in served(line, 4)

    def test_an_account_of_twice_the_weight_has_twice_the_places(self) -> None:
        line: Line[str] = Line()
        payers = [Payer("one"), Payer("two", weight=2.0)]
        for payer in payers:
            for _ in range(90):
                line.put(payer.account, payer, KIN)
        had = Counter(job for _ in range(30) for job in served(line, 4))
        assert had["two"] == pytest.approx(2 * had["one"], rel=0.1)

    def test_jobs_of_no_kin_have_their_part_of_the_time(self) -> None:
        """A group of four takes as long as one job alone."""
        line: Line[str] = Line()
        for number in range(4):
            for _ in range(40):
                line.put("kin", Payer("many", f"{number}"), KIN)
        for _ in range(40):
            line.put("alone", Payer("one"))
        turns = Counter(served(line, 4)[0] for _ in range(40))
        assert turns["alone"] == pytest.approx(turns["kin"], abs=4)

    def test_each_is_thought_to_take_its_part(self) -> None:
        line: Line[str] = Line()
        for _ in range(3):
            for number in range(4):
                line.put("", Payer(f"{number}"), KIN)
            served(line, 4, seconds=2.0)
        assert line.cost(Payer("0")) == pytest.approx(0.5)


class Crowd:
    """Workers and the groups that they did."""

    def __init__(self, *, most: int, delay: float = 0.0, count: int = 1, preferred: Sequence[int] = ()) -> None:
        self.groups: list[int] = []
        self.workers = Workers(count, together=self._together, most=most, delay=delay, preferred=preferred)
        self._done = threading.Semaphore(0)

    def job(self) -> bool:
        self._done.release()
        return True

    def _together(self, jobs: Sequence[Job]) -> list[Did]:
        self.groups.append(len(jobs))
        return [Did(job()) for job in jobs]

    def wait(self, number: int) -> None:
        for _ in range(number):
            assert self._done.acquire(timeout=PATIENCE), "a job was not done"


class TestDelay:
    def test_a_group_that_is_full_waits_no_longer(self) -> None:
        crowd = Crowd(most=3, delay=1e6)
        for number in range(3):
            crowd.workers.put(crowd.job, Payer(f"{number}"), KIN)
        crowd.wait(3)
        assert crowd.groups == [3]
        crowd.workers.stop()

    @pytest.mark.parametrize("count", [1, 2])
    def test_nobody_else_waits_for_it(self, count: int) -> None:
        crowd = Crowd(most=3, delay=1e6, count=count)
        crowd.workers.put(crowd.job, Payer("a"), KIN)
        crowd.workers.put(crowd.job, Payer("b"))
        crowd.wait(1 if count == 2 else 2)
        crowd.workers.stop()

    def test_the_end_of_the_server_is_not_held_up(self) -> None:
        crowd = Crowd(most=3, delay=1e6)
        crowd.workers.put(crowd.job, Payer("a"), KIN)
        crowd.workers.stop(PATIENCE)
        crowd.wait(1)

    def test_nor_one_of_a_size_that_is_preferred(self) -> None:
        crowd = Crowd(most=8, delay=1e6, preferred=(3,))
        for number in range(3):
            crowd.workers.put(crowd.job, Payer(f"{number}"), KIN)
        crowd.wait(3)
        assert crowd.groups == [3]
        crowd.workers.stop()


def test_of_those_that_wait_as_many_are_taken_as_is_preferred() -> None:
    held = threading.Event()
    crowd = Crowd(most=8, preferred=(2, 4))
    crowd.workers.put(lambda: held.wait(PATIENCE), Payer("holder"))
    for number in range(7):
        crowd.workers.put(crowd.job, Payer(f"{number}"), KIN)
    held.set()
    crowd.wait(7)
    crowd.workers.stop()
    assert crowd.groups == [4, 2]  # and one alone


def test_each_pays_by_its_rows() -> None:
    now = iter([0.0, 4.0])
    workers = Workers(1, lambda: next(now), together=lambda jobs: [Did(True)] * len(jobs), most=4, delay=1e6)
    workers.put(lambda: True, Payer("one"), KIN, 1)
    workers.put(lambda: True, Payer("three"), KIN, 3)
    eventually(lambda: [workers._line.cost(Payer(name)) for name in ("one", "three")] == [1.0, 3.0])
    workers.stop()
