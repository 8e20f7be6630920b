"""Cuts that were called possible and failed with errors outside of the tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn


class _Tagged(Tensor):
    """A subclass made on the way."""


class _Three(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class AsSubclass(_Three):
    """A subclass made by ``as_subclass`` before a cut."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).as_subclass(_Tagged)
        return self.c(self.b(x) + x)


class AsSubclassAnswered(_Three):
    """And answered."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).as_subclass(_Tagged)
        return self.c(self.b(x)).as_subclass(_Tagged) * y


class OddByteView(_Three):
    """A view of bytes that begins and ends inside of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = x.view(torch.uint8)[:, 1:9]
        return self.c(self.b(x)) + y * 0.01


class OddByteViewAlone(_Three):
    """Only those bytes of a value are needed after the cut."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).view(torch.uint8)[:, 1:9]
        return self.c(self.b(x)) + y * 0.01


class OddByteViewFlat(_Three):
    """A view of bytes that is seen as another dtype again."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = x.view(torch.uint8).flatten()[2:34].view(torch.int16)
        return self.c(self.b(x)) + y.view(2, 8) * 1e-4


class OddStride(_Three):
    """An answer of one element with an odd stride."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))[:1, 0]


def _traced() -> nn.Module:
    traced: nn.Module = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    return traced


class FxTraced(_Three):
    """A module traced by fx, as `create_feature_extractor` makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.traced = _traced()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.traced(self.a(x))) + x


class _Plain(_Three):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.b(self.a(x)))
        return {"y": y, "z": self.c(y) + x}


class FxTracedRoot(nn.Module):
    """The model itself is a traced one, which answers with its features."""

    def __new__(cls) -> nn.Module:  # type: ignore[misc]
        traced: nn.Module = fx.symbolic_trace(_Plain())
        return traced


class _Spike(torch.autograd.Function):
    """A step with a made-up gradient, as snntorch has them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        answer: Tensor = grad / (1 + x.abs()) ** 2
        return answer


class _Leaky(nn.Module):
    """A neuron whose membrane is an attribute and a buffer in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("membrane", torch.zeros(0), persistent=False)
        self.membrane: Tensor

    def reset(self) -> None:
        self.membrane = torch.zeros_like(self.membrane)

    def forward(self, x: Tensor) -> Tensor:
        if self.membrane.shape != x.shape:
            self.membrane = torch.zeros_like(x)
        self.membrane = 0.9 * self.membrane + x
        spikes: Tensor = _Spike.apply(self.membrane - 0.1)
        self.membrane = self.membrane - spikes * 0.1
        return spikes


class Spiking(_Three):
    """A network of them over three steps, reset at the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = _Leaky(), _Leaky()

    def forward(self, x: Tensor) -> Tensor:
        self.one.reset()
        self.two.reset()
        answers = [self.c(self.two(self.b(self.one(self.a(x))))) for _ in range(3)]
        return torch.stack(answers).sum(0)


class SpikingKept(Spiking):
    """The same without a reset: the membranes stay from request to request."""

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.c(self.two(self.b(self.one(self.a(x)))))
        return answer


class CachedGcn(_Three):
    """A graph's normalised edges, kept from the first call on."""

    way = "two"

    def __init__(self) -> None:
        super().__init__()
        self._cached: tuple[Tensor, Tensor] | None = None

    def norm(self, late: Tensor) -> tuple[Tensor, Tensor]:
        if self._cached is None:
            adjacency = (late @ late.T).softmax(-1)
            self._cached = (adjacency, adjacency.sum(-1))
        return self._cached

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        adjacency, degree = self.norm(late)
        x = self.a(adjacency @ x)
        adjacency, degree = self.norm(late)
        return self.c(self.b(adjacency @ x / degree[:, None]))


class StartAndEnd(_Three):
    """Arguments called as the engine's own."""

    way = "start and end"

    def forward(self, start: Tensor, end: Tensor) -> Tensor:
        return self.c(self.b(self.a(start))) + end
