"""How busy the server is, as clients hear it: what waits or runs, and how long the last ones waited for a worker."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

WEIGHT = 0.2
"""Weight of the newest wait in the mean, at least: of one that came long after the others more."""
HALF_LIFE_SECONDS = 5.0
"""Without requests the remembered wait loses half of itself in this time: nobody waited for the idle worker."""
KEPT = 1024
"""Accounts whose waits are remembered."""


class QueueClocks:
    """A `QueueClock` for each account: who floods the server waits long, and others do not. Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._all = QueueClock(clock)
        self._of: OrderedDict[str, QueueClock] = OrderedDict()

    def add(self, account: str, wait_ns: int) -> None:
        with self._lock:
            found = self._of.get(account)
            if found is None:
                found = self._of[account] = QueueClock(self._clock)
                if len(self._of) > KEPT:
                    self._of.popitem(last=False)
            self._of.move_to_end(account)
        found.add(wait_ns)
        self._all.add(wait_ns)

    def mean_ns(self, account: str | None) -> int:
        """0 for one that never waited; None: of all."""
        if account is None:
            return self._all.mean_ns
        with self._lock:
            found = self._of.get(account)
        return 0 if found is None else found.mean_ns


class QueueClock:
    """The exponentially weighted mean of waits (ns). Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._mean = 0.0
        self._at = clock()

    def add(self, wait_ns: int) -> None:
        with self._lock:
            now = self._clock()
            kept = (1 - WEIGHT) * self._faded(now)  # what is long ago weighs no more than what is reported
            self._mean = kept * self._mean + (1 - kept) * wait_ns
            self._at = now

    @property
    def mean_ns(self) -> int:
        with self._lock:
            return round(self._mean * self._faded(self._clock()))

    def _faded(self, now: float) -> float:
        share: float = 0.5 ** ((now - self._at) / HALF_LIFE_SECONDS)
        return share
