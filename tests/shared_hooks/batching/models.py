"""Models whose rows are independent of each other behind any cut, and models that only look so."""

from __future__ import annotations

import torch
from torch import nn


class Conv(nn.Module):
    """Input (n, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.a(x)).relu()
        x = x + self.b(x).relu()
        return {"features": x, "scores": self.head(nn.functional.max_pool2d(x, 2).flatten(1))}


class Words(nn.Module):
    """Ids (n, 5), and positions that may be one row for all."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.places = nn.Embedding(8, 16)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
        )
        self.out = nn.Linear(16, 20)

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.words(ids) + self.places(places))
        found: torch.Tensor = self.out(x[:, 0])
        return found


class Sequence(nn.Module):
    """Input (5, n, 8): rows are in its second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False)
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.layers(self.lstm(x)[0]))
        return found


class OneRowIsSpecial(nn.Module):
    """Takes another way for one row, as attention of several libraries does. Input (n, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = x * 2 if x.shape[0] > 1 else x.contiguous().add(x)
        found: torch.Tensor = self.b(x)
        return found


class Mixes(nn.Module):
    """Rows influence each other, in a way given by name. Input (n, 8)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if self.how == "mean":
            x = x - x.mean(0)
        elif self.how == "hardly":
            x = x + x.roll(1, 0) * 1e-7
        elif self.how == "scale":
            x = (x / x.abs().max() * 127).round() * x.abs().max()
        elif self.how == "reads":
            x = x * 2 if float(x.sum()) > 0 else x
        elif self.how == "large":
            x = x - x.mean(0) if x.shape[0] > 6 else x
        elif self.how == "draws":
            x = nn.functional.dropout(x, training=True)
        elif self.how == "total":
            return self.b(x).sum()
        found: torch.Tensor = self.b(x)
        return found


class Capturing(nn.Module):
    """Builds something once, as the hooks of some libraries are: only the first plan sees it come. Input (n, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.built = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.built = True
        found: torch.Tensor = self.b(self.a(x).relu())
        return found


class Waits(nn.Module):
    """Goes on until its data says so, which only ones do at once. Input (n, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Identity()
        self.b = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1_000_000):
            if bool((self.a(x) == 1).all()):
                found: torch.Tensor = self.b(x)
                return found
        raise AssertionError("it was run on something else")


class Meets(nn.Module):
    """Rows meet where data have them do so, which random data hardly do. Input (n, 8)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 4)
        self.b = nn.Linear(8, 8)
        self.how = how

    def capacity(self, x: torch.Tensor) -> torch.Tensor:
        """A mixture of experts whose places run out: each takes the first rows that come."""
        scores = self.gate(x)
        chosen = nn.functional.one_hot(scores.argmax(-1), 4)
        place = (chosen.cumsum(0) * chosen).sum(-1)
        return x * (place <= max(1, 2 * len(x))).float().unsqueeze(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if self.how == "capacity":
            x = self.capacity(x)
        elif self.how == "the sizes of experts":
            place = (self.gate(x) > 100).float()  # hardly ever
            x = x - 1e6 * place.cumsum(0).clamp(min=1).sub(1).sum(1, keepdim=True)
        elif self.how == "an order":
            order = (x[:, 0] > 100).long().argsort(stable=True)
            x = x[order] if x.shape[0] else x
        elif self.how == "a table by rows":
            room = (len(x) + 1) // 2
            x = x + torch.zeros(room, 8).sum() * 0
        elif self.how == "a word":
            return self.b(x).argmax(-1)
        elif self.how == "counts":
            x = x * ((x > 100).sum() == 0)
        found: torch.Tensor = self.b(x)
        return found


class Chooses(nn.Module):
    """Data decide element by element. Input (n, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = torch.where(x > 0, x, 0.1 * x) * (x < 5)
        x = nn.functional.max_pool2d(x, 2).masked_fill(x[:, :, ::2, ::2] > 3, 0.0)
        found: torch.Tensor = self.b(x.flatten(1)).clamp(-3, 3)
        return found
