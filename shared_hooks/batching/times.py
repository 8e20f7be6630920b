"""How long a tail takes for so many rows, as it was measured here."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from typing import Final

LAST: Final = 8
"""Measurements of one number of rows that count."""
MAX_SIZES: Final = 64


class Seconds:
    """Any thread may call: workers add to what another one reads, to see what is worth joining."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[int, deque[float]] = {}

    def add(self, rows: int, seconds: float) -> None:
        """One more measurement."""
        with self._lock:
            if rows in self._seen or len(self._seen) < MAX_SIZES:
                self._seen.setdefault(rows, deque(maxlen=LAST)).append(seconds)

    def clear(self) -> None:
        """What was measured does not count: it was the first time."""
        with self._lock:
            self._seen.clear()

    def of(self, rows: int) -> float | None:
        """What so many rows may take: the median of what they took, or on the line through those next to them. None
        where too little is known.
        """
        with self._lock:
            return self._of(rows)

    def _of(self, rows: int) -> float | None:
        sizes = sorted(self._seen)
        if rows in self._seen:
            return self._median(rows)
        if len(sizes) < 2:
            return None
        at = min(max(1, bisect_left(sizes, rows)), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        slope = max(0.0, self._median(high) - self._median(low)) / (high - low)
        return max(0.0, self._median(low) + slope * (rows - low))

    def _median(self, rows: int) -> float:
        seen = sorted(self._seen[rows])
        return seen[len(seen) // 2]
