"""PyTorch's full backward hooks on modules, each call of a module with one of its own.

A hook is given the module and gradients, not which call they belong to. So there is always a fresh one on the module:
the call that begins takes it along, and the next one is put there in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import InputMismatch

Gradients = tuple[torch.Tensor | None, ...]


class Pass:
    """One call of a module and its way back. It is reported only if the call was looked at."""

    __slots__ = ("name", "one_input", "one_output", "step", "tell")

    def __init__(self) -> None:
        self.name, self.step = "", 0
        self.one_input = self.one_output = False
        self.tell: Callable[[Pass, Gradients, Gradients], None] | None = None

    def __call__(self, module: nn.Module, by_input: Any, by_output: Any) -> None:
        if self.tell is not None:
            self.tell(self, _tuple(by_input), _tuple(by_output))


class BackwardHooks:
    """On ``modules`` until `remove`. ``tell`` is called with what came back through a call that was looked at.

    For models that run in one thread at a time. Raises InputMismatch for a module that takes no such hook.
    """

    def __init__(self, modules: Iterable[nn.Module], tell: Callable[[Pass, Gradients, Gradients], None]) -> None:
        self._tell = tell
        self._next: dict[nn.Module, tuple[Pass, Any]] = {}
        self._begun: dict[nn.Module, Pass] = {}
        self._before: dict[nn.Module, Any] = {}
        self._handles: list[Any] = []
        self._on = True
        try:
            for module in modules:
                self._before[module] = module._is_full_backward_hook
                self._arm(module)
                self._handles.append(module.register_forward_pre_hook(self._begin))
        except RuntimeError as error:  # there are hooks of the old kind, or a scripted module
            self.remove()
            raise InputMismatch(f"{type(module).__name__} does not accept a full backward hook: {error}") from error

    def looked_at(self, module: nn.Module, name: str, step: int, one_input: bool, one_output: bool) -> bool:
        """The call of ``module`` that runs is called so. False: no hook is on its way, as of a direct ``forward``."""
        found = self._begun.pop(module, None)
        if found is None:
            return False
        found.name, found.step, found.one_input, found.one_output = name, step, one_input, one_output
        found.tell = self._came_back
        return True

    def remove(self) -> None:
        """Nothing stays on the modules, and what is on its way back is reported to nobody."""
        self._on = False
        for handle in (*self._handles, *(handle for _, handle in self._next.values())):
            handle.remove()
        for module, before in self._before.items():
            if not module._backward_hooks:
                module._is_full_backward_hook = before
        self._handles, self._next, self._begun = [], {}, {}

    def _arm(self, module: nn.Module) -> None:
        fresh = Pass()
        self._next[module] = fresh, module.register_full_backward_hook(fresh)

    def _begin(self, module: nn.Module, args: Any) -> None:
        taken, handle = self._next[module]
        handle.remove()
        self._arm(module)
        self._begun[module] = taken

    def _came_back(self, found: Pass, by_input: Gradients, by_output: Gradients) -> None:
        if self._on:
            self._tell(found, by_input, by_output)


def _tuple(found: Any) -> Gradients:
    return found if isinstance(found, tuple) else (found,)
