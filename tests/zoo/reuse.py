"""One module, many calls; one module, many names; one weight, many modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Call, Draw, call, vector, zoo


@zoo(vector, listed=True)
class OneModuleSeveralTimes(nn.Module):
    """The same layer is called four times, and the same ReLU after each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.out = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for _ in range(4):
            x = self.act(self.layer(x))
            total = total + x
        return self.out(total)


@zoo(vector, listed=True)
class OneModuleUnderTwoNames(nn.Module):
    """`first` and `second` are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.between = nn.Tanh()
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x))) + x


def tokens(draw: Draw) -> Call:
    return call(draw.ints(11, 2, 6))


@zoo(tokens, listed=True)
class TiedWeights(nn.Module):
    """The embedding's weight is the output projection's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids))))


@zoo(tokens)
class TiedThroughFunctional(nn.Module):
    """The output projection is F.linear with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.norm(self.embed(ids)), self.embed.weight)


@zoo(vector)
class RepeatedInModuleList(nn.Module):
    """One block three times in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.blocks = nn.ModuleList([block] * 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x
        return x


@zoo(vector)
class Recursion(nn.Module):
    """A module that calls itself with a counter."""

    class Node(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor, depth: int) -> Tensor:
            y = torch.tanh(self.layer(x))
            if depth == 0:
                return y
            return self.norm(self(y, depth - 1) + x)

    def __init__(self) -> None:
        super().__init__()
        self.node, self.out = self.Node(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.node(x, 3))


@zoo(vector)
class RecursiveRoot(nn.Module):
    """The model calls itself: two layers are the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        x = torch.tanh(self.layer(x))
        return self(x, again=False) + x if again else x


@zoo(lambda draw: call(draw.randn(2, 4, 8)))
class TreeRecursion(nn.Module):
    """Recursion over halves of a sequence: one module at several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(8, 8), nn.Linear(16, 8)

    def fold(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            return self.leaf(x[:, 0])
        left, right = x.chunk(2, 1)
        return torch.relu(self.join(torch.cat([self.fold(left), self.fold(right)], -1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.fold(x)


@zoo(vector)
class SharedSubmodule(nn.Module):
    """Two blocks own one and the same norm."""

    class Block(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)) + x

    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(8)
        self.a, self.b = self.Block(norm), self.Block(norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


@zoo(vector)
class SameInputTwiceInside(nn.Module):
    """Bilinear of a value with itself, and a parallel call of one layer on one value."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.layer = nn.Bilinear(8, 8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layer(x), self.layer(x)
        return self.pair(first, first) + second


@zoo(vector)
class WeightsAddedInForward(nn.Module):
    """A weight made of two parameters in every forward: recomputed, never sent."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        delta = self.up @ self.down
        hidden = torch.relu(self.base(x))
        return self.out(hidden) + F.linear(hidden, delta)
