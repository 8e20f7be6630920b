"""Energy of work that is repeated until the sensors see it; and the share of other work by its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from shared_hooks.metrics import SEARCHING, Reading, Sampler, Track, gpu_of
from shared_hooks.metrics.sampler import sampler

SEARCH_S = 10.0
IDLE_S = 1.0
LEAST_S = 0.2
LEAST_PERIODS = 5


class Power:
    """The energy meters of this machine, for a model on ``device``. Without one, nothing is repeated, and every reading
    says why there is none.
    """

    def __init__(self, device: torch.device, source: Sampler = sampler) -> None:
        self._gpu = gpu_of(device)
        self._sampler = source
        self._watts: float | None = None
        self.missing = self._search()
        """Why there are no readings; None where there are."""

    def _search(self) -> Reading | None:
        until = time.monotonic() + SEARCH_S
        while True:
            track = self._track(time.perf_counter_ns())
            if isinstance(track, Track):
                return None
            if track is not SEARCHING or time.monotonic() > until:
                return track
            time.sleep(0.01)

    def _track(self, start_ns: int) -> Track | Reading:
        self._sampler.touch(self._gpu)
        return self._sampler.window(start_ns, self._gpu).energy

    def idle(self) -> Reading:
        """Watts while nothing of ours runs, over `IDLE_S`."""
        if self.missing is not None:
            return self.missing
        started = time.perf_counter_ns()
        time.sleep(IDLE_S)
        ended = time.perf_counter_ns()
        grown = self._grown(started, ended)
        if grown.value is None:
            return grown
        return Reading(grown.value / (ended - started) * 1e9, grown.status, grown.note)

    def repeat(self, run: Callable[[], object], what: str) -> Reading:
        """Joules of one ``run``, of as many as the sensors need. The first call says what `share` goes by."""
        if self.missing is not None:
            return self.missing
        track = self._track(time.perf_counter_ns())
        period = track.period_ns / 1e9 if isinstance(track, Track) else 0.0
        count, started, ended = 0, time.perf_counter_ns(), 0
        while ended - started < max(LEAST_S, LEAST_PERIODS * period) * 1e9:
            run()
            count, ended = count + 1, time.perf_counter_ns()
        grown = self._grown(started, ended)
        if grown.value is None:
            return grown
        if self._watts is None:
            self._watts = grown.value / (ended - started) * 1e9
        return Reading(grown.value / count, grown.status, f"{grown.note}; over {count} {what}")

    def share(self, ns: float) -> Reading:
        """Joules of work of ``ns`` nanoseconds at the mean power of what was repeated first."""
        if self.missing is not None:
            return self.missing
        if self._watts is None:
            return Reading.unavailable("no mean power was measured")
        return Reading.estimated(self._watts * ns / 1e9, f"its time at {self._watts:.3g} W mean power")

    def _grown(self, start: int, stop: int) -> Reading:
        """Joules between two times, read when a sample after ``stop`` has come, or ought to have."""
        until = time.monotonic() + SEARCH_S
        while True:
            track = self._track(start)
            if isinstance(track, Reading):
                return track
            if (track.times and track.times[-1] >= stop) or time.monotonic() > until:
                return track.growth(start, stop)
            time.sleep(track.period_ns / 4e9)


def mean_reading(readings: Sequence[Reading]) -> Reading:
    """The mean of several readings of one thing; measured if all of them are, unavailable if none has a value."""
    values = [reading.value for reading in readings if reading.value is not None]
    if not values:
        return readings[-1]
    note = next(reading.note for reading in reversed(readings) if reading.value is not None)
    value = sum(values) / len(values)
    if any(reading.status != "measured" for reading in readings):
        return Reading.estimated(value, note)
    return Reading.measured(value, note)
