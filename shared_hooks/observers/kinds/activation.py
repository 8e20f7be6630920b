"""`ActivationStats`: what comes out of each module, in numbers, computed on the device and read once per forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shared_hooks.errors import InputMismatch
from shared_hooks.observers.base import Observer, Record
from shared_hooks.observers.deferred import Deferred
from shared_hooks.observers.values import parts
from shared_hooks.observers.watching import ObservedCall


@dataclass(frozen=True)
class Activation(Record):
    """One tensor that came out of a module.

    ``part``: its place in a nested output, ``""`` if the output is one tensor. ``mean``, ``std`` (unbiased; 0 for one
    element), ``min``, ``max`` are NaN where a NaN is among the elements, and for no elements; of complex values they
    describe the magnitudes. ``sparsity``: share of elements that are 0. ``nonfinite``: number of NaN and Inf.
    ``histogram``: counts of the finite elements in equal bins from ``low`` to ``high``, their least and greatest.
    """

    part: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    mean: float
    std: float
    min: float
    max: float
    sparsity: float
    nonfinite: int
    histogram: tuple[int, ...]
    low: float
    high: float


class ActivationStats(Observer):
    """One `Activation` for each tensor of each output. ``bins``: of the histogram; 0 for none."""

    def __init__(self, targets: Any = None, every_n: int = 1, max_records: int = 1000, bins: int = 10, **more: Any):
        super().__init__(targets, every_n, max_records, **more)
        if isinstance(bins, bool) or not isinstance(bins, int) or not 0 <= bins <= 4096:
            raise InputMismatch(f"bins is a number from 0 to 4096, not {bins!r}")
        self.bins = bins

    def observe(self, call: ObservedCall, name: str, step: int) -> list[Deferred]:
        found = []
        for part, tensor in parts(call.output):
            if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
                continue
            # several observers of one module share the work
            key = (ActivationStats, self.bins, part)
            values = call.memo.get(key)
            if values is None:
                values = call.memo[key] = statistics(tensor, self.bins)
            found.append(Deferred(values, Maker(Activation, name, step, part, tensor)))
        return found


class Maker:
    """Makes the record, without holding the tensor. ``kind`` makes an `Activation` of its fields."""

    __slots__ = ("device", "dtype", "kind", "name", "numel", "part", "shape", "step")

    def __init__(self, kind: Callable[..., Activation], name: str, step: int, part: str, tensor: torch.Tensor) -> None:
        self.kind = kind
        self.name, self.step, self.part = name, step, part
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.numel = tensor.numel()

    def __call__(self, values: torch.Tensor) -> Activation:
        mean, std, least, most, zeros, nonfinite, low, high, *counts = values.tolist()
        return self.kind(
            self.name,
            self.step,
            self.part,
            tuple(self.shape),
            str(self.dtype).removeprefix("torch."),
            str(self.device),
            mean,
            std,
            least,
            most,
            zeros / self.numel if self.numel else math.nan,
            int(nonfinite),
            tuple(map(int, counts)),
            low,
            high,
        )


def statistics(tensor: torch.Tensor, bins: int) -> torch.Tensor:
    """``tensor`` -> [mean, std, min, max, zeros, non-finite, low, high, *counts], flat, float64, on its device.

    Half precision is accumulated in float32, whole numbers in float64 (float32 where a device has no other).
    """
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    x = tensor.detach()
    if x.is_complex():
        x = x.abs()
    if not x.is_floating_point():
        x = x.to(wide)
    elif x.dtype.itemsize < 4:
        x = x.float()
    x = x.reshape(-1) if x.is_contiguous() else x.contiguous().reshape(-1)
    if x.numel() == 0:
        return torch.tensor([math.nan] * 4 + [0.0, 0.0] + [math.nan] * 2 + [0.0] * bins, dtype=wide, device=x.device)
    if x.device.type == "cpu" and (found := _finite_on_cpu(x, bins)) is not None:
        return found
    good = torch.isfinite(x)
    low, high = torch.where(good, x, math.inf).amin(), torch.where(good, x, -math.inf).amax()
    std = x.std() if x.numel() > 1 else torch.zeros_like(low)
    row = torch.stack(
        [one.to(wide) for one in (x.mean(), std, *x.aminmax(), (x == 0).sum(), x.numel() - good.sum(), low, high)]
    )
    return torch.cat((row, histogram(torch.where(good, x, math.nan), low, high, bins).to(wide))) if bins else row


MOST_EDGES = 32
"""Up to here comparing everything with each edge is faster than finding the bin of each."""


TINY = 1e-15
"""A deviation whose squares may be too small for 32 bits."""


def _finite_on_cpu(x: torch.Tensor, bins: int) -> torch.Tensor | None:
    """The same for finite elements on the CPU, where looking at a number waits for nothing; a sixth of the time."""
    least, most = (one.item() for one in x.aminmax())
    if not math.isfinite(most - least):
        return None
    mean = x.mean()
    std = torch.linalg.vector_norm(x - mean).item() / math.sqrt(x.numel() - 1) if x.numel() > 1 else 0.0
    if not math.isfinite(std) or (std < TINY and most > least):  # the squares were no numbers of this width
        return None
    array = x.numpy()
    edges = np.linspace(least, most, bins + 1, dtype=array.dtype)
    if most <= least or bins > MOST_EDGES:
        counts = histogram(x, x.new_tensor(least), x.new_tensor(most), bins).tolist() if bins else []
    else:
        below = [np.count_nonzero(array < edge) for edge in edges[1:-1]]
        counts = np.diff([0, *below, x.numel()]).tolist() if bins else []
    zeros = np.count_nonzero(array == 0)
    return torch.tensor([mean.item(), std, least, most, zeros, 0, least, most, *counts], dtype=torch.float64)


def histogram(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bins: int) -> torch.Tensor:
    """Counts of a flat tensor in ``bins`` equal bins from ``low`` to ``high``, the last one closed; without its NaN.

    Waits for no device.
    """
    width = torch.where(high > low, high - low, 1)
    place = ((x - low) / width * bins).clamp(0, bins - 1)
    # what is no number goes to a bin of its own, which is left out
    place = torch.where(torch.isnan(x), bins, torch.nan_to_num(place)).long()
    return torch.zeros(bins + 1, dtype=torch.int64, device=x.device).scatter_add_(0, place, torch.ones_like(place))[:-1]
