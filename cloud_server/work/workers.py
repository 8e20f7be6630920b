"""The threads that compute: first come, first served, requests and profiles alike."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable

Job = Callable[[], None]
"""Raises nothing."""


class Workers:
    """``count`` threads that run one job after the other.

    The line has no bound of its own: the core admits no more requests than `Limits.max_pending`, and few profiles. A
    request that is given up leaves it.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._line: OrderedDict[int, Job] = OrderedDict()
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stopped = False
        self._threads = [
            # Daemons: nothing can interrupt a tail, and a process that must end now does not wait for one.
            threading.Thread(target=self._run, name=f"isthmus-worker-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> Callable[[], None]:
        """The job is the last of the line; what is given takes it out again, if no thread has it yet."""
        number = next(self._numbers)
        with self._changed:
            self._line[number] = job
            self._changed.notify()

        def leave() -> None:
            with self._changed:
                self._line.pop(number, None)

        return leave

    def stop(self, timeout: float = 1.0) -> None:
        """Lets the threads end after what they have; waits at most ``timeout`` seconds for each."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout)

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._line or self._stopped)
            return self._line.popitem(last=False)[1] if self._line else None

    def _run(self) -> None:
        while (job := self._next()) is not None:
            job()
            del job  # a request's payload would live until the next one comes
