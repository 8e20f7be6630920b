"""Turn the marks of one forward into records. Only marks are taken while the model runs."""

from __future__ import annotations

import functools
import math
import time
from functools import partial
from typing import Any

import torch

from shared_hooks import devices
from shared_hooks.devices import Allocated
from shared_hooks.metrics.energy import Gpu
from shared_hooks.metrics.records import (
    CACHED_LAYERS,
    ForwardMetrics,
    LayerColumns,
    LayerReadings,
    LayerTable,
    Reading,
    TensorShape,
    outputs_of,
)
from shared_hooks.metrics.sampler import Levels, SampleWindow, Track, sampler
from shared_hooks.modules import ModuleInfo, call_name

# The clocks of layers: the host's, and the events of a CUDA stream.


class HostClock:
    """Marks with the performance counter."""

    mark = staticmethod(time.perf_counter_ns)

    def settle(self, began: Any, ended: Any) -> None:
        """Do nothing: host marks are complete at once."""

    at = staticmethod(int)
    """Returns nanoseconds of `time.perf_counter_ns`."""


class StreamClock:
    """Marks with events on a device's current stream, read after the forward, so no layer waits for the device.

    `settle` waits once, for the last mark, and aligns the events with the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: Any = None
        self._zero = 0

    def mark(self) -> Any:
        event = devices.new_event(self._device, timing=True)
        event.record(devices.current_stream(self._device))
        return event

    def settle(self, began: Any, ended: Any) -> None:
        """Wait until the device has passed ``ended``; times are counted from ``began``."""
        ended.synchronize()
        self._began = began
        self._zero = 0
        self._zero = time.perf_counter_ns() - self.at(ended)

    def at(self, mark: Any) -> int:
        """Return nanoseconds of `time.perf_counter_ns` at which the device passed the mark. Differences are the
        device's.
        """
        return self._zero + int(self._began.elapsed_time(mark) * 1e6)


Clock = HostClock | StreamClock


HOST = HostClock()
"""A shared, stateless host clock."""


def clock_for(device: torch.device) -> Clock:
    """Return the clock that times a device's work."""
    return HOST if device.type in devices.HOST or not devices.has_timers(device) else StreamClock(device)


Outputs = tuple[tuple[torch.Size, torch.dtype], ...]
Marks = tuple[Any, Any, Allocated | None, int, int, int, ModuleInfo, int, Outputs]
"""Marks of one layer: started, stopped (marks of a `clock_for`), memory at the end, processor time at start and end,
layer id, module, number of the module's call, outputs. A tuple, which only `Measurement` packs and unpacks: a class
with names would cost each layer three times as much.
"""


