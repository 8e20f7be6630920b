"""Small models with much to lie about: integer inputs, a table, values read from data, loops, options, truth values."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import nn


class Mood(enum.Enum):
    CALM = 1
    LOUD = 2


@dataclass
class Options:
    scale: float = 1.0
    rounds: int = 1
    mood: Mood = Mood.CALM


class Reader(nn.Module):
    """(ids (B, L) int64, mask (B, L) bool, options) -> {"logits": (B, 5), "kept": (B, L, 16), "rounds": number}."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.table = nn.Embedding(50, 16)
        self.first = nn.Linear(16, 16)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 5)
        self.register_buffer("steps", torch.arange(64))

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, options: Options | None = None
    ) -> dict[str, object]:
        options = options or Options()
        hidden = self.table(ids) + self.table(self.steps[: ids.shape[1]] % 50)
        hidden = self.relu(self.first(hidden)) * options.scale
        rounds = options.rounds + int(ids[0, 0]) % 2
        for _ in range(rounds):
            hidden = hidden + self.second(hidden)
        if mask is not None:
            hidden = hidden.masked_fill(~mask.unsqueeze(-1), 0.0)
        picked = hidden[torch.arange(ids.shape[0]), ids[:, -1] % ids.shape[1]]
        logits = self.last(self.norm(picked)).relu_()
        if options.mood is Mood.LOUD:
            logits = logits * 2
        return {"logits": logits, "kept": hidden, "rounds": rounds}


class Keeper(nn.Module):
    """(x (B, 8)) -> (B, 6). Writes parts of new memory, picks by truth values, draws numbers, loops."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 6)
        self.marks = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x)
        store = torch.empty(hidden.numel())
        store[:] = hidden.flatten()
        positive = hidden > 0
        hidden = self.second(hidden.relu())
        noise = torch.rand(hidden.shape)
        hidden.add_(1.0)
        picked = hidden[positive]
        out = self.last(hidden + noise * 0.01)
        rounds = int(out.flatten()[0].abs())  # what comes after it nobody foresees
        for _ in range(rounds):
            out = out + 0.0
        return {"out": out, "store": store, "picked": picked}


def keeper_example() -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
    """An input of `Keeper`."""
    return (torch.linspace(-1, 1, 16).reshape(2, 8),), {}


def example() -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
    """An input of `Reader`."""
    return (torch.arange(12).reshape(2, 6),), {}
