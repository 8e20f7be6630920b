"""A mask at the cut: `Select` keeps the chosen channels, `Restore` fills the others with their calibration means.

A cut after `Select` sends the kept channels and nothing more: that is the engine's own liveness, the mask is part of
the model on both sides. Every cut stays exact for the masked model; only the masked model differs from the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import SpecError, near
from shared_hooks.modules import ROOT


@dataclass(frozen=True)
class Mask:
    """Which channels of a module's output stay. ``module`` is a path; ``dim`` the dimension of its channels."""

    module: str
    dim: int
    keep: tuple[int, ...]
    """Ascending."""
    fill: tuple[float, ...]
    """For every channel, kept ones too."""

    def __post_init__(self) -> None:
        if not self.keep or list(self.keep) != sorted(set(self.keep)):
            raise SpecError("a mask keeps one channel or more, each once, in ascending order")
        if self.keep[0] < 0 or self.keep[-1] >= len(self.fill):
            raise SpecError(f"a mask of {len(self.fill)} channels cannot keep channel {self.keep[-1]}")
        if not torch.tensor(self.fill).isfinite().all():
            raise SpecError("a mask cannot fill with NaN or Inf")

    @property
    def split(self) -> str:
        """The layer after which only kept channels cross."""
        return f"{self.module}.select"


class Select(nn.Module):
    """(..., C, ...) to (..., kept, ...), a tensor of its own."""

    def __init__(self, keep: Sequence[int], channels: int, dim: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.channels = channels
        self.dim = dim
        self.keep: torch.Tensor
        self.register_buffer("keep", torch.tensor(keep, dtype=torch.int64, device=device))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if values.shape[self.dim] != self.channels:
            raise SpecError(f"the mask is for {self.channels} channels, the layer has {values.shape[self.dim]}")
        return values.index_select(self.dim, self.keep)

    def extra_repr(self) -> str:
        return f"{self.keep.numel()} of {self.channels}"


class Restore(nn.Module):
    """(..., kept, ...) to (..., C, ...): the kept channels in their places, the means in all others."""

    def __init__(self, keep: Sequence[int], fill: torch.Tensor, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.keep: torch.Tensor
        self.fill: torch.Tensor
        self.register_buffer("keep", torch.tensor(keep, dtype=torch.int64, device=fill.device))
        self.register_buffer("fill", fill)

    def forward(self, kept: torch.Tensor) -> torch.Tensor:
        dim = self.dim % kept.dim()
        size = list(kept.shape)
        size[dim] = self.fill.numel()
        shape = [1] * len(size)
        shape[dim] = -1
        return self.fill.to(kept.dtype).view(shape).expand(size).index_copy(dim, self.keep, kept)


class Masked(nn.Module):
    """A module with a mask behind it; other attributes are the module's own."""

    def __init__(self, inner: nn.Module, mask: Mask, device: torch.device | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.select = Select(mask.keep, len(mask.fill), mask.dim, device)
        self.restore = Restore(mask.keep, torch.tensor(mask.fill, device=device), mask.dim)
        self.training = inner.training

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        restored: torch.Tensor = self.restore(self.select(self.inner(*args, **kwargs)))
        return restored

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("inner")
            if inner is None:
                raise
            return getattr(inner, name)


def masked(model: nn.Module, mask: Mask) -> nn.Module:
    """``model`` itself, with the mask put behind ``mask.module`` under each of its names. Raises SpecError."""
    known = dict(model.named_modules(remove_duplicate=False))
    inner = known.get(mask.module)
    if inner is None or mask.module in ("", ROOT):
        raise SpecError(f"the mask is for {mask.module}, which the model does not have.{near(mask.module, known)}")
    weight = next(iter(model.state_dict().values()), None)
    behind = Masked(inner, mask, None if weight is None else weight.device)
    for parent in {id(module): module for module in known.values()}.values():
        for name, child in list(parent._modules.items()):  # named_children leaves further names out
            if child is inner:
                setattr(parent, name, behind)
    return model


def unmasked(model: nn.Module) -> nn.Module:
    """``model`` itself, with every mask taken away."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, Masked) and not isinstance(parent, Masked):
                setattr(parent, name, child.inner)
    return model
