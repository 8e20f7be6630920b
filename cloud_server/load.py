"""How busy the server is, as clients are told: what waits or runs, and how long the last ones waited for a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

WEIGHT = 0.2
"""Of the newest wait in the mean."""
HALF_LIFE_SECONDS = 5.0
"""Without requests the remembered wait loses half of itself in this time: nobody waited for the idle worker."""


class QueueClock:
    """The exponentially weighted mean of waits (ns). Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._mean = 0.0
        self._at = clock()

    def add(self, wait_ns: int) -> None:
        with self._lock:
            self._mean += WEIGHT * (wait_ns - self._mean)
            self._at = self._clock()

    @property
    def mean_ns(self) -> int:
        with self._lock:
            aged: float = self._mean * 0.5 ** ((self._clock() - self._at) / HALF_LIFE_SECONDS)
            return round(aged)
