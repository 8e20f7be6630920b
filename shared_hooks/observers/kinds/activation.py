"""Compute statistics of each module's output, on the device, read once per forward."""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from shared_hooks import devices
from shared_hooks.errors import InputMismatch
from shared_hooks.forward import UNSEEN
from shared_hooks.modules import running
from shared_hooks.observers.base import Attachment, Observer, Record
from shared_hooks.observers.watching import BackwardHooks, Deferred, Gradients, ObservedCall, Pass, copy_of, parts, read
from shared_hooks.wrapped import WrappedModel


@dataclass(frozen=True)
class Activation(Record):
    """Statistics of one tensor of a module's output.

    ``part``: its path in a nested output, ``""`` if the output is one tensor. ``mean``, ``std`` (unbiased; 0 for one
    element), ``min``, ``max`` are NaN if an element is NaN, and for no elements; for complex values they describe the
    magnitudes. ``sparsity``: share of elements that are 0. ``nonfinite``: number of NaN and Inf. ``histogram``: counts
    of the finite elements in equal bins from their minimum ``low`` to their maximum ``high``.
    """

    part: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    mean: float
    std: float
    min: float
    max: float
    sparsity: float
    nonfinite: int
    histogram: tuple[int, ...]
    low: float
    high: float


class ActivationStats(Observer):
    """Records one `Activation` for each tensor of each output. ``bins``: of the histogram; 0 for none."""

    def __init__(self, targets: Any = None, every_n: int = 1, max_records: int = 1000, bins: int = 10, **more: Any):
        super().__init__(targets, every_n, max_records, **more)
        if isinstance(bins, bool) or not isinstance(bins, int) or not 0 <= bins <= 4096:
            raise InputMismatch(f"bins is a number from 0 to 4096, not {bins!r}")
        self.bins = bins

    def observe(self, call: ObservedCall, name: str, step: int) -> list[Deferred]:
        found = []
        for part, tensor in parts(call.output):
            if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
                continue
            # several observers of one module share the work
            key = (ActivationStats, self.bins, part)
            values = call.memo.get(key)
            if values is None:
                values = call.memo[key] = statistics(tensor, self.bins)
            found.append(Deferred(values, Maker(Activation, name, step, part, tensor)))
        return found


class Maker:
    """Makes the record without keeping the tensor. ``kind`` makes an `Activation` of its fields."""

    __slots__ = ("device", "dtype", "kind", "name", "numel", "part", "shape", "step")

    def __init__(self, kind: Callable[..., Activation], name: str, step: int, part: str, tensor: torch.Tensor) -> None:
        self.kind = kind
        self.name, self.step, self.part = name, step, part
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.numel = tensor.numel()

    def __call__(self, values: torch.Tensor) -> Activation:
        mean, std, least, most, zeros, nonfinite, low, high, *counts = values.tolist()
        return self.kind(
            self.name,
            self.step,
            self.part,
            tuple(self.shape),
            str(self.dtype).removeprefix("torch."),
            str(self.device),
            mean,
            std,
            least,
            most,
            zeros / self.numel if self.numel else math.nan,
            int(nonfinite),
            tuple(map(int, counts)),
            low,
            high,
        )


def statistics(tensor: torch.Tensor, bins: int) -> torch.Tensor:
    """Return [mean, std, min, max, zeros, non-finite, low, high, *counts] of ``tensor``, flat, float64, on its device.

    Half precision is accumulated in float32, integers in float64 (float32 on devices without it).
    """
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    x = tensor.detach()
    if x.is_complex():
        x = x.abs()
    if not x.is_floating_point():
        x = x.to(wide)
    elif x.dtype.itemsize < 4:
        x = x.float()
    x = x.reshape(-1) if x.is_contiguous() else x.contiguous().reshape(-1)
    if x.numel() == 0:
        return torch.tensor([math.nan] * 4 + [0.0, 0.0] + [math.nan] * 2 + [0.0] * bins, dtype=wide, device=x.device)
    if x.device.type == "cpu" and (found := _finite_on_cpu(x, bins)) is not None:
        return found
    good = torch.isfinite(x)
    low, high = torch.where(good, x, math.inf).amin(), torch.where(good, x, -math.inf).amax()
    std = x.std() if x.numel() > 1 else torch.zeros_like(low)
    row = torch.stack(
        [one.to(wide) for one in (x.mean(), std, *x.aminmax(), (x == 0).sum(), x.numel() - good.sum(), low, high)]
    )
    return torch.cat((row, histogram(torch.where(good, x, math.nan), low, high, bins).to(wide))) if bins else row


MOST_EDGES = 32
"""Maximum number of edges for which comparing with each edge is faster than computing the bin of each element."""


TINY = 1e-15
"""A deviation whose squares may underflow in 32 bits."""


