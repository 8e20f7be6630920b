"""How many frames were taken, dropped and answered, and how many a second."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Final

from edge_client.sources.source import Source

WINDOW_SECONDS: Final = 2.0
"""Window of the rate that is shown while it runs."""


class Tally:
    """Counts one run through ``source``; it begins now, or at `start`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._began = time.monotonic()
        self._recent: deque[float] = deque()
        self.answered = 0
        self._seconds: float | None = None
        self._dropped: int | None = None

    def start(self) -> None:
        """Count the time from now: what was before was preparation."""
        self._began = time.monotonic()

    def add(self) -> None:
        """One more answer."""
        now = time.monotonic()
        self.answered += 1
        self._recent.append(now)
        while now - self._recent[0] > WINDOW_SECONDS:
            self._recent.popleft()

    def stop(self) -> None:
        """The run is over."""
        self._seconds, self._dropped = self.seconds, self.dropped

    @property
    def seconds(self) -> float:
        """Since it began, until it stopped."""
        return time.monotonic() - self._began if self._seconds is None else self._seconds

    @property
    def dropped(self) -> int:
        """Until it stopped."""
        return self._source.dropped if self._dropped is None else self._dropped

    @property
    def per_second(self) -> float:
        """Answers a second over the whole time; 0 before any."""
        return self.answered / self.seconds if self.answered else 0.0

    @property
    def now_per_second(self) -> float:
        """Answers a second lately."""
        span = min(self.seconds, WINDOW_SECONDS)
        return len(self._recent) / span if span else 0.0

    def line(self) -> str:
        """While it runs."""
        return f"{self._counts()}, {self.now_per_second:.1f} frames/s"

    def summary(self) -> str:
        """At the end."""
        return f"{self._source.name}: {self._counts()}, {self.per_second:.1f} frames/s"

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "name": self._source.name,
            "live": self._source.live,
            "taken": self._source.taken,
            "dropped": self.dropped,
            "answered": self.answered,
            "seconds": self.seconds,
            "frames_per_second": self.per_second,
        }

    def _counts(self) -> str:
        return f"{self._source.taken} taken, {self.dropped} dropped, {self.answered} answered"
