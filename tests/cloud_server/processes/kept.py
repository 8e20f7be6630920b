"""Models for trials: made by these functions in a process of their own."""

from __future__ import annotations

import itertools
import os
import time

import torch
from torch import Tensor, nn

_count = itertools.count(1)
_number: dict[int, int] = {}


class Doubled(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values * 2


class Counted(nn.Module):
    """Each one that a process makes is another, in a way that no digest sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.second(self.first(values)) * _number_of(self)


def _number_of(model: nn.Module) -> int:
    return _number[id(model)]


class Sleeps(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        if os.environ.get("ISTHMUS_TEST_SLEEPS"):
            time.sleep(600)
        return values + 1


def doubled() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Doubled(), nn.Linear(4, 4))


def counted() -> nn.Module:
    made = Counted()
    _number[id(made)] = next(_count)
    return made


def sleeps() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Sleeps())


def hungry() -> nn.Module:
    """Takes more memory than a trial may have, in a trial."""
    if os.environ.get("ISTHMUS_TEST_SLEEPS"):
        torch.ones(16 << 30, dtype=torch.uint8)
    return doubled()
