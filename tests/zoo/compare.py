"""Bit for bit comparison of nested outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def bits(tensor: Tensor) -> bytes:
    """The elements of a tensor in row-major order, as bytes: two NaNs differ unless they are the same NaN."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    flat = torch.empty(dense.numel(), dtype=dense.dtype)
    flat.copy_(dense.reshape(-1))  # one element may have any stride, which no other dtype can look at
    return bytes(flat.view(torch.uint8).numpy())


def differences(ours: Any, theirs: Any, path: str = "output") -> Iterator[str]:
    """Where two values differ: in class, dtype, shape, keys or bits. Nothing when they are the same."""
    if type(ours) is not type(theirs):
        yield f"{path}: {type(ours).__name__} instead of {type(theirs).__name__}"
    elif isinstance(theirs, Tensor):
        facts = [(t.dtype, tuple(t.shape), t.device, t.layout) for t in (ours, theirs)]
        if facts[0] != facts[1]:
            yield f"{path}: {facts[0]} instead of {facts[1]}"
        elif bits(ours) != bits(theirs):
            gap = (ours.double() - theirs.double()).abs().max() if not ours.is_complex() else "complex"
            yield f"{path}: bits differ (largest difference {gap})"
    elif isinstance(theirs, Mapping):
        if list(ours) != list(theirs):
            yield f"{path}: keys {list(ours)} instead of {list(theirs)}"
        else:
            for key in theirs:
                yield from differences(ours[key], theirs[key], f"{path}[{key!r}]")
        if dataclasses.is_dataclass(theirs):  # ModelOutput is a mapping of what is not None
            yield from _fields(ours, theirs, path)
    elif isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            yield f"{path}: {len(ours)} items instead of {len(theirs)}"
        else:
            for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
                yield from differences(our, their, f"{path}[{i}]")
    elif dataclasses.is_dataclass(theirs):
        yield from _fields(ours, theirs, path)
    elif type(theirs).__eq__ is object.__eq__ and hasattr(theirs, "__dict__"):  # an object: what it holds
        yield from differences(vars(ours), vars(theirs), path)
    elif ours != theirs and not (ours != ours and theirs != theirs):
        yield f"{path}: {ours!r} instead of {theirs!r}"


def _fields(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    if sorted(vars(ours)) != sorted(vars(theirs)):
        yield f"{path}: attributes {sorted(vars(ours))} instead of {sorted(vars(theirs))}"
    for field in dataclasses.fields(theirs):
        yield from differences(getattr(ours, field.name), getattr(theirs, field.name), f"{path}.{field.name}")


def same(ours: Any, theirs: Any) -> bool:
    """Whether two nested values are the same, bit for bit."""
    return next(differences(ours, theirs), None) is None
