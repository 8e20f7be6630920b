"""The threads that compute: first come, first served."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from cloud_server.request import Request


class Workers:
    """``count`` threads that call ``work`` with one request after the other.

    The queue has no bound of its own: the core admits no more requests than `Limits.max_pending`.
    """

    def __init__(self, count: int, work: Callable[[Request], None]) -> None:
        self._work = work
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._threads = [
            # Daemons: nothing can interrupt a tail, and a process that must end now does not wait for one.
            threading.Thread(target=self._run, name=f"isthmus-worker-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, request: Request) -> None:
        self._queue.put(request)

    def stop(self, timeout: float = 1.0) -> None:
        """Lets the threads end after what they have; waits at most ``timeout`` seconds for each."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            self._work(request)
            del request  # its payload would live until the next one comes
