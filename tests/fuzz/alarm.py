"""A bound on the time of what may hang."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TooLong(BaseException):
    """A program that hangs. No Exception, because programs catch those."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """`TooLong` is raised within, once so many seconds are over."""
    if threading.current_thread() is not threading.main_thread():  # others hear no signals
        yield
        return

    def ring(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
