"""Models small enough to be sent through a cut in every test; both sides build them from the same seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Four layers, a skip connection across the second: input (1, 3, 16, 16), output (1, 10)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Conv2d(width, width, 3, padding=1)
        self.relu = nn.ReLU()
        self.head = nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        stem = self.stem(image)
        out: Tensor = self.head(self.relu(self.body(stem) + stem).mean((2, 3)))
        return out


class Branching(nn.Module):
    """Takes another path for inputs with a negative sum: the plan made on the example does not hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.plus = nn.Linear(4, 4)
        self.minus = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.first(values)
        if hidden.sum().item() < 0:
            return torch.tanh(self.minus(hidden)) + values
        out: Tensor = self.plus(hidden)
        return out


class Counting(nn.Module):
    """Counts the inputs with a positive sum, in its last lines, and reads the count in its first: input (n, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.counts = {"positive": 0}

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.second(self.first(values + self.counts["positive"]))
        if values.sum().item() > 0:
            self.counts["positive"] += 1
        out: Tensor = torch.relu(hidden)
        return out


class Longer(nn.Module):
    """A batch takes one layer more, and so gives those after it other ids: input (n, 4), output (n, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        if len(values) > 1:
            values = self.extra(values)
        out: Tensor = self.second(torch.relu(self.first(values)))
        return out


class Moody(nn.Module):
    """Raises in its last layer for values above 100."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.last = _Refusing()

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(values))
        return out


class _Refusing(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        if values.max().item() > 100:
            raise ValueError("that is too much")
        return values * 2


@dataclass
class Scores:
    """What `Keywords` returns."""

    logits: Tensor
    hidden: list[Tensor]


class Keywords(nn.Module):
    """Keyword inputs, one of them read late, and a dataclass for an output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, *, ids: Tensor, mask: Tensor) -> Scores:
        hidden = self.mix(self.embed(ids))
        return Scores(self.out(hidden * mask.unsqueeze(-1)), [hidden])


class Wide(nn.Module):
    """A frontier of 16 MiB after its first layer: input (1, 4), output (1, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(4, 1 << 22, bias=False)
        self.gather = nn.AdaptiveAvgPool1d(1)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.gather(self.spread(values))
        return out


class KeyCache:
    """What a model of transformers returns beside its logits, unless asked not to."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class Caching(nn.Module):
    """Its output cannot be sent, unless ``use_cache`` is false: input (n, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, values: Tensor, use_cache: bool = True) -> dict[str, object]:
        hidden = self.first(values)
        logits = {"logits": self.last(hidden)}
        return {**logits, "past": KeyCache(hidden)} if use_cache else logits
