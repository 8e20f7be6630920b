"""An operation gives several tensors, of which some hang on no input: they are views of the constants it is given."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import EarlyOutput, WrappedModel


class Spread(nn.Module):
    """As a distribution whose mean is a constant and whose scale is learnt."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 3)
        self.mean = nn.Parameter(torch.randn(4, 8)[1])

    def constant(self) -> Tensor:
        return torch.full((), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = torch.broadcast_tensors(self.constant(), self.a(x).exp())
        found: Tensor = self.b(mean + scale)
        return found + mean[:, :3]


class SpreadsParameter(Spread):
    def constant(self) -> Tensor:
        return self.mean


class SpreadsConjugate(Spread):
    def constant(self) -> Tensor:
        return torch.complex(self.mean, self.mean).conj()

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = torch.broadcast_tensors(self.constant(), self.a(x))
        found: Tensor = self.b(mean.imag + scale)
        return found


class WritesToConstant(Spread):
    """What is spread has memory of its own, which is written to behind the cut."""

    def forward(self, x: Tensor) -> Tensor:
        mean, scale = torch.broadcast_tensors(torch.zeros(len(x), 8), self.a(x))
        mean.add_(1)
        found: Tensor = self.b(mean * scale)
        mean.add_(found.sum())
        return found + mean[:, :3]


@pytest.mark.parametrize("kind", [Spread, SpreadsParameter, SpreadsConjugate, WritesToConstant])
def test_every_cut_is_exact(kind: type[Spread]) -> None:
    edge = WrappedModel(kind().eval())
    cloud = WrappedModel(copy.deepcopy(kind().eval()))
    for rows in (2, 3):
        x = torch.randn(rows, 8)
        expected = edge.forward(x)
        edge.plan(x)
        assert all(layer.can_split for layer in edge.layers)
        for cut in ("input", *range(len(edge.layers))):
            early = EarlyOutput.from_bytes(edge.head(cut, x).to_bytes(), max_bytes=1 << 20)
            for _ in range(2):
                assert torch.equal(cloud.tail(early), expected), cut
