"""Memory that was freed goes back to the system: glibc keeps it else, in as many heaps as there are threads.

A full server (`python -m studies.siege.memory`) had 1.29 times what its limits say, and with two heaps 1.17 times.
"""

from __future__ import annotations

import ctypes
import os
import sys

STEP_BYTES = 32 << 20
"""So much less is held than was: a trim takes some milliseconds, and what is trimmed is paged in again, so that steady
traffic causes none.
"""


HEAPS = 2
_M_ARENA_MAX = -8  # glibc's malloc.h


def few_heaps() -> None:
    """To be called before there are threads. The variable MALLOC_ARENA_MAX has the last word."""
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in os.environ:
        limit = getattr(ctypes.CDLL(None), "mallopt", None)
        if limit is not None:
            limit(_M_ARENA_MAX, HEAPS)


class Trim:
    """One thread looks, now and then. Where there is no glibc, nothing happens."""

    def __init__(self) -> None:
        self._most = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

    def look(self, held: int) -> bool:
        """``held``: bytes, now. True when freed memory was given back."""
        self._most = max(self._most, held)
        if self._trim is None or self._most - held < STEP_BYTES:
            return False
        self._most = held
        self._trim(0)
        return True
