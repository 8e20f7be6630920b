"""Exceptions as control flow, and modes toggled inside a forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _Three(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class _Enough(Exception):
    """Ends a walk through layers."""


class _Leaving(nn.Module):
    """Raises what it has when that is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, enough: bool) -> Tensor:
        x = self.layer(x)
        if enough:
            raise _Enough(x)
        return x


class EarlyExit(_Three):
    """A value leaves the inner layers by an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(_Leaving() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        try:
            for number, layer in enumerate(self.inner):
                x = layer(x, number == 1)
        except _Enough as enough:
            x = enough.args[0]
        return self.c(self.b(x))


class EarlyExitByData(EarlyExit):
    """The data decide where."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        try:
            for layer in self.inner:
                x = layer(x, bool(x.sum() > 0))
        except _Enough as enough:
            x = enough.args[0]
        return self.c(self.b(x))


class SwallowsEverything(_Three):
    """Catches every Exception, and continues without the layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        try:
            x = self.b(x)
            x = x + torch.ones(3)  # does not fit
        except Exception:
            x = x * 0.5
        return self.c(x)


class Asks(_Three):
    """Looks whether an operation is possible by trying it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        try:
            y = x.view(-1, 5)
        except RuntimeError:
            y = x.view(-1, 4)
        return self.c(self.b(y.reshape(-1, 8)))


class TrainAndEval(_Three):
    """``train()`` and ``eval()`` around a part, with a dropout inside of it that is off."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.train()
        x = self.drop(self.b(x))
        self.eval()
        return self.c(x)


class EvalInTraining(TrainAndEval):
    """Left in training mode, evaluates for a while."""

    left_training = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.eval()
        x = self.drop(self.b(x))
        self.train()
        return self.c(x)
