"""Load and energy of this machine, over the time since the last look: from the sampler that every forward uses."""

from __future__ import annotations

import time
from typing import Final

from edge_client.live.entries import Entry, reading
from shared_hooks.metrics import Reading, Track
from shared_hooks.metrics.energy import Gpu
from shared_hooks.metrics.sampler import sampler

LAG_NS: Final = 300_000_000
"""A look ends so long ago, for slow meters to have samples on both sides of it: else it is an estimate."""


class Machine:
    """``gpu``: the one that the model runs on, None = the processor."""

    def __init__(self, gpu: Gpu | None = None) -> None:
        self._gpu = gpu
        self._since = time.perf_counter_ns() - LAG_NS
        sampler.touch(gpu)

    def look(self) -> Entry:
        """Since the last look: per cent, bytes of this process, watts. Keeps the sampler awake for some seconds."""
        since, self._since = self._since, time.perf_counter_ns() - LAG_NS
        window = sampler.window(since, self._gpu)
        sampler.touch(self._gpu)
        return {
            "at": round(time.time(), 3),
            "cpu": reading(_mean(window.cpu, since, self._since)),
            "gpu": None if self._gpu is None else reading(_mean(window.gpu, since, self._since)),
            "memory": reading(_mean(window.memory, since, self._since)),
            "process": reading(_mean(window.resident, since, self._since)),
            "power": reading(_power(window.energy, since, self._since)),
        }


def _mean(track: Track | Reading, start: int, stop: int) -> Reading:
    return track if isinstance(track, Reading) else track.mean(start, stop)


def _power(track: Track | Reading, start: int, stop: int) -> Reading:
    """Watts: what the energy grew by, over the time."""
    if isinstance(track, Reading):
        return track
    grown = track.growth(start, stop)
    if grown.value is None or stop <= start:
        return grown
    return Reading(grown.value / ((stop - start) / 1e9), grown.status, grown.note)
