"""A head leaves half done; planning moves state; state that stays from request to request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

LOCK = threading.Lock()


class _Three(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class FlagLeftUp(_Three):
    """A flag is up when the head leaves; the next request begins with it."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * (2.0 if self.busy else 1.0)
        self.busy = True
        x = self.b(x)
        self.busy = False
        return self.c(x)


class TrainingFlagLeft(_Three):
    """A child is in training mode for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x))
        self.norm.train()
        x = self.b(x)
        self.norm.eval()
        return self.c(x)


class AllTrainingLeft(_Three):
    """The model switches itself, as Monte Carlo dropout does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * (2.0 if self.training else 1.0)
        self.train()
        x = self.b(x)
        self.eval()
        return self.c(x)


class DefaultDtypeLeft(_Three):
    """torch's default dtype is another for a while."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * torch.ones(1).to(x.dtype)
        torch.set_default_dtype(torch.float64)
        x = self.b(x) + torch.full((8,), 0.1).float()
        torch.set_default_dtype(torch.float32)
        return self.c(x) * (torch.ones(1).element_size() / 4)


class LockHeld(_Three):
    """A lock is held around a layer, without ``with``: the next head would wait for ever."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if not LOCK.acquire(timeout=0.1):
            raise OSError("locked")
        x = self.b(x)
        LOCK.release()
        return self.c(x)


class LockHeldInWith(_Three):
    """The same in a ``with``, which a leaving head releases."""

    def forward(self, x: Tensor) -> Tensor:
        with LOCK:
            x = self.b(self.a(x))
        return self.c(x)


@contextmanager
def _doubled(module: nn.Module) -> Iterator[None]:
    module.factor = 2.0  # type: ignore[assignment]
    try:
        yield
    finally:
        module.factor = 1.0  # type: ignore[assignment]


class ScopeManaged(_Three):
    """An attribute is another within a ``with``; read after the cut, inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        with _doubled(self):
            x = self.b(self.a(x)) * self.factor
        return self.c(x) * self.factor


class Rnn(_Three):
    """Keeps ``h`` from request to request: planning must not run it."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.zeros(1, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.h = torch.tanh(self.a(x[:1]) + self.b(self.h))
        return self.c(x + self.h)


class KeyValueCache(_Three):
    """Keeps what it saw in a buffer, at a position that it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(8, 8))
        self.kept: Tensor
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.kept[self.at % 8] = x[0]
        self.at += 1
        return self.c(self.b(x) + self.kept.sum(0))


class KeyValueCacheInBuffers(_Three):
    """The same with buffers only, which two equal runs from the same buffers do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(8, 8))
        self.kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.kept.copy_(torch.cat([self.kept[1:], x[:1]]))
        return self.c(self.b(x) + self.kept.mean(0))


class FirstInputKept(_Three):
    """Keeps the first request's values for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.first is None:
            self.first = x[:1].clone()
        return self.c(self.b(x) - self.first)


class RunningStatistics(_Three):
    """A batch norm that learns."""

    left_training = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.norm(self.a(x)))
        return self.c(x + self.norm.running_mean)


class Counter(_Three):
    """Counts its requests, and answers by it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.count += 1
        return self.c(self.b(x)) * self.count
