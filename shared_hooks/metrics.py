"""What is measured of every layer call of a forward."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from shared_hooks.reading import Reading
from shared_hooks.trees import tensors_in


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Of one tensor: ``dtype`` as torch prints it, without "torch."."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}"


NOT_SAMPLED = Reading.unavailable("not sampled")


@dataclass(frozen=True)
class LayerMetrics:
    """One layer call. Times in nanoseconds, sizes in bytes; a `Reading` says how it was come by.

    ``inference_ns``: from before its forward to after it. ``cpu_ns``: processor time spent meanwhile. ``energy`` in
    joules, ``mean_power`` in watts. ``memory_allocated``: bytes held when it was done; ``memory_peak``: the most while
    it ran. Utilisations in per cent, of all processors (``cpu``), of the GPU, of the memory of this machine.
    """

    layer_id: int
    name: str
    layer_type: str
    inference_ns: int
    output_bytes: int
    outputs: tuple[TensorShape, ...] = ()
    cpu_ns: int | None = None
    energy: Reading = NOT_SAMPLED
    mean_power: Reading = NOT_SAMPLED
    memory_allocated: Reading = NOT_SAMPLED
    memory_peak: Reading = NOT_SAMPLED
    cpu_utilisation: Reading = NOT_SAMPLED
    gpu_utilisation: Reading = NOT_SAMPLED
    memory_utilisation: Reading = NOT_SAMPLED

    @property
    def inference_time(self) -> float:
        """Seconds."""
        return self.inference_ns / 1e9

    def as_dict(self) -> dict[str, Any]:
        readings = {
            name: getattr(self, name).as_dict()
            for name in (
                "energy",
                "mean_power",
                "memory_allocated",
                "memory_peak",
                "cpu_utilisation",
                "gpu_utilisation",
                "memory_utilisation",
            )
        }
        return {
            "layer_id": self.layer_id,
            "name": self.name,
            "layer_type": self.layer_type,
            "inference_time": self.inference_time,
            "output_bytes": self.output_bytes,
            "outputs": [str(output) for output in self.outputs],
            "cpu_time": None if self.cpu_ns is None else self.cpu_ns / 1e9,
            **readings,
        }


@dataclass(frozen=True)
class ForwardMetrics:
    """A forward as a whole: what its layers add up to, and what lies outside them. ``layers + outside == total``."""

    total_ns: int
    layers_ns: int
    cpu_ns: int | None = None
    energy: Reading = NOT_SAMPLED
    mean_power: Reading = NOT_SAMPLED
    memory_peak: Reading = NOT_SAMPLED

    @property
    def outside_ns(self) -> int:
        """Nanoseconds in no layer: functional code, Python between the layers, replay and banking at a cut."""
        return self.total_ns - self.layers_ns


class HostClock:
    """Marks are readings of the performance counter."""

    def mark(self) -> Any:
        return time.perf_counter_ns()

    def between(self, start: Any, stop: Any) -> int:
        return int(stop - start)


class StreamClock:
    """Marks are events on the current CUDA stream, read after the forward: no layer waits for the device."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> int:
        stop.synchronize()
        return int(start.elapsed_time(stop) * 1e6)


def clock_for(device: torch.device) -> HostClock | StreamClock:
    """The clock that sees the work of a device."""
    return StreamClock() if device.type == "cuda" else HostClock()


def output_bytes(output: Any) -> int:
    """Bytes of all tensors of an output."""
    if isinstance(output, torch.Tensor):
        return int(output.numel()) * output.itemsize
    return sum(int(tensor.numel()) * tensor.itemsize for tensor in tensors_in(output))
