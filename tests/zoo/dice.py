"""Random numbers in the forward of a model in eval mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import image, vector, zoo
from tests.zoo.control import Four
from tests.zoo.settings import seeded_random
from tests.zoo.state import Base


@zoo(image, setting=seeded_random)
class MonteCarloDropout(nn.Module):
    """One dropout that is on in eval mode: drawn on one side of any cut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.out = nn.Conv2d(3, 4, 3), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(self.conv(x).mean((2, 3)))
        return self.out(F.dropout(x, 0.5, training=True))


@zoo(vector, setting=seeded_random, max_refused=0.5, notes="no cut between two draws from one generator")
class MonteCarloDropoutTwice(Four):
    """Two such dropouts: between them the generator's state would have to cross."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.b(self.a(x)), 0.5, training=True)
        return self.d(F.dropout(self.c(x), 0.5, training=True))


@zoo(vector, max_refused=1.0, notes="one generator feeds several layers; skipping one shifts the others")
class SharedRandomGenerator(nn.Module):
    """A generator seeded in the root is consumed by each layer."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            return torch.tanh(self.layer(x) + torch.randn(8, generator=generator))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Noisy() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        for layer in self.layers:
            x = layer(x, generator)
        return x + torch.randn(8, generator=generator)


@zoo(vector, max_refused=1.0, notes="the global generator, seeded inside forward")
class SeedsInsideForward(Base):
    """manual_seed in forward, then dropout-like noise between layers."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            x = self.a(x) + torch.randn_like(x)
            x = self.b(torch.tanh(x)) * (torch.rand(8) > 0.5)
            return self.c(x) + torch.randn(8)
