"""State that outlives a call of a module, or leaves it by another door than its return value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import sequence, vector, zoo

SIDE = "values leave a module by the side; cuts between writer and reader may be refused"


class Base(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


@zoo(sequence)
class LazilyCachedTensor(nn.Module):
    """Positions are made at the first call and kept: the graph of the first call differs from the second."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.cache is None or self.cache.shape[0] != x.shape[1]:
                self.cache = torch.linspace(-1, 1, x.shape[1])[:, None].expand(x.shape[1], 8)
            return x + self.cache

    def __init__(self) -> None:
        super().__init__()
        self.a, self.positions, self.b = nn.Linear(8, 8), self.Positions(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.positions(self.a(x)))) + self.positions(x)


@zoo(vector)
class CountsItsCalls(Base):
    """A Python counter that does not change the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@zoo(vector, max_refused=1.0, notes="a request must not change the cloud's buffers; every cut is refused")
class CountsInBuffer(Base):
    """A buffer counts the calls, in place, and does not change the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.calls += 1
        return self.c(torch.tanh(self.b(x)))


@zoo(vector, max_refused=1.0, notes=SIDE)
class KeptOnSelfReadByParent(nn.Module):
    """A block keeps its hidden value on itself, the parent reads it later."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = torch.tanh(self.layer(x))
            return self.last * 2

    def __init__(self) -> None:
        super().__init__()
        self.block, self.mid, self.out = self.Block(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.block(x))
        assert self.block.last is not None
        return self.out(x) + self.block.last


@zoo(vector, max_refused=1.0, notes=SIDE)
class AppendsToListArgument(nn.Module):
    """An encoder appends to a list it is given; the decoder pops from it."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
            skips.append(torch.tanh(self.one(x)))
            skips.append(torch.tanh(self.two(skips[-1])))
            return skips[-1] * 2

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mid, self.out = self.Encoder(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        x = self.mid(self.encoder(x, skips))
        return self.out(x + skips.pop()) + skips.pop()


@zoo(vector, max_refused=1.0, notes=SIDE)
class FillsDictArgument(nn.Module):
    """Layers leave results in a shared dictionary (a cache); later layers and the root read them."""

    class Layer(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.layer = name, nn.Linear(8, 8)

        def forward(self, x: Tensor, cache: dict[str, Any]) -> Tensor:
            y = self.layer(x) + sum(cache.values())
            cache[self.name] = y * 0.5
            return torch.tanh(y)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(name) for name in "pqr")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        cache: dict[str, Any] = {"start": x}
        for layer in self.layers:
            x = layer(x, cache)
        return {"out": x, **cache}


@zoo(vector, max_refused=1.0, notes=SIDE)
class CapturedByOwnHook(Base):
    """The model registers a hook on its own layer to catch a feature."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.a.register_forward_hook(lambda module, args, output: self.features.update(a=output))

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return x + self.features["a"]


@zoo(vector, max_refused=1.0, notes=SIDE)
class PythonCounterInLayers(nn.Module):
    """A counter on self, reset by the root, raised by each layer, decides what a layer does."""

    class Stage(nn.Module):
        def __init__(self, root: list[nn.Module]) -> None:
            super().__init__()
            self.root, self.layer = root, nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            root: Any = self.root[0]
            root.step += 1
            return torch.tanh(self.layer(x)) * root.step

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        me: list[nn.Module] = [self]
        self.stages = nn.ModuleList(self.Stage(me) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.step = 0
        for stage in self.stages:
            x = stage(x)
        return x * self.step


@zoo(vector, max_refused=1.0, notes=SIDE)
class ModuleReturnsClosure(nn.Module):
    """A module returns a function that holds its hidden value."""

    class Maker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            gate = torch.sigmoid(self.layer(x))
            return lambda y: y * gate

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.mid, self.out = self.Maker(), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        apply = self.maker(x)
        return self.out(apply(self.mid(x)))
