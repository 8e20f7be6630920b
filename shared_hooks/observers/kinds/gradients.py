"""`GradientStats`: what comes back through each module in training. For models of this process that run with gradients.

By default the gradients by a module's outputs, taken by hooks on the output tensors, which no model notices. PyTorch's
full backward hooks give those by its inputs, too, but hand the model's own code views of its values: one that changes
such a value in place (``nn.ReLU(inplace=True)``, ``x += y``) then fails. So they are an option.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from shared_hooks.errors import InputMismatch
from shared_hooks.observers.backward import BackwardHooks, Gradients, Pass
from shared_hooks.observers.base import Attachment, Observer
from shared_hooks.observers.deferred import Deferred, read
from shared_hooks.observers.kinds.activation import Activation, Maker, statistics
from shared_hooks.observers.values import parts
from shared_hooks.observers.watching import ObservedCall
from shared_hooks.wrapped import WrappedModel

Side = Literal["input", "output"]


@dataclass(frozen=True)
class Gradient(Activation):
    """The gradient of the loss by one tensor that went into a module or came out of it (``of``); ``step`` is the
    forward's.
    """

    of: Side = "output"

    @property
    def norm(self) -> float:
        """Euclidean, from mean and deviation."""
        count = math.prod(self.shape)
        return math.sqrt(max(0.0, (count - 1) * self.std**2 + count * self.mean**2)) if count else 0.0


class GradientStats(Observer):
    """One `Gradient` for each tensor of each output through which a gradient comes back.

    ``full``: by full backward hooks, for each positional input, too; of modules that give a tensor or a tuple of them,
    where none of these is changed in place. Numbers stay on the device until `records` is asked for; at most
    ``max_records`` wait there.
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
                self._hooks.append((root, BackwardHooks(modules, self._came_back)))
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

    def _came_back(self, found: Pass, by_input: Gradients, by_output: Gradients) -> None:
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
        mine = next((pair for pair in self._hooks if pair[0] is root), None)
        if mine is not None:
            self._hooks.remove(mine)
            mine[1].remove()
