"""What a model's own Python may change while it runs: attributes, lists and dictionaries.

A module that changes such a thing must not be skipped on the other side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shared_hooks.trees import tensors_in

_MODULE_OWN = frozenset(vars(nn.Module()))


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """What a module's Python may change while it runs: its plain attributes, and what is in them."""
    return {name: contents_of(value) for name, value in vars(module).items() if name not in _MODULE_OWN}


def contents_of(value: Any, depth: int = 4) -> Any:
    """Something that is equal as long as a value is the same object and holds the same objects."""
    if depth and isinstance(value, tuple):
        return [contents_of(item, depth - 1) for item in value]
    if depth and isinstance(value, list):
        return _Same(value), [contents_of(item, depth - 1) for item in value]
    if depth and isinstance(value, dict):
        return _Same(value), [(_Same(key), contents_of(item, depth - 1)) for key, item in value.items()]
    return _Same(value)


class _Same:
    """Equal if it is the same object, which is kept so that no other takes its place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def is_custom(module: nn.Module) -> bool:
    """Whether a module's Python may change attributes, its own or others'; torch's own modules do not."""
    return not type(module).__module__.startswith(("torch.nn.", "torch.jit."))


def plain_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Tensors in plain attributes of the modules."""
    return [
        tensor
        for module in model.modules()
        for tensor in tensors_in([v for k, v in vars(module).items() if k not in _MODULE_OWN])
    ]


class StateWatch:
    """Tells whether any module's plain attributes have changed since the last look."""

    def __init__(self, modules: dict[nn.Module, Any]) -> None:
        self._before = {module: attributes_of(module) for module in modules if is_custom(module)}

    def changed(self) -> bool:
        found = False
        for module, before in self._before.items():
            after = attributes_of(module)
            if before != after:
                self._before[module] = after
                found = True
        return found
