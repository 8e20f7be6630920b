"""The clocks that layers are timed by: the host's, and the events of a CUDA stream."""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """Marks are readings of the performance counter."""

    mark = staticmethod(time.perf_counter_ns)

    def settle(self, began: Any, ended: Any) -> None:
        """Nothing to wait for."""

    def at(self, mark: Any) -> int:
        """Nanoseconds of `time.perf_counter_ns`."""
        return int(mark)


class StreamClock:
    """Marks are events on the current stream of a CUDA device, read after the forward: no layer waits for the device.

    `settle` waits once, for the last mark; that is also where the events find their place on the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: Any = None
        self._zero = 0

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self, began: Any, ended: Any) -> None:
        """Wait until the device has passed ``ended``; ``began`` is the mark that all times are counted from."""
        ended.synchronize()
        self._began = began
        self._zero = 0
        self._zero = time.perf_counter_ns() - self.at(ended)

    def at(self, mark: Any) -> int:
        """Nanoseconds of `time.perf_counter_ns` at which the device passed the mark. Differences are the device's."""
        return self._zero + int(self._began.elapsed_time(mark) * 1e6)


Clock = HostClock | StreamClock


HOST = HostClock()
"""It keeps nothing: one serves all."""


def clock_for(device: torch.device) -> Clock:
    """The clock that sees the work of a device."""
    return StreamClock(device) if device.type == "cuda" else HOST
