"""Two outputs of one tail: the same bits, or within rounding."""

from __future__ import annotations

from typing import Any

import torch

from shared_hooks.tensors import flatten, identical

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Of rounding: the largest difference of two elements over the largest magnitude in the tensor. Complex numbers as
their parts; all else must be equal.
"""


def difference(mine: Any, theirs: Any, *, rounding: bool) -> str:
    """In words, how they differ by more than they may: not at all without ``rounding``; "" where they do not."""
    if identical(mine, theirs):
        return ""
    if not rounding:
        return "the last bits differ"
    (own, tensors), (other, others) = flatten(mine), flatten(theirs)
    if own != other or len(tensors) != len(others):
        return "another structure came out, or other values beside tensors"
    for number, (a, b) in enumerate(zip(tensors, others, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return f"tensor {number} has another form"
        if wrong := _unlike(a, b):
            return f"tensor {number}: {wrong}"
    return ""


def _unlike(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    most = TOLERANCE.get(a.dtype)
    if most is None or not a.numel():
        return "" if torch.equal(a, b) else f"{a.dtype} must be equal, and is not"
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return "other elements are not finite"
    a, b = a[finite].double(), b[finite].double()
    if not a.numel():
        return ""
    found = float((a - b).abs().max() / a.abs().max().clamp_min(torch.finfo(torch.float64).tiny))
    return "" if found <= most else f"elements differ by {found:.1e} of the largest, more than {most:g}"
