"""What models give: every structure of outputs, aliases, inputs handed back, values that are no tensors."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo.case import vector, zoo


class TwoLayers(nn.Module):
    """Common body: `hidden` after the first layer, `out` after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)

    def body(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.act(self.a(x))
        return hidden, self.b(hidden)


@zoo(vector, listed=True)
class DictOutput(TwoLayers):
    """A dictionary."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden, out = self.body(x)
        return {"out": out, "hidden": hidden}


@zoo(vector, listed=True)
class ListOutput(TwoLayers):
    """A list."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.body(x))


class Pair(NamedTuple):
    """A named tuple as output."""

    hidden: Tensor
    out: Tensor


@zoo(vector, listed=True)
class NamedTupleOutput(TwoLayers):
    """A named tuple, made inside a submodule and again in the root."""

    class Inner(TwoLayers):
        def forward(self, x: Tensor) -> Pair:
            return Pair(*self.body(x))

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x: Tensor) -> Pair:
        pair = self.inner(x)
        return Pair(hidden=self.b(pair.out), out=pair.hidden)


@zoo(vector)
class NestedOutput(TwoLayers):
    """A dictionary of lists of tuples, with literals between the tensors."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden, out = self.body(x)
        return {
            "levels": [(hidden, {"deep": out}), [], ()],
            "ordered": OrderedDict(b=hidden + 1, a=None),
            "meta": {"n": x.shape[0], "name": "nested", "ratio": 0.5, "flag": True, 3: None},
        }


@zoo(vector)
class TensorWithLiterals(TwoLayers):
    """(tensor, int, None, str, float)."""

    def forward(self, x: Tensor) -> tuple[Tensor, int, None, str, float]:
        return self.body(x)[1], 7, None, "text", 1.5


@zoo(vector)
class ShapeInOutput(TwoLayers):
    """A torch.Size, a dtype and a device beside the tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, torch.Size, torch.dtype, torch.device]:
        out = self.body(x)[1]
        return out, out.shape, out.dtype, out.device


@zoo(vector)
class AliasedOutputs(TwoLayers):
    """One tensor twice, and two views of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden, out = self.body(x)
        return out, out, out.t(), out[:, ::2], hidden


@zoo(vector)
class ReturnsInput(TwoLayers):
    """The model's input is one of its outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.body(x)[1]


@zoo(vector)
class ReturnsViewOfInput(TwoLayers):
    """A view of the model's input is one of its outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x)[1], x[:, 2:4]


@zoo(vector, listed=True)
class ModuleReturnsItsInput(nn.Module):
    """Modules that hand back their input, and one that hands back one of two."""

    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Second(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return y

    def __init__(self) -> None:
        super().__init__()
        self.same, self.second, self.a, self.b = self.Same(), self.Second(), nn.Linear(8, 8), nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(self.same(x))
        alias = self.same(hidden)
        hidden = self.relu(hidden)
        return self.b(self.second(x, alias)) + self.same(hidden)


@zoo(vector)
class ReturnsParameter(TwoLayers):
    """A parameter and a constant beside the output: neither depends on the inputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.body(x)[1], self.a.bias, torch.arange(3)


@zoo(vector)
class ConstantOutput(TwoLayers):
    """The output does not depend on the input at all."""

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        return self.b(torch.ones(1, 8))


@zoo(vector)
class ModulesWithLiterals(nn.Module):
    """A module that returns (tensor, int), one that returns None, one that returns a float."""

    class Split(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x * 2, x.shape[-1]

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    class Scale(nn.Module):
        def forward(self) -> float:
            return 0.5

    def __init__(self) -> None:
        super().__init__()
        self.split, self.nothing, self.scale = self.Split(), self.Nothing(), self.Scale()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden, width = self.split(self.a(x))
        assert self.nothing(hidden) is None
        return self.b(hidden / width) * self.scale()


@zoo(vector)
class ScalarOutput(TwoLayers):
    """A Python float read from the output: the last thing the model does."""

    def forward(self, x: Tensor) -> tuple[float, Tensor]:
        out = self.body(x)[1]
        return out.sum().item(), out


@zoo(vector)
class ListOfPythonNumbers(TwoLayers):
    """`tolist()` as output."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        out = self.body(x)[1]
        return {"best": out.argmax(-1).tolist(), "size": tuple(out.shape)}
