"""A tail that sleeps, so that two cores are enough for many replicas; what crosses has any size."""

from __future__ import annotations

import time
from typing import Final

import torch
from torch import nn

NAME: Final = "nap"
CUT: Final = "edge"


class Nap(nn.Module):
    """(1, N) comes back as it is, doubled, after ``seconds`` of sleep in the tail."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.edge = nn.ReLU()
        self.cloud = Sleep(seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cloud(self.edge(x))


class Sleep(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return x * 2


def inputs(nbytes: int, number: int = 0) -> torch.Tensor:
    """So many bytes, the same for the same number."""
    return torch.rand(1, nbytes // 4, generator=torch.Generator().manual_seed(number))


def spec(seconds: float, nbytes: int = 64) -> str:
    """A spec file's text."""
    return f"""id = "{NAME}"
factory = "{__name__}:Nap"
[factory_kwargs]
seconds = {seconds}
[[example.args]]
shape = [1, {nbytes // 4}]
"""
