"""A bound on the time of what may hang."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class TooLong(BaseException):
    """A program that hangs. No Exception, because programs catch those."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """`TooLong` is raised within, once so many seconds of processor time are over, or ten times that by the clock: a
    busy machine is no hang.
    """
    if threading.current_thread() is not threading.main_thread():  # others hear no signals
        yield
        return

    used, started = time.process_time(), time.monotonic()

    def ring(*_: object) -> None:
        left = seconds - (time.process_time() - used)
        if left <= 0 or time.monotonic() - started > 10 * seconds:
            raise TooLong
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.1))

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
