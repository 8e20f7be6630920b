"""When a hook is to act: ``when=every_n_seconds(5)`` at registration, or ``if is_first(event)`` inside a hook."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shared_hooks.errors import SpecError
from shared_hooks.lifecycle.events import Event

Condition = Callable[[Event], bool]


def every_n_requests(n: int) -> Condition:
    """The first request of a run and every n-th after it. False for events that belong to no request."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise SpecError(f"every_n_requests takes a number from 1 up, not {n!r}")
    return lambda event: event.request is not None and event.request.index % n == 0


def every_n_seconds(seconds: float) -> Condition:
    """The first event that is asked about, and then one after ``seconds`` at the soonest. Any thread may ask."""
    if not 0 < seconds < float("inf"):
        raise SpecError(f"every_n_seconds takes a number of seconds above 0, not {seconds!r}")
    lock, due = threading.Lock(), 0.0

    def condition(event: Event) -> bool:
        nonlocal due
        now = time.monotonic()
        with lock:
            if now < due:
                return False
            due = now + seconds
            return True

    return condition


def is_first(event: Event) -> bool:
    """Whether it belongs to the first request of its run."""
    return event.request is not None and event.request.index == 0


def is_last(event: Event) -> bool:
    """Whether it belongs to the last request of its run; False where nobody knows how many there are."""
    return event.request is not None and event.request.index + 1 == event.request.total
