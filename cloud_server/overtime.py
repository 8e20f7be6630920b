"""Ends work that takes too long, as soon as it comes back to Python: a model may loop as often as an input says.

What a tail does after it has read a value from its data cannot be foreseen. One thread looks at all that runs; it
raises `Overtime` in a thread whose time is over, again and again until that thread is out of the model.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN_SECONDS = 1.0


class Overtime(BaseException):
    """Not an Exception, so that no model catches it."""


class Watch:
    """Safe with any number of threads."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._until: dict[int, float] = {}
        self._changed = threading.Event()
        self._closed = False
        threading.Thread(target=self._look, name="isthmus-overtime", daemon=True).start()

    @contextmanager
    def limited(self) -> Iterator[None]:
        """What the block does in this thread is ended by `Overtime` when its time is over; never after the block."""
        thread = threading.get_ident()
        with self._lock:
            self._until[thread] = time.monotonic() + self._seconds
        self._changed.set()
        try:
            yield
        finally:
            self._leave(thread)

    def _leave(self, thread: int) -> None:
        while True:
            try:
                with self._lock:
                    self._until.pop(thread, None)
                # one that was raised and has not come yet is taken back
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
                return
            except Overtime:
                continue

    def _look(self) -> None:
        while not self._closed:
            with self._lock:
                now = time.monotonic()
                for thread, until in self._until.items():
                    if until <= now:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Overtime))
                        self._until[thread] = now + AGAIN_SECONDS
                waiting = min(self._until.values(), default=None)
            self._changed.clear()
            self._changed.wait(None if waiting is None else max(waiting - now, 0.01))

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._changed.set()
