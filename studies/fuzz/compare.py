"""Whether two outputs are the same bit for bit, where their classes come from two parties' modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def difference(ours: Any, theirs: Any, path: str = "output") -> str | None:
    """Where they differ first, in words; None when they are the same."""
    if type(ours) is not type(theirs) and type(ours).__qualname__ != type(theirs).__qualname__:
        return f"{path}: {type(ours).__name__} instead of {type(theirs).__name__}"
    if isinstance(theirs, Tensor):
        return _tensors(ours, theirs, path)
    if isinstance(theirs, Mapping):
        if list(ours) != list(theirs):
            return f"{path}: keys {list(ours)} instead of {list(theirs)}"
        return _first(difference(ours[key], theirs[key], f"{path}[{key!r}]") for key in theirs)
    if isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{path}: {len(ours)} items instead of {len(theirs)}"
        return _first(difference(p, q, f"{path}[{i}]") for i, (p, q) in enumerate(zip(ours, theirs, strict=True)))
    if dataclasses.is_dataclass(theirs):
        return difference(vars(ours), vars(theirs), path)
    if ours != theirs and not (ours != ours and theirs != theirs):
        return f"{path}: {ours!r} instead of {theirs!r}"
    return None


def _tensors(ours: Tensor, theirs: Tensor, path: str) -> str | None:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"{path}: {ours.dtype} {tuple(ours.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}"
    ours, theirs = (t.as_subclass(torch.Tensor) for t in (ours, theirs))
    if torch.equal(_bits(ours), _bits(theirs)):
        return None
    return f"{path}: bits differ (largest difference {(ours.double() - theirs.double()).abs().max():.3g})"


def _first(found: Any) -> str | None:
    return next((text for text in found if text), None)


def _bits(tensor: Tensor) -> Tensor:
    dense = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.int32 if dense.element_size() == 4 else torch.uint8)
