"""Whether several threads of torch cost here more than they gain: forwards with all of them and with one, compared.

torch's threads wait for each other by spinning. Where something else runs on the processor, one of them is put aside,
and the others burn time until it is back: beside one or two busy processes on two cores, forwards with two threads took
10 to 100 times as long as with one. What clocks and counters show then could be a slow model, too; so one thread is
tried.
"""

from __future__ import annotations

import statistics
import time
from typing import Final

import torch

from shared_hooks.profiling.timers import Inputs
from shared_hooks.wrapped import WrappedModel

TRIES: Final = 5
LEAST: Final = 3
"""Made in any case."""
FACTOR: Final = 2.0
"""So many times as long as with one thread, by their medians, is worth a word."""


def warnings_of_threads(wrapped: WrappedModel, inputs: Inputs, pause: float, seconds: float) -> tuple[str, ...]:
    """One line for people where one thread is much faster, else nothing: `TRIES` forwards with either number, fewer
    where they take more than ``seconds``. ``pause``: seconds before each, as before every measurement.

    For the edge alone: the number of threads belongs to the whole process, and a server's other requests need it.
    """
    threads = torch.get_num_threads()
    if threads == 1 or inputs.device.type != "cpu":
        return ()
    took: dict[int, list[int]] = {threads: [], 1: []}
    until = time.monotonic() + seconds
    while len(took[1]) < (TRIES if time.monotonic() < until else LEAST):
        for count, spent in took.items():
            args, kwargs = inputs.fresh()
            time.sleep(pause)
            torch.set_num_threads(count)
            try:
                started = time.perf_counter_ns()
                with torch.no_grad():  # not through `WrappedModel`, which would plan again for other settings
                    wrapped.model(*args, **kwargs)
                spent.append(time.perf_counter_ns() - started)
            finally:
                torch.set_num_threads(threads)
    several, one = (statistics.median(spent) / 1e6 for spent in took.values())
    if several < FACTOR * one:
        return ()
    return (
        f"{threads} threads take {several:.1f} ms for a forward, one takes {one:.1f} ms (torch's threads wait by "
        "spinning, and something else may run on the processor): give --threads 1, in Python ModelChoice(..., "
        "threads=1), on both sides; or set OMP_WAIT_POLICY=passive",
    )
