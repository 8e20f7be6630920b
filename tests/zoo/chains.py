"""Chains and the ways of holding modules: nothing crosses a cut but one value."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from tests.zoo.case import Call, Draw, add, call, image, sequence, vector, zoo


def plain_chain() -> nn.Module:
    """Convolutions and a classifier, one after the other."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(150, 5)
    )


add("plain_chain", plain_chain, image, listed=True)
add("single_linear_root", lambda: nn.Linear(8, 3), vector, notes="the root itself is the only layer")
add("identity_root", nn.Identity, vector, notes="the output is the input")
add(
    "named_sequential",
    lambda: nn.Sequential(OrderedDict([("first.part".replace(".", "_"), nn.Linear(8, 8)), ("act", nn.Tanh())])),
    vector,
)


@zoo(vector)
class NestedSequential(nn.Module):
    """Containers in containers, some with one child."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.ReLU()), nn.Sequential(nn.Tanh()))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@zoo(vector)
class SequentialSubclass(nn.Sequential):
    """A Sequential whose forward is not a chain."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, input: Tensor) -> Tensor:
        x = input
        for layer in reversed(list(self)):
            x = layer(x) + x
        return x


@zoo(vector, listed=True)
class ModuleListChain(nn.Module):
    """ModuleList, walked by index; the last entry is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            x = torch.tanh(self.layers[i](x)) + 0.1 * i
        return x


def routed(draw: Draw) -> Call:
    return call(draw.randn(2, 8), "right")


@zoo(routed, listed=True)
class ModuleDictRouted(nn.Module):
    """ModuleDict, chosen by a string argument."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = nn.ModuleDict({"left": nn.Linear(8, 8), "right": nn.Linear(8, 8)})
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor, path: str) -> Tensor:
        return self.out(torch.relu(self.paths[path](x)))


@zoo(vector)
class PlainListOfModules(nn.Module):
    """Modules in a plain list: no hook reaches them, and the state dict does not hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(8, 8), nn.Linear(8, 8)]
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.last(x)


@zoo(vector)
class ParentPointer(nn.Module):
    """A child that knows its parent (hidden in a list, or module walks would not end) and uses its layers."""

    class Child(nn.Module):
        def __init__(self, parent: nn.Module) -> None:
            super().__init__()
            self.parent = [parent]
            self.own = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            shared: nn.Module = self.parent[0].shared  # type: ignore[assignment]
            return shared(torch.relu(self.own(x)))

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.a, self.b = self.Child(self), self.Child(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + x


@zoo(vector)
class DottedDropoutIdentity(nn.Module):
    """Layers that return their very input in eval mode: Dropout, Identity."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.drop, self.same, self.out = nn.Linear(8, 8), nn.Dropout(0.5), nn.Identity(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x)
        return self.out(self.same(self.drop(hidden))) + hidden


@zoo(sequence)
class NoLayerCalled(nn.Module):
    """Parameters only; the root is the one layer there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ self.weight, -1)


@zoo(vector)
class DeeplyNested(nn.Module):
    """Fifteen containers around one layer each, with an operation at every level."""

    class Level(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.own = nn.Linear(8, 8)
            self.inner = DeeplyNested.Level(depth - 1) if depth else nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.own(x) * 0.5) + x

    def __init__(self) -> None:
        super().__init__()
        self.top = self.Level(14)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(x)
