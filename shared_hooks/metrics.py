"""What is measured of every layer call of a forward."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from shared_hooks.trees import tensors_in


@dataclass(frozen=True)
class LayerMetrics:
    """One layer call. ``inference_ns``: nanoseconds from before its forward to after it; ``output_bytes``: raw size."""

    layer_id: int
    name: str
    layer_type: str
    inference_ns: int
    output_bytes: int

    @property
    def inference_time(self) -> float:
        """Seconds."""
        return self.inference_ns / 1e9

    def as_dict(self) -> dict[str, Any]:
        return {
            "layer_id": self.layer_id,
            "name": self.name,
            "layer_type": self.layer_type,
            "inference_time": self.inference_time,
            "output_bytes": self.output_bytes,
        }


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
