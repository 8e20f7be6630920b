"""Interleaved measurements, and their medians and quartiles.

Machines drift: clocks step, neighbours come and go. So whatever is compared is measured in turns (A B A B ...), and
what is reported are ratios of medians. The garbage collector runs as it would: what keeps it busy has to pay for it.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Clock = Callable[[], int]

cpu_ns: Clock = time.process_time_ns
"""CPU time of all threads of this process: what other processes do hardly shows."""

wall_ns: Clock = time.perf_counter_ns
"""Time as it passes: the only measure of something that two processes do in turns."""


@dataclass(frozen=True)
class Spread:
    """Quartiles of ``count`` values, in the values' own unit."""

    low: float
    median: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high, len(values))

    @property
    def error(self) -> float:
        """The median's relative standard error, were the values normally distributed: 0.93 IQR / sqrt(count)."""
        return 0.93 * (self.high - self.low) / self.count**0.5 / self.median if self.median else 0.0

    def scaled(self, factor: float) -> Spread:
        return Spread(self.low * factor, self.median * factor, self.high * factor, self.count)

    def as_dict(self) -> dict[str, Any]:
        return {"low": self.low, "median": self.median, "high": self.high, "count": self.count}


def timed(function: Callable[[], Any], clock: Clock) -> int:
    """Nanoseconds of one call."""
    start = clock()
    function()
    return clock() - start


def interleave(
    functions: Mapping[str, Callable[[], Any]], repeats: int, clock: Clock, warm_up: int = 2, burst: int = 1
) -> dict[str, list[int]]:
    """Nanoseconds of ``repeats`` calls of each function, called in turns after ``warm_up`` rounds.

    ``burst``: calls of one function in a row, of which the first does not count unless it is the only one. For what
    lives by the processor's caches, so that each function finds in them what it left there itself.
    """
    for _ in range(warm_up):
        for function in functions.values():
            function()
    found: dict[str, list[int]] = {name: [] for name in functions}
    gc.collect()
    for _ in range(-(-repeats // max(1, burst - 1))):
        for name, function in functions.items():
            times = [timed(function, clock) for _ in range(burst)]
            found[name] += times[1:] if burst > 1 else times
    return found


def spreads(measured: Mapping[str, Sequence[float]], factor: float = 1.0) -> dict[str, Spread]:
    return {name: Spread.of(values).scaled(factor) for name, values in measured.items()}


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the ratio of the medians."""
    return statistics.median(above) / statistics.median(below)


def pairwise(above: Sequence[float], below: Sequence[float]) -> Spread:
    """The spread of the ratios of values measured next to each other: how well `ratio` is known."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def keep_heap() -> None:
    """From here on glibc gives no memory back to the system, until the process ends.

    Else it does, or does not, in the middle of a forward, by where things happen to lie: up to a thousand pages are
    then taken again, a millisecond for one side of a comparison and nothing for the other.
    """
    limit = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if limit is not None:
        limit(_M_TRIM_THRESHOLD, 1 << 30)
        limit(_M_MMAP_MAX, 0)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h
