"""Only the rows that are read cross of a tensor indexed by a constant."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.tensors.staging import identical

PICKED = torch.tensor([3, 4, 5, 40, -1])


class Picks(nn.Module):
    """Some rows of the first layer's result are read after the second."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how
        self.register_buffer("picked", PICKED)
        self.picked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        other = self.b(x[:, :2])
        if self.how == "list":
            return other.sum() + hidden[:, PICKED.tolist()]
        if self.how == "select":
            return other.sum() + hidden.index_select(1, self.picked % 50)
        return other.sum() + hidden[:, self.picked]


def check(how: str, rows: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Picks(how)
    x = torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(x.clone())
    edge = WrappedModel(model)
    early = edge.forward(x, end=1)
    assert early.nbytes == (2 * rows * 4 + 2 * 2 * 4) * 4
    assert identical(edge.forward(EarlyOutput.from_bytes(early.to_bytes()), start=1), expected)


def test_a_buffer_of_indices() -> None:
    check("buffer", 5)


def test_a_list_of_indices() -> None:
    check("list", 5)


def test_index_select() -> None:
    check("select", 5)
