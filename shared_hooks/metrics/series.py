"""Values sampled in the background, and what they say about an interval of time: measured, estimated, or nothing."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass

from shared_hooks.metrics.reading import Reading

LENGTH = 4096
"""Samples kept: 80 s of those taken every 20 ms."""

REACH_NS = 1_000_000_000
"""How far beyond the samples an estimate may reach; at least five periods."""


class Series:
    """A bounded row of samples: one thread appends, any thread looks. Locked for moments, never while a sensor is read.

    ``what``: by what it is sampled, in few words. ``period_ns``: the time between two samples.
    """

    def __init__(self, what: str, period_ns: int) -> None:
        self.what = what
        self.period_ns = period_ns
        self._words = Words.of(what, period_ns)
        self._samples: deque[tuple[int, float]] = deque(maxlen=LENGTH)
        self._lock = threading.Lock()

    def append(self, at_ns: int, value: float) -> None:
        """A sample taken at ``at_ns`` of `time.perf_counter_ns`, later than those before it."""
        with self._lock:
            self._samples.append((at_ns, value))

    def clear(self) -> None:
        with self._lock:
            self._samples.clear()

    def __len__(self) -> int:
        return len(self._samples)

    def since(self, start_ns: int) -> Track:
        """The samples from ``start_ns`` on, and two before it."""
        found: list[tuple[int, float]] = []
        before = 0
        with self._lock:
            for sample in reversed(self._samples):
                found.append(sample)
                before += sample[0] <= start_ns
                if before == 2:
                    break
        found.reverse()
        return Track(self._words, self.period_ns, [at for at, _ in found], [value for _, value in found])


@dataclass(frozen=True, slots=True)
class Words:
    """What readings of one row of samples say of themselves."""

    measured: str
    estimated: str
    near: str
    too_few: Reading
    elsewhere: Reading

    @classmethod
    def of(cls, what: str, period_ns: int) -> Words:
        every = f"{period_ns / 1e6:.0f} ms"
        return cls(
            f"{what}, sampled every {every}",
            f"share by time of {every} samples of {what}",
            f"{what}, from samples every {every}",
            Reading.unavailable(f"too few samples yet of {what}"),
            Reading.unavailable(f"no samples at that time of {what}"),
        )


class Track:
    """Samples around a forward.

    An interval is *measured* when it is at least two periods long and enclosed by samples; where a sample came late,
    its gap counts as the period. Any other interval near samples gets its share by time: *estimated*. Else there is
    nothing: *unavailable*.
    """

    def __init__(self, words: Words, period_ns: int, times: list[int], values: list[float]) -> None:
        self.times = times
        self.values = values
        self.period_ns = period_ns
        self._reach = max(REACH_NS, 5 * period_ns)
        self._words = words
        self._levels: dict[tuple[float, bool], Reading] = {}
        self._gaps: dict[int, tuple[Reading, Reading]] = {}  # by the sample after it: level and peak

    def growth(self, start: int, stop: int) -> Reading:
        """How much a counter grew between two times (`time.perf_counter_ns`)."""
        lacking = self._lacking(start, stop, 2)
        if lacking is not None:
            return lacking
        value = max(0.0, self._at(stop) - self._at(start))
        if self._is_measured(start, stop):
            return Reading(value, "measured", self._words.measured)
        return Reading(value, "estimated", self._words.estimated)

    def mean(self, start: int, stop: int) -> Reading:
        """The mean of a level over the interval. A sample speaks for the time since the one before it."""
        if gap := self._gap(start, stop):
            return self._of_gap(gap)[0]
        lacking = self._lacking(start, stop, 1)
        if lacking is not None:
            return lacking
        times, values, last = self.times, self.values, len(self.times) - 1
        first, final = min(last, bisect_left(times, start)), min(last, bisect_left(times, stop))
        if first == final or stop <= start:
            return self._level(values[final], start, stop)
        edges = [start, *times[first:final], stop]
        total = sum((edges[i + 1] - edges[i]) * values[first + i] for i in range(len(edges) - 1))
        return self._level(total / (stop - start), start, stop)

    def end(self, start: int, stop: int) -> Reading:
        """What a level was at the end of the interval."""
        if gap := self._gap(start, stop):
            return self._of_gap(gap)[0]
        lacking = self._lacking(start, stop, 1)
        if lacking is not None:
            return lacking
        return self._level(self.values[min(len(self.times) - 1, bisect_left(self.times, stop))], start, stop)

    def peak(self, start: int, stop: int) -> Reading:
        """The highest sample of a level in the interval, and of the two that enclose it."""
        if gap := self._gap(start, stop):
            return self._of_gap(gap)[1]
        lacking = self._lacking(start, stop, 1)
        if lacking is not None:
            return lacking
        first = min(len(self.times) - 1, max(0, bisect_right(self.times, start) - 1))
        return self._level(max(self.values[first : bisect_left(self.times, stop) + 1]), start, stop)

    def _gap(self, start: int, stop: int) -> int:
        """The number of the sample before which the whole interval lies, and after the one before that; as many as
        there are samples: after the last. 0 where it holds a sample, or lies where there may be nothing.
        """
        times = self.times
        gap = bisect_left(times, start)
        if not gap or stop <= start:
            return 0
        until = times[gap] if gap < len(times) else times[-1] + self._reach
        return gap if stop <= until else 0

    def same_until(self, start: int, stop: int) -> int:
        """Up to when what begins after this interval lies in its gap between two samples; 0 where it lies in none."""
        gap = self._gap(start, stop)
        return 0 if not gap else self.times[gap] if gap < len(self.times) else self.times[-1] + self._reach

    def _of_gap(self, gap: int) -> tuple[Reading, Reading]:
        """Level and peak of what lies there: layers that are shorter than a sample share them."""
        if (known := self._gaps.get(gap)) is None:
            values = self.values
            after = values[min(gap, len(values) - 1)]
            near = self._near(after), self._near(max(values[gap - 1], after))
            known = self._gaps[gap] = near
        return known

    def _near(self, value: float) -> Reading:
        return Reading(value, "estimated", self._words.near)

    def _level(self, value: float, start: int, stop: int) -> Reading:
        measured = self._is_measured(start, stop)
        reading = self._levels.get((value, measured))
        if reading is None:  # layers that are shorter than a sample share it
            reading = Reading(value, "measured", self._words.measured) if measured else self._near(value)
            self._levels[value, measured] = reading
        return reading

    def _lacking(self, start: int, stop: int, need: int) -> Reading | None:
        times = self.times
        if len(times) < need:
            return self._words.too_few
        if stop > times[-1] + self._reach or start < times[0] - self._reach:
            return self._words.elsewhere
        return None

    def _is_measured(self, start: int, stop: int) -> bool:
        if stop - start < 2 * self.period_ns:
            return False
        times = self.times
        first, final = bisect_right(times, start) - 1, bisect_left(times, stop)
        if first < 0 or final == len(times):
            return False
        return stop - start >= 2 * max(times[i + 1] - times[i] for i in range(first, final))

    def _at(self, when: int) -> float:
        """A counter's value, on straight lines through the samples."""
        times, values = self.times, self.values
        right = min(len(times) - 1, max(1, bisect_left(times, when)))
        left = right - 1
        slope = (values[right] - values[left]) / (times[right] - times[left])
        return values[left] + (when - times[left]) * slope
