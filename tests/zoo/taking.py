"""What models take: several inputs, keywords, structures, literals, odd shapes and dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo.case import Call, Draw, call, vector, zoo


@zoo(lambda draw: call(draw.randn(2, 8), draw.randn(2, 4), draw.randn(2, 8)), listed=True)
class SeveralInputsSomeReadLate(nn.Module):
    """The second input is read in the middle, the third after the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(12, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, side: Tensor, late: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        x = torch.relu(self.b(torch.cat([x, side], 1)))
        return self.c(x) * late


def keywords(draw: Draw) -> Call:
    return call(query=draw.randn(2, 8), mask=draw.bools(2, 8), scale=0.5)


@zoo(keywords, listed=True)
class KeywordOnlyInputs(nn.Module):
    """Nothing positional; one tensor read late, one literal."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, *, query: Tensor, mask: Tensor, scale: float) -> Tensor:
        return self.b(torch.tanh(self.a(query) * scale)).masked_fill(mask, -1.0)


def dictionary(draw: Draw) -> Call:
    return call({"x": draw.randn(2, 8), "more": {"late": draw.randn(2, 8)}, "unused": draw.randn(50)})


@zoo(dictionary)
class DictInputs(nn.Module):
    """A nested dictionary; one entry is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.b(torch.relu(self.a(batch["x"]))) + batch["more"]["late"]


@zoo(lambda draw: call([draw.randn(2, 8), draw.randn(2, 8), draw.randn(2, 8)]))
class ListInputs(nn.Module):
    """A list of tensors, one per layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, parts: list[Tensor]) -> Tensor:
        total = torch.zeros(8)
        for layer, part in zip(self.layers, parts, strict=True):
            total = total + torch.tanh(layer(part + total))
        return total


@dataclass
class Batch:
    """A plain dataclass, which pytree takes for a leaf."""

    x: Tensor
    scale: float
    late: Tensor | None = None


@zoo(lambda draw: call(Batch(draw.randn(2, 8), 2.0, draw.randn(2, 8))))
class DataclassInputs(nn.Module):
    """A dataclass holding tensors and a float."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, batch: Batch) -> Tensor:
        out = self.b(torch.tanh(self.a(batch.x) * batch.scale))
        return out if batch.late is None else out + batch.late


class Point(NamedTuple):
    """Two coordinates."""

    x: Tensor
    y: Tensor


@zoo(lambda draw: call(Point(draw.randn(2, 8), draw.randn(2, 8))))
class NamedTupleInputs(nn.Module):
    """A named tuple, read by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, point: Point) -> Point:
        x = torch.tanh(self.a(point.x))
        return point._replace(x=self.b(x))


@zoo(lambda draw: call(draw.randn(2, 8), None, bias=None))
class OptionalNoneInputs(nn.Module):
    """Tensors that may be missing and are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        x = self.a(x)
        if mask is not None:
            x = x * mask
        x = self.b(torch.relu(x))
        return x if bias is None else x + bias


@zoo(lambda draw: call(draw.randn(2, 8), 3, 0.25, True, "tanh"))
class LiteralInputs(nn.Module):
    """int, float, bool and str steer the model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, times: int, scale: float, double: bool, act: str) -> Tensor:
        for _ in range(times):
            x = getattr(torch, act)(self.a(x)) * scale
        return self.b(x) * (2 if double else 1)


def twice(draw: Draw) -> Call:
    x = draw.randn(2, 8)
    return call(x, x)


def overlapping(draw: Draw) -> Call:
    x = draw.randn(3, 8)
    return call(x[:2], x[1:])


class TwoTensors(nn.Module):
    """Reads the first early and both late, and writes into the first in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        hidden = self.b(hidden)
        return hidden + x + y


@zoo(twice)
class SameTensorTwice(TwoTensors):
    """One tensor as two arguments."""


@zoo(overlapping)
class OverlappingInputs(TwoTensors):
    """Two arguments that are views of one storage."""


class WritesIntoInput(nn.Module):
    """Writes into its first argument between two layers and reads the second after it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        x.add_(hidden)
        hidden = self.b(hidden)
        x.mul_(0.5)
        return self.c(hidden + y) + y


@zoo(twice)
class WritesIntoSharedInput(WritesIntoInput):
    """The tensor written into is also the other argument."""


@zoo(overlapping)
class WritesIntoOverlappingInput(WritesIntoInput):
    """The tensor written into overlaps the other argument by one row."""


@zoo(lambda draw: call(*[draw.randn(2, 8) for _ in range(3)], gain=draw.randn(8)))
class VariadicInputs(nn.Module):
    """`*parts` and `**options`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, *parts: Tensor, **options: Tensor) -> Tensor:
        return self.out(torch.stack([self.layer(part) for part in parts]).sum(0) * options["gain"])


class Elementwise(nn.Module):
    """Layers that take any shape and float type."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Tanh(), nn.Softplus(), nn.ELU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) * 2
        return self.c(self.b(y) - 1) + y


@zoo(lambda draw: call(torch.zeros(0, 8)))
class ZeroSizeBatch(Elementwise):
    """A batch of nothing."""


@zoo(lambda draw: call(draw.randn()))
class ZeroDimTensor(Elementwise):
    """A scalar tensor in, a scalar tensor out."""


@zoo(lambda draw: call(draw.randn(8, 6).t()[::2]))
class StridedInput(Elementwise):
    """A transposed, strided view as input."""


@zoo(lambda draw: call(draw.randn(1, 8).expand(4, 8)))
class ExpandedInput(Elementwise):
    """An input with stride 0."""


@zoo(lambda draw: call(torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0, 1.0]])))
class NonFiniteInput(Elementwise):
    """NaN in, NaN out."""


@zoo(lambda draw: call(draw.ints(50, 2, 8), draw.bools(2, 8)))
class IntegerAndBoolTensors(nn.Module):
    """Integers and booleans all the way to the embedding."""

    class Shift(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return (ids * 3 + 1) % 50

    class Both(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a & ~b

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.both, self.embed = self.Shift(), self.Both(), nn.Embedding(50, 4)

    def forward(self, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        ids = self.shift(ids)
        keep = self.both(keep, ids > 25)
        return self.embed(self.shift(ids)) * keep.unsqueeze(-1), ids.where(keep, -1)


@zoo(lambda draw: call(draw.randn(2, 8), draw.randn(1000, 1000)))
class UnusedInput(nn.Module):
    """A large input that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


@zoo(vector)
class ShapeOnlyInput(nn.Module):
    """After the first layer only the shape of the input counts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(torch.tanh(self.a(x)))
        return hidden + torch.ones_like(x) / x.shape[0] + torch.arange(x.size(1), dtype=x.dtype, device=x.device)
