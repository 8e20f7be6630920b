"""Ends work that takes too long, as soon as it comes back to Python: a model may loop as often as an input says.

What a tail does after it has read a value from its data cannot be foreseen. One thread looks at all that runs; it
raises `Overtime` in a thread whose time is over, again and again until that thread is out of the model.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from shared_hooks.forward import bounded

AGAIN_SECONDS = 1.0
COMES_WITHIN = 100
"""Turns of a loop, at the end of each of which Python looks whether an exception has come from outside."""


class Overtime(BaseException):
    """Not an Exception, so that no model catches it."""


class Watchdog:
    """Safe with any number of threads."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._until: dict[int, float] = {}
        self._raised: set[int] = set()
        self._changed = threading.Event()
        self._looks_at = math.inf
        """When its thread looks again at the latest."""
        self._closed = False
        threading.Thread(target=self._look, name="isthmus-overtime", daemon=True).start()

    def limited(self, seconds: float = math.inf) -> AbstractContextManager[None]:
        """Bounds what the block does in this thread, to ``seconds`` if these are fewer. `Overtime` comes where the
        engine lets it (`shared_hooks.forward.allowance`): in the model's code, and never after it.
        """
        return bounded(_Time(self, min(seconds, self._seconds)))

    @contextmanager
    def until(self, end: float) -> Iterator[None]:
        """`Overtime` may come in the block, from ``end`` on (of the monotonic clock); never after the block."""
        thread = threading.get_ident()
        before = self._until.get(thread)
        try:
            self._set(thread, end)
            yield
        finally:
            while True:  # it may come as the call begins
                try:
                    self._leave(thread, before)
                    break
                except Overtime:
                    continue

    @contextmanager
    def put_off(self) -> Iterator[Callable[[], float]]:
        """Nothing comes in the block, and what it takes does not count: `Overtime` may come as much later. What is
        given says so, after the block.
        """
        thread, began, taken = threading.get_ident(), time.monotonic(), 0.0
        before = self._until.get(thread)
        try:
            self._set(thread, math.inf)
            yield lambda: taken
        finally:
            taken = time.monotonic() - began
            self._leave(thread, None if before is None else before + taken)

    def _set(self, thread: int, end: float) -> None:
        with self._lock:
            self._until[thread] = end
            sooner = end < self._looks_at
        if sooner:  # else its thread looks soon enough
            self._changed.set()

    def _leave(self, thread: int, before: float | None) -> None:
        """``before``: the end of the block that this one lies in."""
        while True:
            try:
                with self._lock:
                    self._until.pop(thread, None)
                if thread in self._raised:
                    # One that has not come yet comes here. Taking it back (SetAsyncExc with NULL) would leave CPython
                    # 3.11 looking for it at every call and loop, and under a profiler for ever.
                    for _ in range(COMES_WITHIN):
                        pass
                    self._raised.discard(thread)
                break
            except Overtime:
                continue
        if before is not None:
            self._set(thread, before)

    def _look(self) -> None:
        while not self._closed:
            with self._lock:
                now = time.monotonic()
                for thread, until in self._until.items():
                    if until <= now:
                        self._raised.add(thread)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Overtime))
                        self._until[thread] = now + AGAIN_SECONDS
                waiting = self._looks_at = min(self._until.values(), default=math.inf)
                self._changed.clear()
            self._changed.wait(None if waiting == math.inf else max(waiting - now, 0.01))

    def close(self) -> None:
        """Ends the thread."""
        self._closed = True
        self._changed.set()


class _Time:
    """The time of one request; a `shared_hooks.forward.allowance.Limit`."""

    def __init__(self, watchdog: Watchdog, seconds: float) -> None:
        self._watchdog = watchdog
        self._seconds = seconds
        self._end: float | None = None
        """Counted from when the model first runs: what others' turns take is not this request's."""

    def interruptible(self, seconds: float) -> AbstractContextManager[None]:
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        return self._watchdog.until(min(self._end, now + seconds))

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        with self._watchdog.put_off() as seconds:
            yield
        if self._end is not None:
            self._end += seconds()
