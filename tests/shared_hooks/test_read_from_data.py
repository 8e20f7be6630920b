"""A number read from data may choose a place, an operand or a result: never a quiet wrong answer.

Each model is planned on one input and cut on another that makes the other choice, against a cloud that never plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import PlanMismatch
from shared_hooks.tensors.staging import identical
from tests.shared_hooks.cutting import through_bytes


class Choice(nn.Module):
    """Two layers inside, one outside; ``kind`` is what the sign of the input decides."""

    def __init__(self, kind: Callable[[Tensor, Tensor, bool], Any]) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.kind(self.a(x), self.b(x), bool(x.sum() > 0))


class Outer(nn.Module):
    """Uses whatever the inner module returns."""

    def __init__(self, kind: Callable[[Tensor, Tensor, bool], Any], use: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner, self.use = Choice(kind), use
        self.c, self.d = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.inner(x)
        return self.d(self.c(self.use(chosen)).relu()) + self.use(chosen)


class PlaceAfterTheCut(nn.Module):
    """Read before the cut, used as an index after it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        place = 1 if x.sum().item() > 0 else 3
        other = self.b(x)
        hidden[:, place].mul_(2)
        return self.c(other) + hidden[:, place : place + 1]


def returned(choice: Any) -> Tensor:
    value, name = choice if isinstance(choice, tuple) else next(iter((v, k) for k, v in choice.items()))
    return value * (2 if name in ("plus", None) else 3)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "one of two": lambda: Outer(lambda p, q, yes: p if yes else q, lambda c: c),
    "swapped": lambda: Outer(lambda p, q, yes: (p, q) if yes else (q, p), lambda c: c[0] - 2 * c[1]),
    "a word": lambda: Outer(lambda p, q, yes: (p, "plus" if yes else "minus"), returned),
    "a key": lambda: Outer(lambda p, q, yes: {"plus" if yes else "minus": p}, returned),
    "nothing or something": lambda: Outer(lambda p, q, yes: (p, None if yes else "x"), returned),
    "a row": lambda: Outer(lambda p, q, yes: (p[:, 1:3] if yes else p[:, 2:4]).repeat(1, 2), lambda c: c),
    "an order": lambda: Outer(lambda p, q, yes: torch.stack([p, q] if yes else [q, p])[0], lambda c: c),
    "a place after the cut": PlaceAfterTheCut,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_other_choice_is_exact_or_an_error(name: str, sign: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return MODELS[name]().eval()

    planned, other = sign * torch.full((2, 4), 0.5), -sign * torch.linspace(0.1, 0.8, 8).reshape(2, 4)
    with torch.no_grad():
        expected = build()(other.clone())
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    edge.plan(planned)
    exact = 0
    for cut in ("input", *range(len(edge.layers))):
        early = edge.forward(other, end=cut)
        received = through_bytes(early)
        try:
            for _ in range(2):  # and what was sent is as it was
                assert identical(cloud.forward(received, start=early.layer_id), expected), f"cut {cut}"
            exact += 1
        except PlanMismatch:
            edge.plan(other)  # what the edge client does upon this error
            early = edge.forward(other, end=cut)
            assert identical(cloud.forward(through_bytes(early), start=early.layer_id), expected), f"cut {cut}, planned"
    assert exact >= len(edge.layers) // 2
