"""A model that draws random numbers before and after its first layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Noise(nn.Module):
    """Two layers, each with noise on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x + torch.rand_like(x))
        out: Tensor = self.second(hidden + torch.rand_like(hidden))
        return out
