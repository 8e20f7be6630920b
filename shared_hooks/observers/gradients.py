"""`GradientStats`: what comes back through each module in training. For models of this process that run with gradients.

The gradients that PyTorch's full backward hooks call ``grad_output``, taken by hooks on the output tensors: full
backward hooks hand the model's own code views of its values, which it then cannot change in place.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import InputMismatch
from shared_hooks.observers.activation import Activation, Maker, statistics
from shared_hooks.observers.base import Attachment, Observer
from shared_hooks.observers.deferred import Deferred, read
from shared_hooks.observers.values import parts
from shared_hooks.observers.watching import Call
from shared_hooks.wrapped import WrappedModel


@dataclass(frozen=True)
class Gradient(Activation):
    """Of the loss by one tensor that came out of a module; ``step`` is the forward's."""

    @property
    def norm(self) -> float:
        """Euclidean, from mean and deviation."""
        count = math.prod(self.shape)
        return math.sqrt(max(0.0, (count - 1) * self.std**2 + count * self.mean**2)) if count else 0.0


class GradientStats(Observer):
    """One `Gradient` for each tensor of each output through which a gradient comes back.

    Numbers stay on the device until `records` is asked for; at most ``max_records`` wait there.
    """

    def __init__(self, targets: Any = None, every_n: int = 1, max_records: int = 1000, bins: int = 10, **more: Any):
        super().__init__(targets, every_n, max_records, **more)
        self.bins = bins
        self._waiting: deque[Deferred] = deque()
        self._handles: list[Any] = []

    def attach(self, model: nn.Module | WrappedModel, *, this_thread: bool = False) -> Attachment:
        if isinstance(model, WrappedModel):
            raise InputMismatch("a WrappedModel runs without gradients: attach to the module itself")
        return super().attach(model, this_thread=this_thread)

    def observe(self, call: Call, name: str, step: int) -> None:
        for part, tensor in parts(call.output):
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(lambda grad, part=part: self._grad(grad, name, step, part)))

    def _grad(self, grad: torch.Tensor, name: str, step: int, part: str) -> None:
        try:
            with torch.no_grad():
                values = statistics(grad, self.bins)
            self._waiting.append(Deferred(values, Maker(Gradient, name, step, part, grad)))
            while len(self._waiting) > self.max_records:
                self._waiting.popleft()
                self.dropped += 1
        except Exception as error:
            self.failed(error, name)

    def forward_done(self, records: list[Any], step: int) -> None:
        # a handle holds its tensor's hooks weakly: what has gone needs no removal
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
