"""Who has ended workers lately: a request that crashes one costs its sender nothing, and the server a start."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from shared_hooks.errors import QuotaExceeded

MINUTE = 60.0


class Crashes:
    """Of the last minute, by account; at most ``most`` of each. Any thread may call."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._lately: deque[tuple[float, str]] = deque()

    def add(self, account: str) -> None:
        with self._lock:
            self._lately.append((self._clock(), account))

    def check(self, account: str) -> None:
        """Raises QuotaExceeded, saying when it may go on."""
        if not self._lately:
            return
        with self._lock:
            now = self._clock()
            while self._lately and self._lately[0][0] <= now - MINUTE:
                self._lately.popleft()
            own = [when for when, who in self._lately if who == account]
        if len(own) >= self._most:
            raise QuotaExceeded(
                f"requests of this account have ended {len(own)} workers within a minute, which is the limit "
                f"(worker_crashes_per_minute); it may go on in {own[-self._most] + MINUTE - now:.0f} s"
            )