def _finite_on_cpu(x: torch.Tensor, bins: int) -> torch.Tensor | None:
    """Return the same for finite elements on the CPU, where reading a number is free, in a sixth of the time."""
    least, most = (one.item() for one in x.aminmax())
    if not math.isfinite(most - least):
        return None
    mean = x.mean()
    std = torch.linalg.vector_norm(x - mean).item() / math.sqrt(x.numel() - 1) if x.numel() > 1 else 0.0
    if not math.isfinite(std) or (std < TINY and most > least):  # the squares overflowed or vanished in this dtype
        return None
    array = x.numpy()
    edges = np.linspace(least, most, bins + 1, dtype=array.dtype)
    if most <= least or bins > MOST_EDGES:
        counts = histogram(x, x.new_tensor(least), x.new_tensor(most), bins).tolist() if bins else []
    else:
        below = [np.count_nonzero(array < edge) for edge in edges[1:-1]]
        counts = np.diff([0, *below, x.numel()]).tolist() if bins else []
    zeros = np.count_nonzero(array == 0)
    return torch.tensor([mean.item(), std, least, most, zeros, 0, least, most, *counts], dtype=torch.float64)


def histogram(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bins: int) -> torch.Tensor:
    """Return counts of a flat tensor in ``bins`` equal bins from ``low`` to ``high``, the last one closed; without NaN.

    Does not synchronise with the device.
    """
    width = torch.where(high > low, high - low, 1)
    place = ((x - low) / width * bins).clamp(0, bins - 1)
    # NaN goes to a bin of its own, which is left out
    place = torch.where(torch.isnan(x), bins, torch.nan_to_num(place)).long()
    return torch.zeros(bins + 1, dtype=torch.int64, device=x.device).scatter_add_(0, place, torch.ones_like(place))[:-1]


# `Custom`: calls your own function for modules. It gets copies, and cannot do harm by raising, blocking or returning.


Function = Callable[[nn.Module, tuple[Any, ...], Any, str], Any]


@dataclass(frozen=True)
class Seen(Record):
    """Record of a `Custom` observer. ``value``: what the function returned."""

    value: Any


class Custom(Observer):
    """Records one `Seen` for each call for which ``function(module, inputs, output, name)`` returns a value.

    ``inputs``: the positional arguments, followed by the dictionary of keyword arguments if there are any; as they are
    after the call, as in PyTorch's hooks. Tensors are copies (``copy=False``: the live ones, which must not be written
    to); values on the other side of a cut are None. Random numbers drawn by the function do not change those of the
    model.

    The function runs in a thread of its own. If it takes longer than ``timeout`` seconds, it is abandoned and the
    observer is disabled. ``timeout=None``: in the model's thread, without a limit.
    """

    def __init__(
        self,
        function: Function,
        targets: Any = None,
        every_n: int = 1,
        max_records: int = 1000,
        copy: bool = True,
        timeout: float | None = 10.0,
        **more: Any,
    ) -> None:
        super().__init__(targets, every_n, max_records, **more)
        if not callable(function):
            raise InputMismatch(f"function is called with (module, inputs, output, name); {function!r} is no function")
        if timeout is not None and not timeout > 0:
            raise InputMismatch(f"timeout is None or seconds, not {timeout!r}")
        self.function = function
        self.copy = copy
        self.timeout = timeout
        self.switched_off = False
        self._worker = FunctionThread()

    def observe(self, call: ObservedCall, name: str, step: int) -> Seen | None:
        if self.switched_off:
            return None
        inputs, output = (*call.args, call.kwargs) if call.kwargs else call.args, call.output
        device = next((tensor.device for _, tensor in parts(output)), torch.device("cpu"))
        inputs = tuple(map(copy_of, inputs)) if self.copy else inputs
        output = copy_of(output) if self.copy else output
        with devices.forked(device):
            try:
                value = self._worker.run(lambda: self.function(call.module, inputs, output, name), self.timeout, device)
            except Blocked as error:
                self.switched_off = True
                self.notes = (*self.notes, f"switched off: {error}")
                raise
        return None if value is None else Seen(name, step, value)

    def detached(self, root: nn.Module) -> None:
        self._worker.end()


class Blocked(Exception):
    """A function did not return in time."""


