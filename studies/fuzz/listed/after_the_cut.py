"""Python state that is written only on a path which data decides on after the cut: no plan of another path sees it."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class _Box:
    """A plain object."""

    def __init__(self) -> None:
        self.n = np.ones(2, np.float32)
        self.queue: collections.deque[float] = collections.deque([1.0], maxlen=4)
        self.table: dict[str, float] = {"v": 1.0}


class State(nn.Module):
    """Reads what is kept in the beginning; writes it in the end, where the data say so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.box = _Box()

    def forward(self, x: Tensor) -> Tensor:
        kept = self.read()
        x = self.b(self.a(x) * kept)
        if x[0, 0] > 0:
            self.write(x)
        return self.c(x)

    def read(self) -> Any:
        return 1.0

    def write(self, x: Tensor) -> None:
        pass


class ArrayOnOnePath(State):
    """An entry of a NumPy array that a tensor looks at."""

    def read(self) -> Any:
        return torch.from_numpy(self.box.n)[0]

    def write(self, x: Tensor) -> None:
        self.box.n[0] += 0.5


class QueueOnOnePath(State):
    """A queue."""

    def read(self) -> Any:
        return sum(self.box.queue)

    def write(self, x: Tensor) -> None:
        self.box.queue.append(0.5)


class TableOnOnePath(State):
    """A dictionary, in a loop that data end."""

    def read(self) -> Any:
        return self.box.table["v"]

    def write(self, x: Tensor) -> None:
        turns = 0
        while turns < 2 and x[0, 1] > 0:
            turns += 1
            self.box.table["v"] += 0.5


class TensorOnOnePath(State):
    """A tensor that hangs on the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.ones(8)

    def read(self) -> Any:
        return self.h

    def write(self, x: Tensor) -> None:
        self.h = x[1]


class ZeroOnOnePath(State):
    """Zero becomes minus zero, which equals it."""

    def __init__(self) -> None:
        super().__init__()
        self.box.table["v"] = 0.0

    def read(self) -> Any:
        return torch.copysign(torch.ones(1), torch.tensor(self.box.table["v"]))

    def write(self, x: Tensor) -> None:
        self.box.table["v"] = -0.0


class BufferOnOnePath(State):
    """A buffer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(1))

    def read(self) -> Any:
        return self.seen

    def write(self, x: Tensor) -> None:
        self.seen.add_(0.5)


class NoteOnOnePath(State):
    """What nobody reads: this one can be cut."""

    def write(self, x: Tensor) -> None:
        self.last = x


class CacheBesideAPath(State):
    """What is built once and hangs on no input: this one can be cut."""

    table: Any = None

    def read(self) -> Any:
        if self.table is None:
            self.table = torch.arange(8.0)
        return self.table

    def write(self, x: Tensor) -> None:
        x += 1


class CacheOnOnePath(State):
    """What is built once, on one path only, and hangs on no input."""

    late: Any = None

    def write(self, x: Tensor) -> None:
        if self.late is None:
            self.late = torch.arange(8.0)
        x += self.late


class DrawOnOnePath(State):
    """Numbers that torch draws."""

    def write(self, x: Tensor) -> None:
        x += torch.rand(())


class DrawReadOnOnePath(State):
    """... and Python reads."""

    def write(self, x: Tensor) -> None:
        x += torch.rand(()).item()


class PythonDrawOnOnePath(State):
    """Numbers that Python draws."""

    def write(self, x: Tensor) -> None:
        x += random.random()


class NumpyDrawOnOnePath(State):
    """Numbers that NumPy draws."""

    def write(self, x: Tensor) -> None:
        x += float(np.random.rand())  # noqa: NPY002


class InputWrittenOnOnePath(nn.Module):
    """An input written in place where data say so: a head that began on another path must leave it as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.relu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y, turns = x, 0
        while turns < 2 and y.sum() > 0:
            y, turns = self.a(x) - 0.5, turns + 1
        return self.b(self.relu(y))
