"""Two outputs of one model on one input: are they the same, and if not, how far apart?

Between machines that are alike every bit counts. Between others (another device, processor, release of torch or number
of threads) the last bits may rightly differ, and a *tolerance* judges: the largest difference between two fractions,
divided by the largest magnitude in its tensor, may be the square root of the coarsest format's machine epsilon, so that
half of the digits that the format has agree (`tolerance`). Everything else must be equal there, too: types, shapes,
whole numbers, text, and where a tensor holds NaN or infinities.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from shared_hooks.tensors import ClassFinder, flatten, identical, unflatten

TF32_EPSILON: Final = 2.0**-10
"""Rounding of what cuDNN and cuBLAS may compute 32-bit fractions with (10 bits behind the point)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """``largest`` is in units of the output's scale: 0.0 where nothing differs, infinite where there is no measure."""

    bits: bool  # every bit is the same
    largest: float
    top1: float | None  # share of rows whose largest value is at the same place; None without such rows
    what: str  # what was compared, in words

    def within(self, tolerance: float) -> bool:
        """Whether it may pass, between machines that are not alike."""
        return self.bits or self.largest <= tolerance


def compare(whole: Any, received: Any, find: ClassFinder) -> Comparison:
    """``whole``: of the model itself, on any device; ``received``: of the wire. ``find`` knows holders' classes."""
    (form, mine), (other, theirs) = flatten(whole), flatten(received)
    mine, theirs = [_plain(one) for one in mine], [_plain(one) for one in theirs]
    count = sum(tensor.numel() for tensor in mine)
    tensors = f"{len(mine)} tensor{'' if len(mine) == 1 else 's'}"
    what = f"{tensors}, {count:,} value{'' if count == 1 else 's'}"
    if identical(unflatten(form, mine, find), unflatten(other, theirs, find)):
        return Comparison(True, 0.0, _top1(mine, mine), what)
    if not identical(form, other) or [_form(one) for one in mine] != [_form(one) for one in theirs]:
        return Comparison(False, math.inf, None, f"{what}; types or shapes differ")
    pairs = list(zip(mine, theirs, strict=True))
    return Comparison(False, max((_apart(a, b) for a, b in pairs), default=math.inf), _top1(mine, theirs), what)


def tolerance(dtypes: Iterable[torch.dtype], *, tf32: bool = False) -> float:
    """For a model and output in these formats; ``tf32``: 32-bit fractions may have been computed with fewer bits."""
    epsilons = [torch.finfo(dtype).eps for dtype in set(dtypes) if dtype.is_floating_point or dtype.is_complex]
    coarsest = max(epsilons, default=0.0)
    if tf32 and torch.float32 in dtypes:
        coarsest = max(coarsest, TF32_EPSILON)
    return math.sqrt(coarsest)


def tolerance_between(formats: Iterable[torch.dtype], about: Mapping[str, str], device: torch.device) -> float:
    """For formats that this ``device`` and a server that says this ``about`` itself may have computed with."""
    on_gpu = device.type == "cuda" or about.get("kind", "").startswith("cuda")
    tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return tolerance(formats, tf32=on_gpu and tf32)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, dense, in order: strides are no part of a value."""
    tensor = tensor.detach().cpu()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _form(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _apart(whole: torch.Tensor, received: torch.Tensor) -> float:
    """The largest difference of two tensors of one form, over the largest magnitude of ``whole``."""
    if identical(whole, received):
        return 0.0
    if whole.is_complex():
        return max(_apart(*parts) for parts in zip(_parts(whole), _parts(received), strict=True))
    if not whole.is_floating_point():
        return math.inf
    a, b = whole.double(), received.double()
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)) or not torch.equal(
        torch.nan_to_num(a[~finite], nan=0.5), torch.nan_to_num(b[~finite], nan=0.5)
    ):
        return math.inf
    a, b = a[finite], b[finite]
    apart = float((a - b).abs().max()) if a.numel() else 0.0
    if apart == 0:
        return 0.0  # another zero's sign, another NaN's bits
    scale = float(a.abs().max())
    return apart / scale if scale else math.inf


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _plain(tensor.real), _plain(tensor.imag)


def _top1(whole: list[torch.Tensor], received: list[torch.Tensor]) -> float | None:
    """Over the last dimension of the first tensor of fractions that has one of two or more."""
    for a, b in zip(whole, received, strict=True):
        if a.is_floating_point() and a.numel() and a.ndim and a.shape[-1] > 1:
            return float((a.argmax(-1) == b.argmax(-1)).double().mean())
    return None
