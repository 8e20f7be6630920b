"""Which modules are row-wise is proven by running them; what is not proven is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.generation.gates import is_row_wise

LIKE = torch.zeros(1, 1, 8)


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, rows: torch.Tensor) -> Any:
        return self.function(rows * self.scale)


ROW_WISE = {
    "linear": nn.Linear(8, 5),
    "norm": nn.LayerNorm(8),
    "rms norm": nn.RMSNorm(8),
    "sub-block": nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)),
    "softmax of a row": Function(lambda rows: rows.softmax(-1)),
    "written to what it made": Function(lambda rows: rows.mul_(2).relu_()),
    "residual": Function(lambda rows: rows + rows.mean(-1, keepdim=True)),
}
NOT_ROW_WISE = {
    "sum over rows": Function(lambda rows: rows + rows.sum(0, keepdim=True)),
    "attention": Function(lambda rows: (rows @ rows.transpose(-1, -2)).softmax(-1) @ rows),
    "running sum": Function(lambda rows: rows.cumsum(0)),
    "scaled by the largest of all": Function(lambda rows: rows / rows.abs().amax()),
    "softmax over the batch": Function(lambda rows: rows.softmax(0)),
    "depends on its place": Function(lambda rows: rows + torch.arange(len(rows)).view(-1, 1, 1)),
    "depends on the number of rows": Function(lambda rows: rows * len(rows)),
    "depends on the middle dimension": Function(lambda rows: rows * rows.shape[1]),
    "turned over": Function(lambda rows: rows.flip(0)),
    "dropout": nn.Dropout(0.5),
    "decides by a value": Function(lambda rows: rows if rows[0, 0, 0] > 0 else rows * 2),
    "sorts rows out": Function(lambda rows: rows[rows[..., 0] > 0]),
    "experts": Function(lambda rows: rows * rows.topk(1).indices),
    "another rank": Function(lambda rows: rows.mean(-1)),
    "two results": Function(lambda rows: (rows, rows)),
    "raises": Function(lambda rows: rows @ rows.new_zeros(3, 3)),
    "no floating point": Function(lambda rows: rows > 0),
}


@pytest.mark.parametrize("name", ROW_WISE)
def test_row_wise(name: str) -> None:
    assert is_row_wise(ROW_WISE[name], LIKE)


@pytest.mark.parametrize("name", NOT_ROW_WISE)
def test_not_row_wise(name: str) -> None:
    assert not is_row_wise(NOT_ROW_WISE[name].train(), LIKE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_of_every_precision(dtype: torch.dtype) -> None:
    """The tolerance is in units of the dtype's rounding: it holds for a long sum, too."""
    block = nn.Sequential(nn.Linear(2048, 64), nn.SiLU(), nn.Linear(64, 32)).to(dtype)
    assert is_row_wise(block, torch.zeros(1, 1, 2048, dtype=dtype))


def test_modules_and_inputs_are_left_unwritten() -> None:
    """A module that keeps something in a buffer is left as it was, and its input, too."""
    keeps = Function(lambda rows: rows)
    keeps.function = lambda rows: (keeps.seen.add_(rows.mean((0, 1))), rows)[1]
    assert not is_row_wise(keeps, LIKE)
    assert torch.equal(keeps.seen, torch.zeros(8))
    assert not is_row_wise(lambda rows: rows.mul_(2), LIKE)


def test_no_random_number_is_drawn() -> None:
    linear, dropout = nn.Linear(8, 8), nn.Dropout(0.5).train()
    before = torch.get_rng_state()
    assert is_row_wise(linear, LIKE)
    assert not is_row_wise(dropout, LIKE)
    assert torch.equal(torch.get_rng_state(), before)
