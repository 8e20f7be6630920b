"""Shapes, branches and indices that hang on data; a subclass; a number that is changed later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import studies.fuzz.operation  # noqa: F401 - registers isthmus_fuzz::keep


class Tagged(Tensor):
    """As `monai.data.MetaTensor`: a tensor with an attribute that the model reads."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = super().__torch_function__(function, types, args, kwargs or {})
        scales = [value.scale for value in args if isinstance(value, Tagged) and hasattr(value, "scale")]
        if scales and isinstance(answer, Tagged):
            answer.scale = scales[0]
        return answer


class _Three(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class OwnOperation(_Three):
    """A shape from data, by an operation without tag and meta kernel, as ``nms``."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.ops.isthmus_fuzz.keep(self.a(x))
        return self.c(self.b(kept)).sum(0) + kept.shape[0]


class OwnOperationAnswered(_Three):
    """The same, and its rows are the answer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.ops.isthmus_fuzz.keep(self.b(self.a(x))))


class OwnOperationAround(_Three):
    """The same, and its rows go past the layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        kept = torch.ops.isthmus_fuzz.keep(x)
        return self.c(self.b(x)) + kept.sum(0) * kept.shape[0]


class Nonzero(_Three):
    """A shape from data, by an operation with the tag."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x[x.sum(-1) > 0])).sum(0) + x[0]


class SubclassInput(_Three):
    """An input of a subclass, whose attribute is read late."""

    way = "subclass"

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(self.b(self.a(x)))
        return y * getattr(x, "scale", 1.0)


class SubclassAnswered(_Three):
    """Its class reaches the answer."""

    way = "subclass"

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x))) + x


class ChangedLater(_Three):
    """A number on a module that is changed after planning, on both sides alike."""

    def __init__(self) -> None:
        super().__init__()
        self.later = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * self.later
        return self.c(self.b(x)) + self.later


class WidthChangedLater(_Three):
    """The number says how much of a value is read after the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.later = 2.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.b(torch.tanh(x))
        return self.c(y) + x[:, : int(2 * self.later)].sum()


class Epsilon(_Three):
    """The same with a module of torch: a norm's epsilon."""

    class _Norm(nn.LayerNorm):
        later = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.layer_norm(x, (8,), self.weight, self.bias, 1e-5 + self.later)

    def __init__(self) -> None:
        super().__init__()
        self.norm = self._Norm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(self.b(self.a(x))))


class EqualityWithData(_Three):
    """A branch on equality."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.b(x)
        return self.c(y) if torch.equal(x, y) else self.c(y) * 2


class EqualityWithText(_Three):
    """A tensor compared with a text, as tokens are with names."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.b(x)
        return self.c(y) if x == "text" else self.c(y) * 2  # type: ignore[comparison-overlap]


class TableByIndex(_Three):
    """A table of constants looked up by an index that comes from data."""

    def __init__(self) -> None:
        super().__init__()
        self.table = [nn.Parameter(torch.ones(8) * i) for i in range(8)]
        self.register_buffer("rows", torch.arange(64.0).view(8, 8))
        self.rows: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(x + self.rows[x.argmax(-1)])
        return self.c(x) + self.table[int(x[0].argmax())]


class BranchOnData(_Three):
    """Two paths by data, before and after a cut."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) if x.sum() > 0 else self.b(x)
        return self.c(x) if x.mean().item() > 0 else self.b(self.c(x))


class GreedyDecoder(_Three):
    """Tokens read with int(), step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for _ in range(3):
            x = self.b(self.a(x) + self.tokens.weight[int(x[0].argmax())])
            found.append(int(x[0].argmax()))
        return self.c(x) + torch.tensor(found).sum()
