"""Define `Transform`, a hook that may change a module's output, unlike an observer.

With a transform attached, a cut is no longer exact: head and tail return what the model with this transform returns, if
the transform is attached on the side where the module runs. `active` reports whether a model has any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import InputMismatch
from shared_hooks.observers.base import Attachment, Observer, ObserverLook, Record
from shared_hooks.observers.watching import ObservedCall, parts
from shared_hooks.wrapped import WrappedModel

_attached: list[Attachment] = []
_lock = threading.Lock()  # held while that is changed
_begun: ContextVar[dict[str, None] | None] = ContextVar("isthmus_transforms", default=None)
"""Names of the modules of transforms in the forwards of a `during`."""


@dataclass(frozen=True)
class Changed(Record):
    """A module's output was replaced."""


class Transform(Observer):
    """Replaces the output by ``function(module, inputs, output, name)``, unless that is None.

    The function gets the live values, in the model's thread and gradient mode. A tensor must be replaced by one of the
    same shape and dtype. An exception is counted as for any observer, and the output is kept. Steps, sampling and
    records are as for observers; a record says what was changed.
    """

    changes = True

    def __init__(
        self,
        function: Callable[[nn.Module, tuple[Any, ...], Any, str], Any],
        targets: Any,
        every_n: int = 1,
        max_records: int = 1000,
        **more: Any,
    ) -> None:
        super().__init__(targets, every_n, max_records, **more)
        self.function = function

    def _attachment(self, root: nn.Module, modules: dict[nn.Module, str], owner: Any, thread: int | None) -> Attachment:
        made = _Attachment(self, root, modules, owner, thread)
        with _lock:
            _attached.append(made)
        return made

    def detached(self, root: nn.Module) -> None:
        with _lock:
            _attached[:] = [attachment for attachment in _attached if attachment.is_attached]

    def observe(self, call: ObservedCall, name: str, step: int) -> Changed | None:
        inputs = (*call.args, call.kwargs) if call.kwargs else call.args
        with torch.set_grad_enabled(call.grad):
            changed = self.function(call.module, inputs, call.output, name)
        if changed is None:
            return None
        before, after = _forms(call.output), _forms(changed)
        if before != after:
            raise InputMismatch(f"a transform of {name} gave {after}, the module gives {before}")
        call.output = changed
        call.memo.clear()  # values computed from the old output
        return Changed(name, step)


class _Attachment(Attachment):
    def begin(self, whole: bool) -> ObserverLook | None:
        look = super().begin(whole)
        if look is not None and (begun := _begun.get()) is not None:
            begun.update(dict.fromkeys(self.modules.values()))
        return look


def _forms(value: Any) -> list[tuple[str, tuple[int, ...], str]]:
    return [(part, tuple(tensor.shape), str(tensor.dtype)) for part, tensor in parts(value)]


def active(model: nn.Module | WrappedModel) -> tuple[str, ...]:
    """Return the names of modules whose output attached transforms may change now, in this thread; if empty, cuts are
    exact.
    """
    if not _attached:  # read with every request
        return ()
    owner = model.modules if isinstance(model, WrappedModel) else None
    inside = set((model.model if isinstance(model, WrappedModel) else model).modules())
    found: dict[str, None] = {}
    for attachment in list(_attached):
        if attachment.thread not in (None, threading.get_ident()):
            continue
        if owner is None or attachment.owner is None or attachment.owner is owner:
            found.update((name, None) for module, name in attachment.modules.items() if module in inside)
    return tuple(found)


class during:  # used as a function
    """Context around forwards of this thread, which returns `active` for them.

    It includes transforms that a hook attaches and removes within a forward.
    """

    def __init__(self, model: nn.Module | WrappedModel) -> None:
        self._model = model
        self._seen: dict[str, None] = {}

    def __enter__(self) -> Callable[[], tuple[str, ...]]:
        self._token = _begun.set(self._seen)
        return self._active

    def __exit__(self, *_: object) -> None:
        _begun.reset(self._token)

    def _active(self) -> tuple[str, ...]:
        if not _attached and not self._seen:
            return ()
        return tuple(dict.fromkeys((*active(self._model), *self._seen)))
