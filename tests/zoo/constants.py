"""Values that do not depend on the inputs, kept in unusual places: recomputed or found there, never sent."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from tests.zoo.case import vector, zoo
from tests.zoo.control import Four

GLOBAL_SHIFT = torch.linspace(-1, 1, 8)


@zoo(vector)
class ConstantsElsewhere(Four):
    """Tensors in a module global, a class attribute, a default argument and a closure."""

    table = torch.arange(8.0)

    def __init__(self) -> None:
        super().__init__()
        hidden = torch.full((8,), 0.25)
        self.close = lambda x: x * hidden

    def scaled(self, x: Tensor, by: Tensor = torch.tensor(0.5)) -> Tensor:  # noqa: B008
        return x * by

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x + GLOBAL_SHIFT) * self.table)
        return self.d(self.close(self.scaled(self.c(x)))) + self.table


@zoo(vector)
class LruCachedMask(Four):
    """A helper keeps its tensors in functools.lru_cache, by shape."""

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def mask(size: int) -> Tensor:
        return torch.tril(torch.ones(size, size))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) @ self.mask(x.shape[-1])
        return self.c(torch.tanh(self.b(x))) @ self.mask(x.shape[-1])


@zoo(vector, loud=True, notes="drawing its weights is a path of its own; a side that never ran it says so")
class LayerMadeAtFirstCall(Four):
    """A submodule is added to the model by its first forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if not hasattr(self, "late"):
            self.late = nn.Linear(x.shape[-1], 8)
            nn.init.constant_(self.late.weight, 0.1)
            nn.init.constant_(self.late.bias, 0.2)
        return self.c(torch.tanh(self.late(self.b(x))))


@zoo(vector)
class ScalarsFromParameters(Four):
    """Python numbers read from weights: the cloud has them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * self.gain.item()
        x = self.b(x) if self.gain > 0 else self.c(x)
        return self.d(x / float(self.a.weight.abs().max()))


@zoo(vector)
class ParameterContainers(nn.Module):
    """ParameterList and ParameterDict, walked in forward; a buffer that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(2))
        self.named = nn.ParameterDict({"gain": torch.randn(8), "shift": torch.randn(8)})
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for weight in self.weights:
            x = torch.tanh(x @ weight) * self.named["gain"] + self.named["shift"]
        return self.last(x)
