"""What Python makes from numbers after it has read data may be made from the data: it is reported, not found again."""

from __future__ import annotations

import torch
from torch import nn

from tests.shared_hooks.truth import truth


class PositionsAfterALook(nn.Module):
    """As in transformers' RoFormer: a mask is looked at, then a table is read at positions that Python counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.table = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x > 100).all()):
            x = -x
        positions = self.table(torch.arange(x.shape[0]))
        x = self.first(x) + positions
        return self.last(x) * positions


def test_a_table_read_at_positions_counted_after_a_look_at_data() -> None:
    """Every cut is exact, also where only what was read from the table crosses."""
    torch.manual_seed(0)
    found = truth(PositionsAfterALook(), [(torch.randn(2, 8),), (torch.randn(2, 8),)])
    assert not found.wrong, found.wrong
    assert not found.refused, found.refused
