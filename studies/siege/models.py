"""A model whose answers are far larger than its inputs, as those that make pictures are."""

from __future__ import annotations

import torch
from torch import nn

WIDE = "wide"
FACTORY = f"{__name__}:Wide"
COLUMNS = 1 << 18


class Wide(nn.Module):
    """(x (B, 16)) -> (B, 2^18): 64 bytes of input give a MiB of answer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.spread = nn.Upsample(size=COLUMNS, mode="nearest")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide: torch.Tensor = self.spread(self.relu(self.first(x)).unsqueeze(1)).squeeze(1)
        return wide


def example() -> torch.Tensor:
    return torch.ones(1, 16)
