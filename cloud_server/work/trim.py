"""Memory that was freed goes back to the system: glibc keeps it else, in as many heaps as there are threads."""

from __future__ import annotations

import ctypes
import sys

STEP_BYTES = 32 << 20
"""So much was let go since the last time: a trim takes some milliseconds, and what is trimmed is paged in again."""


class Trim:
    """One thread looks, now and then. Where there is no glibc, nothing happens."""

    def __init__(self) -> None:
        self._last = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

    def look(self, returned: int) -> bool:
        """``returned``: bytes that were ever let go. True when freed memory was given back."""
        if self._trim is None or returned - self._last < STEP_BYTES:
            return False
        self._last = returned
        self._trim(0)
        return True
