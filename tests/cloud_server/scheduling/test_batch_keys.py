"""Jobs that are done together: who is taken along, what each pays, and how long a worker waits for them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from cloud_server.scheduling import BatchLimits, FairQueue, Payer, Scheduler, Task, TaskResult, Workers, scheduler
from tests.waiting import PATIENCE, eventually

KIN = "a model and a cut"


def group(line: FairQueue, most: int) -> list[Task]:
    first = line.take()
    return [] if first is None else [first, *line.take_batchable({first.batch_key}, most - 1)]


def served(line: FairQueue, most: int, seconds: float = 1.0) -> list[str]:
    """One group, done in ``seconds``."""
    tasks = group(line, most)
    for task in tasks:
        line.done(task, seconds / len(tasks))
    return [task.work for task in tasks]


class TestWhoIsTakenAlong:
    def test_tasks_with_one_key_of_all_clients_are_batched(self) -> None:
        line = FairQueue()
        for number, batch_key in enumerate((KIN, "another cut", KIN, None, KIN)):
            line.put(Task(f"{number}", Payer(f"{number}"), batch_key))
        assert [served(line, 16) for _ in range(4)] == [["0", "2", "4"], ["1"], ["3"], []]

    def test_tasks_without_a_key_are_never_batched(self) -> None:
        line = FairQueue()
        for number in range(3):
            line.put(Task(f"{number}", Payer(f"{number}")))
        assert [len(served(line, 16)) for _ in range(3)] == [1, 1, 1]

    def test_tasks_of_a_client_keep_their_order(self) -> None:
        line = FairQueue()
        for job, batch_key in (("a1", KIN), ("a2", KIN), ("a3", None), ("a4", KIN)):
            line.put(Task(job, Payer("a"), batch_key))
        line.put(Task("b1", Payer("b"), KIN))
        assert [served(line, 16) for _ in range(3)] == [["a1", "a2", "b1"], ["a3"], ["a4"]]

    def test_batch_is_bounded_by_rows_and_filled_by_small_tasks(self) -> None:
        line = FairQueue()
        for job, rows in (("a", 2), ("b", 3), ("c", 1), ("d", 2)):
            line.put(Task(job, Payer(job), KIN, rows))
        first = line.take()
        assert first is not None and line.waiting(KIN) == 6
        assert [task.work for task in line.take_batchable({first.batch_key}, 3 - first.rows)] == ["c"]
        assert line.waiting(KIN) == 5

    def test_removed_task_is_not_taken(self) -> None:
        line = FairQueue()
        tasks = [line.put(Task(f"{number}", Payer(f"{number}"), KIN)) for number in range(3)]
        line.remove(tasks[1])
        assert served(line, 16) == ["0", "2"] and not line._batch_keys


class TestFairness:
    def test_light_client_joins_the_next_batch(self) -> None:
        line = FairQueue()
        for number in range(40):
            line.put(Task("heavy", Payer("heavy", f"{number % 8}"), KIN))
        for _ in range(3):
            served(line, 4)
        line.put(Task("light", Payer("light"), KIN))
        assert "light" in served(line, 4)

    def test_an_account_of_twice_the_weight_has_twice_the_tasks(self) -> None:
        line = FairQueue()
        payers = [Payer("one"), Payer("two", weight=2.0)]
        for payer in payers:
            for _ in range(90):
                line.put(Task(payer.account, payer, KIN))
        had = Counter(job for _ in range(30) for job in served(line, 4))
        assert had["two"] == pytest.approx(2 * had["one"], rel=0.1)

    def test_tasks_without_a_key_get_their_share(self) -> None:
        """A group of four takes as long as one job alone."""
        line = FairQueue()
        for number in range(4):
            for _ in range(40):
                line.put(Task("kin", Payer("many", f"{number}"), KIN))
        for _ in range(40):
            line.put(Task("alone", Payer("one")))
        turns = Counter(served(line, 4)[0] for _ in range(40))
        assert turns["alone"] == pytest.approx(turns["kin"], abs=4)

    def test_expected_time_is_divided_by_rows(self) -> None:
        line = FairQueue()
        for _ in range(3):
            for number in range(4):
                line.put(Task("", Payer(f"{number}"), KIN))
            served(line, 4, seconds=2.0)
        assert line.cost(Payer("0")) == pytest.approx(0.5)


class Crowd:
    """Workers and the groups that they did."""

    def __init__(self, *, most: int, delay: float = 0.0, count: int = 1, preferred: Sequence[int] = ()) -> None:
        self.groups: list[int] = []
        self.scheduler = Scheduler(count, BatchLimits(most, delay=delay, preferred=preferred))
        self.workers = Workers(self.scheduler, count, self._execute)
        self.add = self.scheduler.add
        self._done = threading.Semaphore(0)

    def work(self) -> bool:
        self._done.release()
        return True

    def _execute(self, tasks: Sequence[Task]) -> list[TaskResult]:
        if len(tasks) > 1:
            self.groups.append(len(tasks))
        return [TaskResult(task.work()) for task in tasks]

    def wait(self, number: int) -> None:
        for _ in range(number):
            assert self._done.acquire(timeout=PATIENCE), "a job was not done"


class TestDelay:
    def test_a_group_that_is_full_waits_no_longer(self) -> None:
        crowd = Crowd(most=3, delay=1e6)
        for number in range(3):
            crowd.add(Task(crowd.work, Payer(f"{number}"), KIN))
        crowd.wait(3)
        assert crowd.groups == [3]
        crowd.workers.stop()

    @pytest.mark.parametrize("count", [1, 2])
    def test_other_tasks_do_not_wait_for_the_batch(self, count: int) -> None:
        crowd = Crowd(most=3, delay=1e6, count=count)
        crowd.add(Task(crowd.work, Payer("a"), KIN))
        crowd.add(Task(crowd.work, Payer("b")))
        crowd.wait(1 if count == 2 else 2)
        crowd.workers.stop()

    def test_stopping_does_not_wait_for_a_batch(self) -> None:
        crowd = Crowd(most=3, delay=1e6)
        crowd.add(Task(crowd.work, Payer("a"), KIN))
        crowd.workers.stop(PATIENCE)
        crowd.wait(1)

    def test_batch_waits_for_requests_sent_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scheduler, "AT_ONCE_SECONDS", 1e6)
        crowd = Crowd(most=8)
        for _ in range(3):
            crowd.add(Task(crowd.work, Payer("a"), KIN, wanted_rows=3))
        crowd.wait(3)
        assert crowd.groups == [3]
        crowd.add(Task(crowd.work, Payer("a"), KIN, wanted_rows=1000))
        eventually(lambda: not len(crowd.scheduler))
        crowd.add(Task(crowd.work, Payer("b")))
        crowd.wait(2)  # and no further, where others wait
        crowd.add(Task(crowd.work, Payer("a"), KIN, wanted_rows=1000))
        eventually(lambda: not len(crowd.scheduler))
        crowd.add(Task(crowd.work, Payer("b"), KIN))
        crowd.wait(2)  # or are computed with it
        crowd.workers.stop()

    def test_for_a_moment_only(self) -> None:
        crowd = Crowd(most=8)
        crowd.add(Task(crowd.work, Payer("a"), KIN, wanted_rows=1000))
        crowd.wait(1)
        crowd.workers.stop()

    def test_batch_of_a_preferred_size_waits_no_longer(self) -> None:
        crowd = Crowd(most=8, delay=1e6, preferred=(3,))
        for number in range(3):
            crowd.add(Task(crowd.work, Payer(f"{number}"), KIN))
        crowd.wait(3)
        assert crowd.groups == [3]
        crowd.workers.stop()


def test_preferred_batch_size_is_taken() -> None:
    held = threading.Event()
    crowd = Crowd(most=8, preferred=(2, 4))
    crowd.add(Task(lambda: held.wait(PATIENCE), Payer("holder")))
    for number in range(7):
        crowd.add(Task(crowd.work, Payer(f"{number}"), KIN))
    held.set()
    crowd.wait(7)
    crowd.workers.stop()
    assert crowd.groups == [4, 2]  # and one alone


def test_each_pays_by_its_rows() -> None:
    now = iter([0.0, 4.0])
    scheduler = Scheduler(1, BatchLimits(4, delay=1e6))
    workers = Workers(scheduler, 1, clock=lambda: next(now))
    scheduler.add(Task(lambda: True, Payer("one"), KIN, 1))
    scheduler.add(Task(lambda: True, Payer("three"), KIN, 3))
    eventually(lambda: [scheduler._queue.cost(Payer(name)) for name in ("one", "three")] == [1.0, 3.0])
    workers.stop()


def test_a_batch_holds_no_more_memory_than_one_request_may() -> None:
    scheduler = Scheduler(1, BatchLimits(8, nbytes=100))
    for name, nbytes in (("a", 60), ("b", 50), ("c", 40)):
        scheduler.add(Task(name, Payer(name), KIN, nbytes=nbytes))
    assert [task.work for task in scheduler.next_batch()] == ["a", "c"]
    assert [task.work for task in scheduler.next_batch()] == ["b"]


def test_task_that_a_batch_would_delay_goes_first_and_alone() -> None:
    scheduler = Scheduler(1, BatchLimits(8))
    for _ in range(3):
        for name in "abc":
            scheduler.add(Task(name, Payer(name)))
            scheduler.finish(scheduler.next_batch(), [TaskResult(True)], 2.0)
    for name, left in (("a", 10.0), ("b", 5.0), ("c", None)):
        scheduler.add(Task(name, Payer(name), KIN, seconds_left=None if left is None else lambda left=left: left))  # type: ignore[misc]
    assert [[task.work for task in scheduler.next_batch()] for _ in range(2)] == [["b"], ["a", "c"]]


def test_client_that_failed_a_batch_is_isolated_then_its_account() -> None:
    scheduler = Scheduler(1, BatchLimits(8))

    def batches(*payers: Payer) -> list[int]:
        for payer in payers:
            scheduler.add(Task("", payer, KIN))
        found = []
        while len(scheduler):
            tasks = scheduler.next_batch()
            scheduler.finish(tasks, [TaskResult(False)] * len(tasks), 0.0)
            found.append(len(tasks))
        return sorted(found)

    ones = [Payer("one", name) for name in "abc"]
    scheduler.isolate(ones[:1])
    assert batches(*ones, Payer("two")) == [1, 3]
    scheduler.isolate(ones[1:2])
    assert batches(*ones, Payer("two"), Payer("three")) == [1, 1, 1, 2]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), SystemExit(1)])
def test_a_worker_survives_a_task_that_raises(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    scheduler, done = Scheduler(1), threading.Event()

    def failing() -> bool:
        raise error

    def work() -> bool:
        done.set()
        return True

    workers = Workers(scheduler, 1)
    scheduler.add(Task(failing, Payer("a")))
    scheduler.add(Task(work, Payer("b")))
    assert done.wait(PATIENCE)
    workers.stop()
    assert "tasks of a could not be computed" in caplog.text


def test_a_worker_survives_a_batch_that_cannot_be_put_together(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, done = Scheduler(1, BatchLimits(rows=4)), threading.Event()

    def failing(*_: object) -> list[str]:
        raise RuntimeError("a bug")

    def work() -> bool:
        done.set()
        return True

    workers = Workers(scheduler, 1)
    scheduler.add(Task(bool, Payer("a"), batch_key="key", compatible_keys=failing))
    scheduler.add(Task(work, Payer("b")))
    assert done.wait(PATIENCE)
    workers.stop()
    assert "tasks of an unknown account could not be computed" in caplog.text
