"""Memory that was freed is kept for the next request, within bounds; what is more goes back to the system.

Left alone, glibc takes memory for each large message from the system and gives it back: 3.2 MB in messages of 1 MiB
took 1.7 times as long for page faults (docs/decisions/0019-the-pipe.md). Or it keeps all, in as many heaps as threads.
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
LARGEST_BYTES = 32 << 20
"""Largest block that is kept: the most that glibc takes from a heap."""
KEPT_BYTES = 64 << 20
"""At the end of a heap; `Trim` takes it away once much less is held."""
_OPTIONS = {  # glibc's malloc.h
    "MALLOC_ARENA_MAX": (-8, HEAPS),
    "MALLOC_MMAP_THRESHOLD_": (-3, LARGEST_BYTES),
    "MALLOC_TRIM_THRESHOLD_": (-1, KEPT_BYTES),
}


def few_heaps() -> None:
    """Few, which keep what is freed. To be called before there are threads; glibc's variables have the last word."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        for name, (option, value) in _OPTIONS.items():
            if name not in os.environ:
                set_option(option, value)


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