class FunctionThread:
    """A thread that runs one function at a time, with a timeout."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def run(self, function: Callable[[], Any], timeout: float | None, device: torch.device) -> Any:
        """Return what the function returns, or raise what it raises; raises `Blocked` after ``timeout`` seconds."""
        if timeout is None:
            return function()
        done = threading.Event()
        found: list[Any] = []
        stream = devices.current_stream(device)

        def job() -> None:
            running.set(UNSEEN)
            try:
                with torch.no_grad(), devices.on_stream(stream, device):
                    found.append((function(), None))
            except BaseException as error:
                found.append((None, error))
            done.set()

        with self._lock:
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                threading.Thread(target=_work, args=(self._jobs,), name="isthmus-observer", daemon=True).start()
            self._jobs.put(job)
        if not done.wait(timeout):
            self.end()
            raise Blocked(f"the function took longer than {timeout:g} s")
        value, error = found[0]
        if isinstance(error, Exception):
            raise error
        if error is not None:
            raise RuntimeError(f"the function raised {type(error).__name__}: {error}") from error
        return value

    def end(self) -> None:
        """End the thread after the jobs it has. A later `run` starts another."""
        with self._lock:
            jobs, self._jobs = self._jobs, None
        if jobs is not None:
            jobs.put(None)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


# `GradientStats`: the gradients of each module in training. For models of this process that run with gradients.
#
# By default the gradients by a module's outputs, taken by hooks on the output tensors, which no model notices.
# PyTorch's full backward hooks give those by its inputs, too, but pass views of its values to the model's own code:
# code that changes such a value in place (``nn.ReLU(inplace=True)``, ``x += y``) then fails. So they are an option.


Side = Literal["input", "output"]


@dataclass(frozen=True)
class Gradient(Activation):
    """Statistics of the loss gradient by a tensor of a module's input or output (``of``); ``step`` is the forward's."""

    of: Side = "output"

    @property
    def norm(self) -> float:
        """Euclidean norm, from mean and deviation."""
        count = math.prod(self.shape)
        return math.sqrt(max(0.0, (count - 1) * self.std**2 + count * self.mean**2)) if count else 0.0


class GradientStats(Observer):
    """Records one `Gradient` for each output tensor that receives a gradient.

    ``full``: with full backward hooks, for each positional input, too; for modules that return a tensor or a tuple of
    them, none of which is changed in place. Numbers stay on the device until `records` is read; at most ``max_records``
    of them.
    """

    def __init__(
        self,
        targets: Any = None,
        every_n: int = 1,
        max_records: int = 1000,
        bins: int = 10,
        full: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(targets, every_n, max_records, **more)
        self.bins = bins
        self.full = full
        self._waiting: deque[Deferred] = deque()
        self._handles: list[Any] = []
        self._hooks: list[tuple[nn.Module, BackwardHooks]] = []

    def attach(self, model: nn.Module | WrappedModel, *, this_thread: bool = False) -> Attachment:
        if isinstance(model, WrappedModel):
            raise InputMismatch("a WrappedModel runs without gradients: attach to the module itself")
        return super().attach(model, this_thread=this_thread)

    def _attachment(self, root: nn.Module, modules: dict[nn.Module, str], owner: Any, thread: int | None) -> Attachment:
        made = super()._attachment(root, modules, owner, thread)
        if self.full:
            try:
                self._hooks.append((root, BackwardHooks(modules, self._on_gradients)))
            except BaseException:
                made.detach()
                raise
        return made

    def observe(self, call: ObservedCall, name: str, step: int) -> None:
        if self.full:
            self._look(call, name, step)
            return
        for part, tensor in parts(call.output):
            if tensor.requires_grad:
                self._handles.append(
                    tensor.register_hook(lambda grad, part=part: self._grad(grad, name, step, part, "output"))
                )

    def _look(self, call: ObservedCall, name: str, step: int) -> None:
        output = call.output
        if not any(isinstance(one, torch.Tensor) for one in (output if isinstance(output, tuple) else (output,))):
            why = f"full backward hooks do not see into {type(output).__name__}"
            if not any(note.startswith(why) for note in self.notes):
                self.notes = (*self.notes, f"{why} (first: {name})")
            return
        for _, hooks in self._hooks:
            if hooks.looked_at(call.module, name, step, len(call.args) == 1, isinstance(output, torch.Tensor)):
                return

    def _on_gradients(self, found: Pass, by_input: Gradients, by_output: Gradients) -> None:
        sides: tuple[tuple[Side, Gradients, bool], ...] = (
            ("input", by_input, found.one_input),
            ("output", by_output, found.one_output),
        )
        for of, grads, alone in sides:
            for place, grad in enumerate(grads):
                if grad is not None:
                    self._grad(grad, found.name, found.step, "" if alone else str(place), of)

    def _grad(self, grad: torch.Tensor, name: str, step: int, part: str, of: Side) -> None:
        try:
            with torch.no_grad():
                values = statistics(grad, self.bins)
            self._waiting.append(Deferred(values, Maker(partial(Gradient, of=of), name, step, part, grad)))
            while len(self._waiting) > self.max_records:
                self._waiting.popleft()
                self.dropped += 1
        except Exception as error:
            self.failed(error, name)

    def forward_done(self, records: list[Any], step: int) -> None:
        # a handle holds its tensor's hooks weakly: dead ones need no removal
        self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]

    @property
    def records(self) -> list[Any]:
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        found = read(waiting)
        self.keep([one.make(found(one)) for one in waiting])
        return super().records

    def detached(self, root: nn.Module) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        mine = next((pair for pair in self._hooks if pair[0] is root), None)
        if mine is not None:
            self._hooks.remove(mine)
            mine[1].remove()
