"""The queue of live frames: so many wait, and the oldest gives way."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """Nothing comes any more, and nothing is left."""


class Late(Exception):
    """Nothing came in time."""


class Latest(Generic[T]):
    """At most ``most`` (1 or more) things that wait to be taken, in their order. One thread puts, any thread takes."""

    def __init__(self, most: int) -> None:
        self._waiting: deque[T] = deque(maxlen=most)
        self._changed = threading.Condition()
        self._ended = False
        self._error: Exception | None = None
        self.dropped = 0
        """How many gave way."""

    def put(self, thing: T) -> None:
        """Never waits. After `end` it has no effect."""
        with self._changed:
            if self._ended:
                return
            self.dropped += len(self._waiting) == self._waiting.maxlen
            self._waiting.append(thing)
            self._changed.notify_all()

    def end(self, error: Exception | None = None) -> None:
        """No more will come; ``error`` is raised in whoever has taken the last. Only the first call counts."""
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
                self._changed.notify_all()

    def ready(self, seconds: float | None) -> bool:
        """Whether `take` would not wait, now or within so long (None: as long as it takes)."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._waiting) or self._ended, seconds)

    def take(self, seconds: float | None = None) -> T:
        """The oldest that waits. Raises Late, Closed, or the error it ended with."""
        with self._changed:
            self._wait(seconds)
            return self._waiting.popleft()

    def newest(self, seconds: float | None = None) -> T:
        """A look at the newest; it stays where it is. Raises as `take`."""
        with self._changed:
            self._wait(seconds)
            return self._waiting[-1]

    def _wait(self, seconds: float | None) -> None:
        if not self.ready(seconds):
            raise Late
        if not self._waiting:
            raise self._error or Closed
