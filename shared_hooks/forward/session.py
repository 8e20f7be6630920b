"""A session: one forward of one wrapped model in one thread. It numbers the layers, times and banks them.

A layer is a module call inside which no other hooked module is called; layers are numbered in execution order. The
head and the tail are sessions too, that stop early and start late.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import nn

from shared_hooks.metrics import LayerMetrics, Measurement
from shared_hooks.modules import ModuleInfo, call_name, fast_path_off, running
from shared_hooks.tensors import tensors_in


class HookExitException(BaseException):
    """Raised at the cut to leave the model's forward; caught by the session that raised it.

    Derived from BaseException so that a model's own ``except Exception`` does not swallow it.
    """


class Unseen:
    """Runs modules as they are, for runs that are nobody's forward: no session, and nothing for observers."""

    is_bare = True

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return forward(*args, **kwargs)

    def failed(self, error: BaseException) -> None:
        """Whoever runs it sees what it raises."""


UNSEEN = Unseen()


def run_plain(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole model in no session, under the conditions of one: without gradients and without the fast path."""
    token = running.set(UNSEEN)
    try:
        with torch.no_grad(), fast_path_off():
            return model(*args, **kwargs)
    finally:
        running.reset(token)


class Frame:
    """A module call that is running."""

    __slots__ = ("has_child", "info", "number")

    def __init__(self, info: ModuleInfo, number: int) -> None:
        self.info = info
        self.number = number
        self.has_child = False


class Session:
    """Runs a whole model: every layer is numbered, timed if wanted, banked if asked for."""

    is_bare = False
    banks = False
    """Whether `module_done` and `layer_done` have more to do than keep layers that are to be saved."""

    def __init__(
        self,
        modules: dict[nn.Module, ModuleInfo],
        measurement: Measurement | None,
        save: Set[int | str] = frozenset(),
    ) -> None:
        self.modules = modules
        self.measurement = measurement
        self.save = save
        self.stack: list[Frame] = []
        self.counts: dict[str, int] = {}
        self.next_layer = 0
        self.banked: dict[int | str, Any] = {}
        self.failure: BaseException | None = None

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The shim's entry: one module is called."""
        info = self.modules.get(module)
        if info is None:
            return forward(*args, **kwargs)
        return self.run(info, forward, args, kwargs)

    def failed(self, error: BaseException) -> None:
        """Keep the first failure: a model that catches exceptions must not turn it into an answer."""
        self.failure = self.failure or error

    def run(self, info: ModuleInfo, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = info.path
        number = self.counts[path] = self.counts.get(path, 0) + 1
        frame = Frame(info, number)
        stack = self.stack
        if stack:
            stack[-1].has_child = True
        stack.append(frame)
        measurement = self.measurement
        if measurement is not None:
            cpu = measurement.cpu()
            start = measurement.mark()
        try:
            output = forward(*args, **kwargs)
        finally:
            stack.pop()
        if self.banks:
            self.module_done(frame, output)
        if not frame.has_child:
            if measurement is not None:
                measurement.add(self.next_layer, info, number, start, cpu, output)
            if self.banks or self.save:
                self.layer_done(frame, output)
            self.next_layer += 1
        return output

    def module_done(self, frame: Frame, output: Any) -> None:
        """A module, layer or not, has run."""

    def layer_done(self, frame: Frame, output: Any) -> None:
        """A layer has run; its id is ``next_layer``."""
        if self.save:
            number, name = self.next_layer, layer_name(frame)
            if number in self.save or name in self.save:
                # the bank must not change when a later layer works in place
                self.banked[number] = self.banked[name] = snapshot(output)

    def release(self) -> None:
        """Let go of tensors that only the run needed; what was measured and banked stays."""

    def metrics(self) -> list[LayerMetrics]:
        """The measured layers, in order."""
        return [] if self.measurement is None else self.measurement.layer_metrics()


def layer_name(frame: Frame) -> str:
    """The module path, with ``#n`` from the second call on."""
    return call_name(frame.info.path, frame.number)


def snapshot(value: Any) -> Any:
    """A copy of a nested value in which every tensor is cloned, strides kept; other objects are shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.preserve_format)
    if not any(True for _ in tensors_in(value)):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple.__new__(type(value), [snapshot(item) for item in value])
    if isinstance(value, (list, tuple)):
        return (
            type(value)(snapshot(item) for item in value)
            if type(value) in (list, tuple)
            else list(map(snapshot, value))
        )
    if isinstance(value, dict):
        return {key: snapshot(item) for key, item in value.items()}
    return [snapshot(tensor) for tensor in tensors_in(value)]
