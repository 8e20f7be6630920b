"""Nested values as observers meet them: the tensors inside with their places, copies, and sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shared_hooks.forward import Placeholder
from shared_hooks.generation.remote_tensor import RemoteTensor
from shared_hooks.tensors import is_namedtuple


def is_real(value: Any) -> bool:
    """A tensor that is on this side of the cut."""
    return isinstance(value, torch.Tensor) and type(value) not in (Placeholder, RemoteTensor)


def parts(value: Any, place: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """(place, tensor) of every tensor on this side; ``""`` for a value that is one tensor, else as "0.hidden"."""
    if is_real(value):
        yield place, value
        return
    seen = set() if seen is None else seen
    for key, item in _items(value, seen):
        yield from parts(item, f"{place}.{key}" if place else str(key), seen)


def _items(value: Any, seen: set[int]) -> list[tuple[Any, Any]]:
    if value is None or isinstance(value, (bool, int, float, str, bytes, type, torch.nn.Module, torch.Tensor)):
        return []
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return list(vars(value).items()) if hasattr(value, "__dict__") else []


def copy_of(value: Any) -> Any:
    """A copy that may be changed and kept: tensors cloned, placeholders None, unknown holders a dictionary of parts."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if is_real(value) else None
    return _copy_of_holder(value)


def _copy_of_holder(value: Any) -> Any:
    kind: Any = type(value)
    if is_namedtuple(value):
        items = [copy_of(item) for item in value]
        return tuple.__new__(kind, items) if hasattr(kind, "_fields") else kind(items)
    if isinstance(value, dict) and hasattr(kind, "__dataclass_fields__"):  # ModelOutput
        return kind(**{key: copy_of(item) for key, item in value.items()})
    if kind in (list, tuple):
        return kind(copy_of(item) for item in value)
    if kind is dict:
        return {key: copy_of(item) for key, item in value.items()}
    found = {place: copy_of(tensor) for place, tensor in parts(value)}
    return found or value


_PLAIN = frozenset({int, float, bool, type(None)})


def size_of(value: Any, depth: int = 0) -> int:
    """Bytes a kept value holds, about: exact for tensors and arrays, what Python says of the rest."""
    if type(value) in _PLAIN:
        return 32
    if isinstance(value, torch.Tensor):
        if not is_real(value):
            return 0
        has_storage = value.layout is torch.strided and not value.is_nested
        return value.untyped_storage().nbytes() if has_storage else value.numel() * value.element_size()
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    own = sys.getsizeof(value, 64)
    if depth >= 8:
        return own
    if type(value) is str:
        return own
    if isinstance(value, (list, tuple, set, frozenset)):
        if all(type(item) in _PLAIN for item in value):
            return own + 32 * len(value)
        return own + sum(size_of(item, depth + 1) for item in value)
    if isinstance(value, Mapping):
        return own + sum(size_of(item, depth + 1) for item in value.values())
    if hasattr(value, "__dict__"):
        return own + sum(size_of(item, depth + 1) for item in vars(value).values())
    return own
