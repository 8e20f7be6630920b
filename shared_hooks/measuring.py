"""From the marks of one forward to its records. While the model runs only marks are taken; the rest comes after."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import torch

from shared_hooks.clocks import clock_for
from shared_hooks.counters import Window, sampler
from shared_hooks.energy import Gpu
from shared_hooks.hierarchy import ModuleInfo, call_name
from shared_hooks.metrics import ForwardMetrics, LayerMetrics, TensorShape
from shared_hooks.reading import Reading
from shared_hooks.series import Track

Outputs = tuple[tuple[torch.Size, torch.dtype], ...]


class Measurement:
    """One measured forward. It begins when it is made; ``device`` is the model's.

    A session adds to `layers`, for each layer: id, module, number of the call, clock marks before and after, processor
    time before and after, outputs, and GPU memory when it was done.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gpu = gpu_of(device)
        sampler.touch(self.gpu)
        self.clock = clock_for(device)
        self.mark = self.clock.mark
        # one thread computes: its own time; several: nobody knows whose, so the process's
        self.cpu = time.thread_time_ns if torch.get_num_threads() == 1 else time.process_time_ns
        self.memory = None if self.gpu is None else CudaMemory(device)
        self.layers: list[tuple[int, ModuleInfo, int, Any, Any, int, int, Outputs, tuple[int, int] | None]] = []
        self.memory_before = None if self.memory is None else self.memory()
        self._cpu = (self.cpu(), 0)
        self._began = self.mark()
        self._ended: Any = None

    def end(self) -> None:
        """The forward is over. On a GPU this waits for the device, once."""
        self._ended = self.mark()
        self._cpu = (self._cpu[0], self.cpu())
        self.clock.settle(self._began, self._ended)

    def layer_metrics(self) -> list[LayerMetrics]:
        at = self.clock.at
        window = sampler.window(at(self._began), self.gpu)
        found: list[LayerMetrics] = []
        before = self.memory_before
        for number, info, call, started, stopped, cpu_started, cpu_stopped, outputs, memory in self.layers:
            start, stop = at(started), at(stopped)
            held, peak = _gpu_memory(before, memory) if memory is not None else _memory(window, start, stop)
            energy, power = _energy(window, start, stop)
            found.append(
                LayerMetrics(
                    number,
                    call_name(info.path, call),
                    info.module_type,
                    stop - start,
                    sum(math.prod(shape) * dtype.itemsize for shape, dtype in outputs),
                    tuple(_shape(shape, dtype) for shape, dtype in outputs),
                    cpu_stopped - cpu_started,
                    energy,
                    power,
                    held,
                    peak,
                    _mean(window.cpu, start, stop),
                    _mean(window.gpu, start, stop),
                    _mean(window.memory, start, stop),
                )
            )
            before = memory
        return found

    def forward_metrics(self) -> ForwardMetrics:
        at = self.clock.at
        start, stop = at(self._began), at(self._ended)
        window = sampler.window(start, self.gpu)
        energy, power = _energy(window, start, stop)
        if self.memory_before is None:
            peak = _memory(window, start, stop)[1]
        else:
            seen = [self.memory_before, *(memory for *_, memory in self.layers if memory is not None)]
            most = (max(held for held, _ in seen), seen[-1][1])
            peak = _gpu_memory(self.memory_before, most)[1]
        return ForwardMetrics(
            total_ns=stop - start,
            layers_ns=sum(at(layer[4]) - at(layer[3]) for layer in self.layers),
            cpu_ns=self._cpu[1] - self._cpu[0],
            energy=energy,
            mean_power=power,
            memory_peak=peak,
        )


class CudaMemory:
    """Called for (bytes allocated, peak since the process began or somebody reset it), as torch's allocator counts."""

    def __init__(self, device: torch.device) -> None:
        self._index = torch.cuda.current_device() if device.index is None else device.index

    def __call__(self) -> tuple[int, int]:
        # torch.cuda.memory_allocated flattens and sorts some hundred numbers, for one of them
        counts = torch.cuda.memory_stats_as_nested_dict(self._index)["allocated_bytes"]["all"]
        return counts["current"], counts["peak"]


@functools.cache
def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU behind a device of torch; None for the processor."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return Gpu(index, "" if uuid is None else f"GPU-{uuid}")


NO_TIME = Reading.unavailable("it took no time")


@functools.lru_cache(4096)
def _shape(shape: torch.Size, dtype: torch.dtype) -> TensorShape:
    return TensorShape(str(dtype).removeprefix("torch."), tuple(shape))


def _energy(window: Window, start: int, stop: int) -> tuple[Reading, Reading]:
    track = window.energy
    if isinstance(track, Reading):
        return track, track
    energy = track.growth(start, stop)
    if energy.value is None:
        return energy, energy
    if stop <= start:
        return energy, NO_TIME
    return energy, Reading(energy.value / (stop - start) * 1e9, energy.status, energy.note)


def _memory(window: Window, start: int, stop: int) -> tuple[Reading, Reading]:
    track = window.resident
    if isinstance(track, Reading):
        return track, track
    return track.end(start, stop), track.peak(start, stop)


def _mean(track: Track | Reading, start: int, stop: int) -> Reading:
    return track if isinstance(track, Reading) else track.mean(start, stop)


def _gpu_memory(before: tuple[int, int] | None, after: tuple[int, int]) -> tuple[Reading, Reading]:
    held = Reading(float(after[0]), "measured", "torch's CUDA allocator")
    if before is None or after[1] > before[1]:
        return held, Reading(float(after[1]), "measured", "torch's CUDA allocator")
    # its high-water mark is the whole process's; resetting it would take it from whoever else reads it
    return held, Reading(
        float(max(before[0], after[0])),
        "estimated",
        "at least: held before or after; torch's CUDA allocator set no new peak",
    )
