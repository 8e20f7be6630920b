"""One request that a task waits for in a thread, and may want no more at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from edge_client.answer import Answer
from edge_client.request import Pending
from shared_hooks.errors import Cancelled

WHY = "the task that waited for it was cancelled"


class Held:
    """``run`` in a thread, `leave` from the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: Pending | None = None
        self._left = False

    def run(self, begin: Callable[[], Pending]) -> Answer:
        """Begins and waits. Raises Cancelled where it was left."""
        self._check()
        pending = begin()
        with self._lock:
            self._pending = pending
            left = self._left
        if left:  # while its head ran
            pending.cancel(WHY)
        return pending.result()

    def leave(self) -> None:
        """Nobody waits any more: the server is told, and `run` ends."""
        with self._lock:
            self._left = True
            pending = self._pending
        if pending is not None:
            pending.cancel(WHY)

    def _check(self) -> None:
        with self._lock:
            if self._left:
                raise Cancelled(WHY)
