"""Two workers on one model whose Python keeps something from one line to the next: nobody is given another's data."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shared_hooks import WrappedModel


class Keeps(nn.Module):
    """(x (B, 16)) -> (B, 16). Keeps a tensor in an attribute, and takes it back at its end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.first(x)
        y = self.second(x)
        for _ in range(5):
            y = y + self.third(y)
        out: torch.Tensor = y + self.kept
        self.kept = None
        return out


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns after every few lines."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_answers_are_everybodys_own(hurried: None) -> None:
    inputs = [torch.randn(4, 16) for _ in range(2)]
    with WrappedModel(Keeps()) as edge, WrappedModel(Keeps()) as cloud:
        wanted = [edge.whole(x) for x in inputs]
        heads = [edge.head("input", x) for x in inputs]
        found: list[str] = []

        def ask(number: int) -> None:
            for _ in range(100):
                try:
                    found.append("right" if torch.equal(cloud.tail(heads[number]), wanted[number]) else "wrong")
                except Exception as error:
                    found.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(found) == {"right"} and len(found) == 200
