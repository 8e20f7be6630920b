"""Buffers that are filled: slice by slice, by index, through `out=`, by a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.case import sequence, vector, zoo
from tests.zoo.writing import Three


@zoo(sequence)
class PreallocatedOutput(Three):
    """zeros, then one slice per step."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        state = x[:, 0]
        for i in range(x.shape[1]):
            state = torch.tanh(self.a(x[:, i]) + self.b(state))
            out[:, i] = state
        return self.c(out)


@zoo(sequence)
class PreallocatedUninitialised(Three):
    """empty, then filled by copy_, fill_ and index_copy_."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(x.shape)
        out[:, 0].fill_(0.5)
        out[:, 1].copy_(self.a(x[:, 1]))
        out.narrow(1, 2, 1).zero_()
        out.index_copy_(1, torch.tensor([3, 4]), self.b(x[:, 3:]))
        return self.c(out)


@zoo(vector)
class IndexPut(Three):
    """Writes through index tensors and boolean masks."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        hidden[torch.tensor([0, 1]), torch.tensor([3, 5])] = 9.0
        hidden = self.b(hidden)
        hidden[hidden > 0] = 0.25
        return self.c(hidden)


@zoo(vector)
class MaskedFillInPlace(Three):
    """A mask made early is used late, in place."""

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        hidden = self.b(self.a(x).masked_fill_(mask, 0.5))
        return self.c(hidden).masked_fill_(~mask, -1.0)


@zoo(vector)
class OutArgument(Three):
    """Results written through `out=`."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        torch.tanh(hidden, out=hidden)
        other = self.b(hidden)
        torch.add(hidden, other, out=hidden)
        return self.c(hidden)


@zoo(vector)
class SwappedByCopy(Three):
    """Two buffers exchange their contents through copy_."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x), self.b(x)
        spare = left.clone()
        left.copy_(right)
        right.copy_(spare)
        return self.c(left) * right


@zoo(vector)
class ModuleWritesItsArgument(nn.Module):
    """A submodule returns nothing and writes into what it is given."""

    class Fill(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, buffer: Tensor, x: Tensor) -> None:
            buffer[:, 2:] = self.layer(x)[:, 2:]

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = self.Fill(), self.Fill(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        buffer = x.clone()
        self.one(buffer, x)
        self.two(buffer, buffer * 2)
        return self.out(buffer)
