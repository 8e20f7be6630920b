"""Record each module's memory, non-finite outputs, and the most likely tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
from torch import nn

from shared_hooks import devices
from shared_hooks.devices import Allocated
from shared_hooks.errors import InputMismatch, IsthmusError
from shared_hooks.metrics import Reading, Track
from shared_hooks.metrics.sampler import sampler
from shared_hooks.modules import ROOT
from shared_hooks.observers.base import Observer, Record
from shared_hooks.observers.thumbnails import Texts
from shared_hooks.observers.watching import Deferred, ObservedCall, is_real, parts

Order = Literal["growth", "peak", "allocated", "output_bytes", "own_bytes"]
ORDERS = ("growth", "peak", "allocated", "output_bytes", "own_bytes")

CPU = "resident set of the process"
CUDA = "torch's CUDA allocator"
ELSEWHERE = Reading.unavailable("the module began on the other side of the cut")
NOTHING = torch.empty(0)


@dataclass(frozen=True)
class Memory(Record):
    """Bytes for one call of a module. Readings cover the whole process on the CPU, torch's allocator on CUDA.

    ``allocated``: held at its end. ``growth``: the difference to its start. ``peak``: the maximum during the call.
    ``output_bytes``: of the output tensors. ``own_bytes``: of its parameters and buffers, including its children's.
    """

    device: str
    allocated: Reading
    growth: Reading
    peak: Reading
    output_bytes: int
    own_bytes: int


class MemoryUse(Observer):
    """Records one `Memory` for each call. On the CPU the peak comes from background samples, if there are any."""

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
        """Return the top consumers: each module's largest record, largest first."""
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
    """Return a key that tensors sharing memory have in common; sparse ones have no storage."""
    return id(tensor) if tensor.layout is not torch.strided else tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _cuda(device: torch.device) -> Allocated | None:
    return devices.allocated(device) if devices.counts_memory(device) else None


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


# `NonFiniteGuard`: finds where NaN and Inf first appear, and acts on it.


log = logging.getLogger(__name__)


class NonFiniteFound(IsthmusError):
    """A module's output contains NaN or Inf; ``records`` are the `NonFinite` of that forward, in order."""

    status = "OUT_OF_RANGE"

    def __init__(self, message: str, records: tuple[NonFinite, ...] = ()) -> None:
        super().__init__(message)
        self.records = records


@dataclass(frozen=True)
class NonFinite(Record):
    """One tensor with NaN or Inf. ``where``: the index of the first; ``part``: its path in a nested output."""

    part: str
    shape: tuple[int, ...]
    nan: int
    inf: int
    where: tuple[int, ...]

    def __str__(self) -> str:
        place = f"{self.name}[{self.part}]" if self.part else self.name
        return f"{place} gave {self.nan} NaN and {self.inf} Inf, the first at {self.where} of {self.shape}"


class NonFiniteGuard(Observer):
    """Records one `NonFinite` for each output tensor with NaN or Inf, in the order of calls.

    ``action``: ``"report"`` logs the first of a forward; ``"raise"`` raises `NonFiniteFound` at the end of that
    forward; a callable gets the forward's records, and if it raises an error of Isthmus, so does the forward. The
    device is read once per forward.
    """

    def __init__(
        self,
        targets: Any = None,
        every_n: int = 1,
        max_records: int = 1000,
        action: str | Callable[[list[NonFinite]], Any] = "report",
        **more: Any,
    ) -> None:
        super().__init__(targets, every_n, max_records, **more)
        if action not in ("report", "raise") and not callable(action):
            raise InputMismatch(f'action is "report", "raise" or a function, not {action!r}')
        self.action = action
        self.total = 0
        """Non-finite elements so far."""

    @property
    def first(self) -> NonFinite | None:
        """The first occurrence among the records kept."""
        return next(iter(self.records), None)

    def observe(self, call: ObservedCall, name: str, step: int) -> list[Deferred]:
        found = []
        for part, tensor in parts(call.output):
            if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided:
                continue
            if tensor.is_nested or tensor.numel() == 0:
                continue
            key = (NonFiniteGuard, part)
            values = call.memo.get(key)
            if values is None:
                values = call.memo[key] = count(tensor)
            found.append(Deferred(values, _Maker(name, step, part, tuple(tensor.shape))))
        return found

    def forward_done(self, records: list[NonFinite], step: int) -> None:
        if not records:
            return
        self.total += sum(record.nan + record.inf for record in records)
        if callable(self.action):
            self.action(records)
            return
        more = f" (and {len(records) - 1} more after it)" if len(records) > 1 else ""
        if self.action == "raise":
            raise NonFiniteFound(f"step {step}: {records[0]}{more}", tuple(records))
        log.warning("step %d: %s%s", step, records[0], more)


