"""How long a run's requests took and how many a second were answered, the first one apart."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from edge_client.screen.text import milliseconds

KEPT: Final = 100_000
"""Latencies that are kept, the last ones: 0.8 MB."""


class Pace:
    """The rate of one run with up to ``in_flight`` requests under way, after ``warmup`` that are not counted at all.

    The first request makes plans, recipes and caches on both sides and is often the slowest by far; where no warm-up
    went before it, it is reported separately, and counts neither for latency nor for throughput.
    """

    def __init__(self, in_flight: int = 1, warmup: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.in_flight, self.warmup = in_flight, warmup
        self.first_ns: int | None = None
        self._clock = clock
        self._latencies: deque[int] = deque(maxlen=KEPT)
        self._count = 0
        self._since: float | None = None if not warmup else clock()
        self._last = 0.0

    def start(self) -> None:
        """The run begins now."""
        if self.warmup:
            self._since = self._clock()

    def add(self, latency_ns: int) -> bool:
        """An answer has come; False for the one that is reported separately."""
        now = self._clock()
        if self._since is None:
            self.first_ns, self._since = latency_ns, now
            return False
        self._latencies.append(latency_ns)
        self._count += 1
        self._last = now
        return True

    @property
    def per_second(self) -> float | None:
        """Answers a second; None where there were none but the first."""
        if self._since is None or not self._count or self._last <= self._since:
            return None
        return self._count / (self._last - self._since)

    def quantile_ns(self, share: float) -> int | None:
        """The latency within which this share of the requests was answered."""
        ordered = sorted(self._latencies)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None

    def lines(self) -> list[str]:
        """For people."""
        reported = []
        if self.first_ns is not None:
            apart = "; it makes plans and caches, and is left out below" if self._count else ""
            reported.append(f"first request {milliseconds(self.first_ns)} ms{apart}")
        median, most = self.quantile_ns(0.5), self.quantile_ns(0.9)
        if median is not None and most is not None:
            how = "one at a time" if self.in_flight == 1 else f"up to {self.in_flight} in flight"
            count = f"{self._count} request{'' if self._count == 1 else 's'}"
            reported.append(
                f"latency: median {milliseconds(median)} ms, 90 % within {milliseconds(most)} ms ({count}, {how})"
            )
        if self.in_flight > 1 and self.per_second is not None:
            reported.append(
                f"throughput: {self.per_second:.1f} requests a second with up to {self.in_flight} in flight"
            )
        return reported

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; times in nanoseconds."""
        return {
            "in_flight": self.in_flight,
            "warmup": self.warmup,
            "first_ns": self.first_ns,
            "requests": self._count,
            "median_ns": self.quantile_ns(0.5),
            "p90_ns": self.quantile_ns(0.9),
            "p99_ns": self.quantile_ns(0.99),
            "per_second": self.per_second,
        }
