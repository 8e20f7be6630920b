"""Durations and sizes counted in buckets: prometheus_client's own takes ten times as long to count one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

BUCKETS: Final = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
"""Seconds: three a decade, from 0.1 ms to 100 s."""
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""Requests that were computed together."""


class Histogram:
    """Of what is counted in units, ``scale`` of which are one of ``bounds``. The caller locks."""

    __slots__ = ("_bounds", "_counts", "_names", "_scale", "_sum")

    def __init__(self, bounds: Sequence[float] = BUCKETS, scale: float = 1e9) -> None:
        """Of nanoseconds, in buckets of seconds."""
        self._bounds = tuple(round(bound * scale) for bound in bounds)
        self._names = (*map(str, bounds), "+Inf")
        self._counts = [0] * len(self._names)
        self._scale = scale
        self._sum = 0

    def add(self, units: int) -> None:
        self._counts[bisect_left(self._bounds, units)] += 1
        self._sum += units

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many were at most that), as Prometheus has it."""
        return list(zip(self._names, accumulate(self._counts), strict=True))

    @property
    def total(self) -> float:
        """All of them together."""
        return self._sum / self._scale
