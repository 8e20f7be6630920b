"""Holders of tensors: dataclasses, ModelOutput, and objects nobody can look into."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from tests.zoo.case import vector, zoo
from tests.zoo.giving import TwoLayers


@dataclass
class Answer:
    """A plain dataclass as output."""

    out: Tensor
    hidden: Tensor
    label: str = "none"
    scores: list[Tensor] | None = None


@zoo(vector, listed=True)
class DataclassOutput(TwoLayers):
    """A dataclass out of the root."""

    def forward(self, x: Tensor) -> Answer:
        hidden, out = self.body(x)
        return Answer(out, hidden, "two layers", [out.sum(-1)])


@zoo(vector)
class DataclassBetweenModules(nn.Module):
    """A dataclass handed from module to module."""

    class First(TwoLayers):
        def forward(self, x: Tensor) -> Answer:
            hidden, out = self.body(x)
            return Answer(out, hidden, scores=[hidden * 2, out * 2])

    class Second(TwoLayers):
        def forward(self, answer: Answer) -> Tensor:
            assert answer.scores is not None
            return self.b(self.act(self.a(answer.hidden) + answer.scores[1])) + answer.out

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.First(), self.Second()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@dataclass
class Result(ModelOutput):
    """A transformers ModelOutput, ordered dictionary and dataclass at once."""

    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None
    missing: Tensor | None = None


@zoo(vector)
class ModelOutputResult(TwoLayers):
    """A ModelOutput with a missing entry."""

    def forward(self, x: Tensor) -> Result:
        hidden, out = self.body(x)
        return Result(logits=out, hidden=(hidden, out))


@dataclass(frozen=True)
class Box:
    """A frozen dataclass; `area` is computed by its own __post_init__."""

    corner: Tensor
    size: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "area", self.size.prod(-1))


@zoo(vector)
class FrozenDataclassOutput(TwoLayers):
    """A frozen dataclass with a derived attribute, inside a list."""

    def forward(self, x: Tensor) -> list[Box]:
        hidden, out = self.body(x)
        return [Box(hidden, out), Box(out, hidden)]


class Holder:
    """An object of an unknown class that carries a tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


@zoo(vector, max_refused=1.0, notes="cuts that an unknown holder crosses may be refused")
class UnknownHolderBetweenModules(nn.Module):
    """A module returns an object nobody can look into; the next module reads its attribute."""

    class Wrap(nn.Module):
        def forward(self, x: Tensor) -> Holder:
            return Holder(x * 2)

    class Unwrap(nn.Module):
        def forward(self, holder: Holder) -> Tensor:
            return holder.value + 1

    def __init__(self) -> None:
        super().__init__()
        self.a, self.wrap, self.unwrap, self.b = nn.Linear(8, 8), self.Wrap(), self.Unwrap(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        holder = self.wrap(self.a(x))
        return self.b(torch.tanh(self.unwrap(holder))) + holder.value
