"""Are two nested values the same, bit for bit?"""

from __future__ import annotations

import math
from typing import Any

import torch

from shared_hooks.tensors.copies import bytes_of
from shared_hooks.tensors.trees import is_namedtuple


def identical(a: Any, b: Any) -> bool:
    """Whether two nested values are the same: types, dtypes, shapes and every bit of every tensor."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) or is_namedtuple(a):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    if hasattr(a, "__dict__") and not isinstance(a, type):
        return identical(vars(a), vars(b))
    return bool(a == b)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout != torch.strided or a.is_quantized:
        return bool(torch.equal(a.to_dense(), b.to_dense()))
    return bool(torch.equal(bytes_of(a), bytes_of(b)))