class _Maker:
    __slots__ = ("name", "part", "shape", "step")

    def __init__(self, name: str, step: int, part: str, shape: tuple[int, ...]) -> None:
        self.name, self.step, self.part, self.shape = name, step, part, shape

    def __call__(self, values: torch.Tensor) -> NonFinite | None:
        nan, inf, first = map(int, values.tolist())
        if not nan and not inf:
            return None
        where = []
        for size in reversed(self.shape):
            where.append(first % size)
            first //= size
        return NonFinite(self.name, self.step, self.part, self.shape, nan, inf, tuple(reversed(where)))


def count(tensor: torch.Tensor) -> torch.Tensor:
    """Return [NaN, Inf, flat index of the first], int64, on the tensor's device. A complex element counts once."""
    x = tensor.detach()
    if x.dtype.itemsize == 1:
        x = x.float()  # eight-bit numbers cannot be summed
    # on the CPU the common case, all finite, is checked faster: sums of finite numbers may overflow, so it is only a
    # sieve
    if x.device.type == "cpu" and bool(torch.isfinite(x.sum())):
        return torch.zeros(3, dtype=torch.int64)
    nan = torch.isnan(x)
    bad = torch.isfinite(x).logical_not_()
    return torch.stack((nan.sum(), bad.sum() - nan.sum(), bad.reshape(-1).to(torch.uint8).argmax()))


# `TopTokens`: the likeliest next tokens at every step of ``transformers``' ``generate()``.


@dataclass(frozen=True)
class Tokens(Record):
    """The k most likely next tokens for one row of a batch, most likely first.

    ``text``: each decoded by itself; empty without a tokenizer, or if it cannot decode one of them. ``probabilities``:
    softmax of the model's logits, before temperature and other processing.
    """

    row: int
    ids: tuple[int, ...]
    logits: tuple[float, ...]
    probabilities: tuple[float, ...]
    text: tuple[str, ...]


class TopTokens(Observer):
    """Records one `Tokens` for each step and row. ``tokenizer``: has ``decode([id])`` or
    ``convert_ids_to_tokens([id])``.

    Reads the model's own output (``.logits``, ``["logits"]``, or a tensor of shape (..., vocabulary)) unless
    ``targets`` names a module that returns logits. In a split model the logits are on the tail's side.
    """

    def __init__(
        self,
        targets: Any = None,
        every_n: int = 1,
        max_records: int = 1000,
        k: int = 5,
        tokenizer: Any = None,
        **more: Any,
    ) -> None:
        super().__init__(targets, every_n, max_records, **more)
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise InputMismatch(f"k is a number from 1 up, not {k!r}")
        self.k = k
        self._texts = None if tokenizer is None else Texts(tokenizer)

    def default_targets(self, model: nn.Module) -> dict[nn.Module, str]:
        return {model: ROOT}

    def observe(self, call: ObservedCall, name: str, step: int) -> Deferred | None:
        logits = logits_in(call.output)
        if logits is None:
            return None
        last = (logits[:, -1] if logits.dim() == 3 else logits.reshape(-1, logits.shape[-1])).float()
        top = last.topk(min(self.k, last.shape[-1]))
        shares = (top.values - last.logsumexp(-1, keepdim=True)).exp()
        # ids are exact in float64
        wide = torch.float32 if last.device.type == "mps" else torch.float64
        values = torch.stack([top.indices.to(wide), top.values.to(wide), shares.to(wide)])
        shape = values.shape

        def make(values: torch.Tensor) -> list[Tokens]:
            ids, logits, probabilities = values.reshape(shape).tolist()
            return [
                self._record(name, step, row, *columns)
                for row, columns in enumerate(zip(ids, logits, probabilities, strict=True))
            ]

        return Deferred(values.reshape(-1), make)

    def _record(
        self, name: str, step: int, row: int, ids: list[float], logits: list[float], shares: list[float]
    ) -> Tokens:
        numbers = tuple(map(int, ids))
        text, why = ((), "") if self._texts is None else self._texts.of(numbers)
        if why and not any(note.startswith("the tokenizer") for note in self.notes):
            self.notes = (*self.notes, why)
        return Tokens(name, step, row, numbers, tuple(logits), tuple(shares), text)


def logits_in(output: Any) -> torch.Tensor | None:
    """Return the logits in a model's output; None if there are none."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if found is None:
        found = output[0] if isinstance(output, (tuple, list)) and output else output
    if not is_real(found) or not found.is_floating_point() or found.dim() < 1 or found.numel() == 0:
        return None
    logits: torch.Tensor = found
    return logits
