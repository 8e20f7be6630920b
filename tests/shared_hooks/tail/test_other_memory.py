"""A tensor that is given another's memory: a placeholder's is not there, and reading it would end the process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import IsthmusError

Change = Callable[[Tensor], Tensor]


def of_a_product(x: Tensor) -> Tensor:
    x = x + 0
    x.data = x * 2
    return x * 1


def of_a_constant(x: Tensor) -> Tensor:
    v = torch.ones(8)
    v.data = v * 2
    return x + v * 1


def of_both(x: Tensor) -> Tensor:
    v = torch.ones(2, 8)
    v.data = x
    return v * 1


def by_set(x: Tensor) -> Tensor:
    v = torch.ones(2, 8)
    v.set_(x * 2)
    return v + 1


class Net(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.sub, self.b = nn.Linear(8, 8), Sub(change), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.sub(self.a(x)))
        return found


class Sub(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


@pytest.mark.parametrize("change", [of_a_product, of_a_constant, of_both, by_set])
def test_exact_or_refused(change: Change) -> None:
    x, exact = torch.randn(2, 8), 0
    with WrappedModel(Net(change).eval()) as edge, WrappedModel(Net(change).eval()) as cloud:
        edge.plan(x)
        for cut in ("input", 0, 1, 2):
            try:
                found = cloud.tail(EarlyOutput.from_bytes(edge.head(cut, x).to_bytes()))
            except IsthmusError:
                continue
            assert torch.equal(found, edge.model(x.clone()))
            exact += 1
    assert exact >= 2
