"""Little work, and cuts of very different sizes."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

NAME: Final = "chaos"
CUTS: Final = {"small": "narrow", "middle": "wide.0", "large": "wide.2"}
"""About 3 kB, 51 kB and 3.3 MB cross at these layers."""


class Wide(nn.Module):
    """(1, 8, 10, 10) is scaled up to (1, 8, 320, 320), and down again to ten numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(8, 8, 3, padding=1)
        self.wide = nn.Sequential(nn.Upsample(scale_factor=4), nn.ReLU(), nn.Upsample(scale_factor=8), nn.Hardtanh())
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.last = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.pool(self.wide(self.narrow(x))).flatten(1))


def inputs(number: int) -> torch.Tensor:
    """The same for the same number, in every process."""
    return torch.randn(1, 8, 10, 10, generator=torch.Generator().manual_seed(number))


def spec(seed: int = 0) -> str:
    """A spec file's text; weights are random, others with another ``seed``."""
    return f"""id = "{NAME}"
factory = "{__name__}:Wide"
seed = {seed}
[[example.args]]
shape = [1, 8, 10, 10]
"""
