"""`MemoryUse`: what each module leaves in memory and needs while it runs, on the CPU and on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch

from shared_hooks.errors import InputMismatch
from shared_hooks.metrics import Allocated, CudaMemory, Reading, Track
from shared_hooks.metrics.sampler import sampler
from shared_hooks.observers.base import Observer, Record
from shared_hooks.observers.deferred import Deferred
from shared_hooks.observers.values import parts
from shared_hooks.observers.watching import ObservedCall

Order = Literal["growth", "peak", "allocated", "output_bytes", "own_bytes"]
ORDERS = ("growth", "peak", "allocated", "output_bytes", "own_bytes")

CPU = "resident set of the process"
CUDA = "torch's CUDA allocator"
ELSEWHERE = Reading.unavailable("the module began on the other side of the cut")
NOTHING = torch.empty(0)


@dataclass(frozen=True)
class Memory(Record):
    """Bytes, for one call of a module. Readings are of the whole process on the CPU, of torch's allocator on CUDA.

    ``allocated``: held when it was done. ``growth``: that less what was held before. ``peak``: the most while it ran.
    ``output_bytes``: of the tensors it gave. ``own_bytes``: of its parameters and buffers, its children's too.
    """

    device: str
    allocated: Reading
    growth: Reading
    peak: Reading
    output_bytes: int
    own_bytes: int


class MemoryUse(Observer):
    """One `Memory` for each call. On the CPU the peak comes from samples in the background, if there are any."""

    surrounds = True

    def __init__(self, targets: Any = None, every_n: int = 1, max_records: int = 1000, **more: Any) -> None:
        super().__init__(targets, every_n, max_records, **more)
        self._process = psutil.Process()

    def around(
        self, call: ObservedCall, name: str, step: int, add: Callable[[Any], None]
    ) -> AbstractContextManager[Any] | None:
        sampler.touch()
        if call.began:
            call.memo[self] = (time.perf_counter_ns(), self._resident(), _cuda(_device(call)))
        return None

    def observe(self, call: ObservedCall, name: str, step: int) -> Deferred:
        stop, resident, device = time.perf_counter_ns(), self._resident(), _device(call)
        start, resident_before, cuda_before = call.memo.get(self, (stop, None, None))
        outputs = {_memory_of(tensor): _bytes(tensor) for _, tensor in parts(call.output)}
        own = sum(_bytes(tensor) for tensor in (*call.module.parameters(), *call.module.buffers()))
        cuda = _cuda(device)

        def make(_: torch.Tensor) -> Memory:
            if cuda is not None:
                readings = _on_cuda(cuda_before, cuda)
            else:
                track = sampler.window(start).resident
                readings = _on_cpu(resident_before, resident, track, start, stop)
            return Memory(name, step, str(device), *readings, sum(outputs.values()), own)

        return Deferred(NOTHING, make)  # at the end of the forward, when there are samples from after it

    def top(self, count: int = 10, by: Order = "growth") -> list[Memory]:
        """The top consumers: of each module its greatest record, the greatest first."""
        if by not in ORDERS:
            raise InputMismatch(f"by is one of {', '.join(ORDERS)}, not {by!r}")
        most: dict[str, Memory] = {}
        for record in self.records:
            if _number(record, by) > (_number(most[record.name], by) if record.name in most else float("-inf")):
                most[record.name] = record
        return sorted(most.values(), key=lambda record: _number(record, by), reverse=True)[:count]

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)


def _number(record: Memory, by: str) -> float:
    value = getattr(record, by)
    if isinstance(value, Reading):
        return float("-inf") if value.value is None else value.value
    return float(value)


def _device(call: ObservedCall) -> torch.device:
    for value in (call.output, call.args, call.kwargs, list(call.module.parameters())):
        for _, tensor in parts(value):
            return tensor.device
    return torch.device("cpu")


def _memory_of(tensor: torch.Tensor) -> int:
    """The same for tensors that share memory; sparse ones have no storage to tell by."""
    return id(tensor) if tensor.layout is not torch.strided else tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _cuda(device: torch.device) -> Allocated | None:
    return CudaMemory(device)() if device.type == "cuda" else None


def _on_cuda(before: Allocated | None, after: Allocated) -> tuple[Reading, Reading, Reading]:
    held = Reading.measured(float(after.held), CUDA)
    if before is None:
        return held, ELSEWHERE, ELSEWHERE
    growth = Reading.measured(float(after.held - before.held), CUDA)
    if after.peak > before.peak:
        return held, growth, Reading.measured(float(after.peak), CUDA)
    least = float(max(before.held, after.held))
    return held, growth, Reading.estimated(least, f"at least: held before or after; {CUDA} set no new peak")


def _on_cpu(
    before: int | None, after: int, track: Track | Reading, start: int, stop: int
) -> tuple[Reading, Reading, Reading]:
    held = Reading.measured(float(after), CPU)
    if before is None:
        return held, ELSEWHERE, ELSEWHERE
    growth = Reading.measured(float(after - before), CPU)
    sampled = track if isinstance(track, Reading) else track.peak(start, stop)
    ends = float(max(before, after))
    if sampled.value is not None and sampled.value > ends:
        return held, growth, sampled
    return held, growth, Reading.estimated(ends, f"at least: {CPU} before or after")
