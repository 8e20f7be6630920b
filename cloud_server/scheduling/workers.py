"""The threads that compute what a scheduler gives them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from cloud_server.scheduling.fair_queue import Payer, Task
from cloud_server.scheduling.scheduler import Result, Scheduler

Execute = Callable[[Sequence[Task]], Sequence[Result]]
"""Does the tasks of a batch. Raises nothing."""


def call(tasks: Sequence[Task]) -> list[Result]:
    """Does tasks whose work is a function, one after the other."""
    return [Result(task.work()) for task in tasks]


class Workers:
    """``count`` threads that take batches from ``scheduler`` until it is stopped. ``clock``: seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        count: int,
        execute: Execute = call,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.count = count
        self.scheduler = scheduler
        self._execute = execute
        self._clock = clock
        self._thread = threading.local()
        """Of each: ``resumed``, since when its task runs, or since it last let others go first."""
        self._threads = [
            # Daemons: nothing can interrupt a tail, and a process that must end now does not wait for one.
            threading.Thread(target=self._run, name=f"isthmus-worker-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def let_others_go_first(self, payer: Payer) -> None:
        """Called by a task of ``payer`` that takes long, in its thread: it is charged for what it has taken, and those
        who have had less than its account since are served now, here.
        """
        self.scheduler.charge(payer, self._clock() - self._thread.resumed)
        while tasks := self.scheduler.next_batch(before=payer):
            self._do(tasks)
        self._thread.resumed = self._clock()

    def stop(self, timeout: float = 1.0) -> None:
        """Lets the threads end after what they have; waits at most ``timeout`` seconds for each."""
        self.scheduler.stop()
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        while tasks := self.scheduler.next_batch():
            self._do(tasks)
            del tasks  # a request's payload would live until the next one comes

    def _do(self, tasks: list[Task]) -> None:
        self._thread.resumed = self._clock()
        results: Sequence[Result] = [Result(False)] * len(tasks)
        try:
            results = self._execute(tasks)
        finally:
            self.scheduler.finish(tasks, results, self._clock() - self._thread.resumed)
