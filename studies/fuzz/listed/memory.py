"""Writes that a log of kernels does not see, and bits that hang on where memory lies."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor, nn

import studies.fuzz.operation  # noqa: F401 - registers isthmus_fuzz::by_address

STEPS = numpy.linspace(0, 1, 8, dtype="float32")


class _Three(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class WeightChangedAndPutBack(_Three):
    """Test-time training in short: a weight is another for a while."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.c.weight.mul_(2)
        x = self.c(self.b(x))
        self.c.weight.div_(2)
        return self.c(x)


class WeightLearns(_Three):
    """A weight moves towards the input, and is put back from a copy."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.c.weight.clone()
        x = self.a(x)
        self.c.weight.add_(x.mean(0), alpha=0.1)
        x = self.c(self.b(x))
        self.c.weight.copy_(kept)
        return self.c(x)


class WeightStaysChanged(_Three):
    """A weight that every request changes."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.c.weight.mul_(0.5)
        return self.c(self.b(x))


class NumpyView(_Three):
    """NumPy writes into a tensor's memory, between a copy and its reader."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        seen = x.detach().numpy()
        y = self.b(x)
        seen[0] = 0.25
        return self.c(y) + x


class NumpyViewOfABuffer(_Three):
    """And of a buffer, whose view is kept from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", torch.ones(8))
        self.row: Tensor
        self.seen = self.row.numpy()

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        self.seen[:] = 2.0
        x = self.c(x) * self.row
        self.seen[:] = 1.0
        return x


class DataWritten(_Three):
    """Written through ``.data``."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        y = self.b(x)
        x.data.mul_(0.5)
        return self.c(y) + x


class DataSwapped(_Three):
    """``.data`` is another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = x * 1
        y.data = self.b(x)
        return self.c(x) + y


class StorageSet(_Three):
    """``set_`` gives a tensor another's memory."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = torch.empty(0)
        y.set_(self.b(x))
        return self.c(x) + y


class Resized(_Three):
    """``resize_`` and a copy."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = torch.empty(0).resize_(x.shape).copy_(x)
        return self.c(self.b(x)) + y


class OddAddress(_Three):
    """An input that begins 4 bytes after a multiple of 64, a row of a data set, and a kernel that rounds by that."""

    way = "odd address"

    def forward(self, x: Tensor) -> Tensor:
        x = torch.ops.isthmus_fuzz.by_address(x)
        return self.c(self.b(self.a(x)))


class OddAddressLate(_Three):
    """The same, read after the cut."""

    way = "odd address"

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        return self.c(y) + torch.ops.isthmus_fuzz.by_address(x)


class OddAddressWide(nn.Module):
    """With torch's own kernels: on some processors MKL rounds otherwise."""

    way = "odd wide"

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1001, 33), nn.Linear(33, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) + x.sum(-1, keepdim=True)


class OddRow(_Three):
    """A row within a value that is made on the way."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.b(x)
        return self.c(y) + torch.ops.isthmus_fuzz.by_address(x[1])


class NumpyTable(_Three):
    """A table of NumPy is read before the cut."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * torch.from_numpy(STEPS)
        return self.c(self.b(x)) + torch.from_numpy(STEPS)[: x.shape[0], None]


class Scratch(_Three):
    """A buffer that is rewritten before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.zeros(4, 8))
        self.scratch: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.scratch[: x.shape[0]] = x
        return self.c(self.b(self.scratch[: x.shape[0]]))


class DropoutInTraining(_Three):
    """Draws on both sides of a cut."""

    left_training = True

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.drop(self.b(self.drop(self.a(x)))))


class RandomNumbers(_Three):
    """Noise before a cut and after it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + torch.rand(8)
        return self.c(self.b(x)) + torch.empty(8).normal_()
