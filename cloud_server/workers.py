"""The threads that compute: first come, first served, requests and profiles alike."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]
"""Raises nothing."""


class Workers:
    """``count`` threads that run one job after the other.

    The queue has no bound of its own: the core admits no more requests than `Limits.max_pending`, and few profiles.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            # Daemons: nothing can interrupt a tail, and a process that must end now does not wait for one.
            threading.Thread(target=self._run, name=f"isthmus-worker-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        self._queue.put(job)

    def stop(self, timeout: float = 1.0) -> None:
        """Lets the threads end after what they have; waits at most ``timeout`` seconds for each."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job  # a request's payload would live until the next one comes
