"""Threads that a model's code starts: no mode and no session sees what they do, since those are a thread's own."""

from __future__ import annotations

import functools
import threading

from shared_hooks.modules import running

_start = threading.Thread.start


def watch_threads() -> None:
    """From now on ``thread_starts()`` of a session is called where the model starts a thread in it; what that raises,
    the model's `start` raises. For others' threads it is one look at a context variable. (Python's auditing events
    tell of threads from 3.12 on.)
    """
    if threading.Thread.start is _start:
        threading.Thread.start = _told  # type: ignore[method-assign]


@functools.wraps(_start)
def _told(self: threading.Thread) -> None:
    reported = getattr(running.get(), "thread_starts", None)
    if reported is not None:
        reported()
    _start(self)
