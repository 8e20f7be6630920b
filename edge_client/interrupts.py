"""Ctrl-C, never lost.

A KeyboardInterrupt is an exception like any other: raised while a library is imported, in a destructor or a callback
from C++, it may be caught there, printed or dropped, and the process continues. So there are two handlers. While
nothing has begun (`ends_at_once`) the process is ended without an exception. Afterwards (`insists`) it is raised again,
until somebody says `heard`. Loads nothing, so that it can be there before anything else.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

AGAIN_SECONDS: Final = 3.0
"""As long as a command may take to get from where it was interrupted to where it knows what to do about it."""
INTERRUPTED: Final = 130


@contextmanager
def ends_at_once() -> Iterator[None]:
    """In this block Ctrl-C ends the process, with exit status 130 and one line, until `insists` is called."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    installed = _install(_end)
    try:
        yield
    finally:
        if installed:
            heard()
            signal.signal(signal.SIGINT, before[0])
            signal.signal(signal.SIGALRM, before[1])


def insists() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt in the main thread, and again every `AGAIN_SECONDS` until `heard`."""
    if _install(_raise):
        signal.signal(signal.SIGALRM, _raise)


def heard() -> None:
    """The interrupt has arrived. A second Ctrl-C is a new one."""
    if threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, 0)


def _install(handler: signal._HANDLER) -> bool:
    """Not where somebody else decides: another thread's caller, a program of its own handler, a shell's background."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _end, _raise):
        return False
    signal.signal(signal.SIGINT, handler)
    return True


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"edge-client: interrupted\n")
    os._exit(INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    raise KeyboardInterrupt