class Measurement:
    """Measures one forward, from construction on; ``device`` is the model's.

    A session takes `mark` and `cpu` before each layer, and passes them to `add` after it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gpu = gpu_of(device)
        sampler.touch(self.gpu)
        self.clock = clock_for(device)
        self.mark = self.clock.mark
        # one computing thread: its own time; several: the process's, because threads cannot be attributed
        self.cpu = time.thread_time_ns if torch.get_num_threads() == 1 else time.process_time_ns
        counts = device.type not in devices.HOST and devices.counts_memory(device)
        self._memory = partial(devices.allocated, device) if counts else None
        self._layers: list[Marks] = []
        self._memory_before = None if self._memory is None else self._memory()
        self._cpu_began = self._cpu_ended = self.cpu()
        self._began = self.mark()
        self._ended: Any = None

    def add(self, layer_id: int, info: ModuleInfo, call: int, started: Any, cpu_started: int, output: Any) -> None:
        """Record a finished layer; ``call`` is the number of its module's call. Runs in the forward, so it
        does little.
        """
        stopped = self.mark()
        memory = None if self._memory is None else self._memory()
        cpu_stopped = self.cpu()
        # one tensor is the common case, and a saved call is measurable
        outputs = ((output.shape, output.dtype),) if isinstance(output, torch.Tensor) else outputs_of(output)
        self._layers.append((started, stopped, memory, cpu_started, cpu_stopped, layer_id, info, call, outputs))

    def end(self) -> None:
        """End the measurement. On a GPU this waits for the device, once."""
        self._ended = self.mark()
        self._cpu_ended = self.cpu()
        self.clock.settle(self._began, self._ended)

    def records(self) -> tuple[LayerColumns, ForwardMetrics]:
        """Return the finished layers, in order, and the forward as a whole."""
        window = self._window()
        return self.layers(window), self.forward_metrics(window)

    def _window(self) -> SampleWindow:
        return sampler.window(self.clock.at(self._began), self.gpu)

    def layers(self, window: SampleWindow | None = None) -> LayerColumns:
        """Return the finished layers, in order. ``window``: the samples around the forward; None: those until now."""
        marks = self._layers
        at = self.clock.at
        window = window or self._window()
        spans = [(one[0], one[1]) for one in marks]
        if self.clock is not HOST:
            spans = [(at(started), at(stopped)) for started, stopped in spans]
        no_power = (window.energy, window.energy) if isinstance(window.energy, Reading) else None
        readings: list[LayerReadings] = []
        before = self._memory_before
        levels: Levels | None = None
        known: LayerReadings | None = None
        until = 0
        for (start, stop), (_, _, memory, *_) in zip(spans, marks, strict=True):
            if levels is None or stop > until:  # layers before the next sample share it
                (levels, until), known = window.levels(start, stop), None
            if known is None or no_power is None or memory is not None:
                allocated = levels[:2]
                if memory is not None:
                    allocated = _gpu_memory(before, memory)
                    before = memory
                known = (*(no_power or _energy(window.energy, start, stop)), *allocated, *levels[2:])
            readings.append(known)
        key = tuple([(one[5], one[6].path, one[6].name, one[6].module_type, one[7], one[8]) for one in marks])
        table = (_table if len(marks) <= CACHED_LAYERS else _table.__wrapped__)(key)
        cpu_ns = [one[4] - one[3] for one in marks]
        return LayerColumns(table, [stop - start for start, stop in spans], cpu_ns, readings)

    def forward_metrics(self, window: SampleWindow | None = None) -> ForwardMetrics:
        """Return the forward as a whole; ``window`` as in `layers`."""
        at = self.clock.at
        start, stop = at(self._began), at(self._ended)
        window = window or self._window()
        energy, power = _energy(window.energy, start, stop)
        if self._memory_before is None:
            (_, peak, *_), _ = window.levels(start, stop)
        else:
            seen = [self._memory_before, *(memory for _, _, memory, *_ in self._layers if memory is not None)]
            most = Allocated(max(one.held for one in seen), seen[-1].peak)
            _, peak = _gpu_memory(self._memory_before, most)
        return ForwardMetrics(
            total_ns=stop - start,
            layers_ns=sum([at(marks[1]) - at(marks[0]) for marks in self._layers])
            if self.clock is not HOST
            else sum([marks[1] - marks[0] for marks in self._layers]),
            cpu_ns=self._cpu_ended - self._cpu_began,
            energy=energy,
            mean_power=power,
            memory_peak=peak,
        )


@functools.cache
def gpu_of(device: torch.device) -> Gpu | None:
    """Return the GPU of a torch device; None for the processor."""
    if devices.is_host(device):
        return None
    return Gpu(*devices.uuid_of(device)) if device.type == "cuda" else Gpu(device.index or 0, str(device))


NO_TIME = Reading.unavailable("it took no time")


@functools.lru_cache(32)
def _table(layers: tuple[tuple[int, str, str, str, int, Outputs], ...]) -> LayerTable:
    """Return the table of these layers: (layer id; path, name and type of the module; number of its call; outputs)."""
    shapes = [_shapes(outputs) for *_, outputs in layers]
    return LayerTable(
        tuple(number for number, *_ in layers),
        tuple(name if call == 1 else call_name(path, call) for _, path, name, _, call, _ in layers),
        tuple(kind for _, _, _, kind, *_ in layers),
        tuple(found for _, found in shapes),
        tuple(nbytes for nbytes, _ in shapes),
    )


def _shapes(outputs: Outputs) -> tuple[int, tuple[TensorShape, ...]]:
    """Return the size in bytes of the outputs, and their shapes for a record."""
    known = [_shape(shape, dtype) for shape, dtype in outputs]
    return sum(nbytes for nbytes, _ in known), tuple(shape for _, shape in known)


@functools.lru_cache(4096)
def _shape(shape: torch.Size, dtype: torch.dtype) -> tuple[int, TensorShape]:
    """Return size in bytes and shape of one tensor, so that the cache's entries are bounded: lists of them may
    be long.
    """
    return math.prod(shape) * dtype.itemsize, TensorShape(str(dtype).removeprefix("torch."), tuple(shape))


def _energy(track: Track | Reading, start: int, stop: int) -> tuple[Reading, Reading]:
    if isinstance(track, Reading):
        return track, track
    energy = track.growth(start, stop)
    if energy.value is None:
        return energy, energy
    if stop <= start:
        return energy, NO_TIME
    return energy, Reading(energy.value / (stop - start) * 1e9, energy.status, energy.note)


def _gpu_memory(before: Allocated | None, after: Allocated) -> tuple[Reading, Reading]:
    held = Reading(float(after.held), "measured", "torch's CUDA allocator")
    if before is None or after.peak > before.peak:
        return held, Reading(float(after.peak), "measured", "torch's CUDA allocator")
    # its high-water mark is that of the whole process; resetting it would affect other readers
    return held, Reading(
        float(max(before.held, after.held)),
        "estimated",
        "at least: held before or after; torch's CUDA allocator set no new peak",
    )
