"""Handle Ctrl-C so that it is never lost.

A KeyboardInterrupt is an ordinary exception: raised during an import, in a destructor or a callback from C++, it may be
caught, printed or dropped there, and the process continues. So there are two handlers. Before any work (`ends_at_once`)
the process is ended without an exception. Afterwards (`insists`) it is raised again and again, until `acknowledge`.
Loads nothing, so that it can be installed first.
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
"""Seconds that a command may need to get from the interruption to its handling."""
INTERRUPTED: Final = 130


@contextmanager
def ends_at_once() -> Iterator[None]:
    """End the process on Ctrl-C in this block, with exit status 130 and one line, until `insists` is called."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    installed = _install(_end)
    try:
        yield
    finally:
        if installed:
            acknowledge()
            signal.signal(signal.SIGINT, before[0])
            signal.signal(signal.SIGALRM, before[1])


def insists() -> None:
    """Raise KeyboardInterrupt in the main thread on Ctrl-C, and again every `AGAIN_SECONDS` until `acknowledge`."""
    if _install(_raise):
        signal.signal(signal.SIGALRM, _raise)


def acknowledge() -> None:
    """Confirm that the interrupt has arrived. A second Ctrl-C is a new one."""
    if threading.current_thread() is threading.main_thread():
        signal.setitimer(signal.ITIMER_REAL, 0)


def _install(handler: signal._HANDLER) -> bool:
    """Install a handler, unless called from another thread, or a program or a background shell has set its own."""
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
