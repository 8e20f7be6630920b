"""For a process that is killed and can end its children no more: they end by themselves."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # prctl(2)


def end_with_parent(number: int = signal.SIGTERM) -> Callable[[], None] | None:
    """What `subprocess.Popen` takes for ``preexec_fn``: the signal ``number`` when this process has ended. None where
    there is no such thing.

    Linux ends a child for its parent *thread*; only the main one is there to the end.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return None
    return partial(_end_with, os.getpid(), number)


def _end_with(parent: int, number: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the parent's would be lost with the new program
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it was killed before the line above, of which nobody is told
        os._exit(128 + number)
