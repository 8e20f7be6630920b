"""`verify` with a cold model: what one model in one process hides is found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from tests.shared_hooks.test_cold import Grows, Memo, Two, made


class Warm(Two):
    """Its answer depends on how often it ran, which a model that has run by then does not show."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.c(self.b(self.a(x)))
        return found


def test_all_is_exact_for_a_plain_model() -> None:
    x = torch.randn(2, 8)
    with WrappedModel(made(Warm)) as wrapped:
        report = wrapped.verify(x, cold=lambda: made(Warm))
        assert report.ok and report.input_exact and len(report.exact) == 3 and not report.differing


@pytest.mark.parametrize("kind", [Memo, Grows])
def test_what_is_exact_or_refused_is_so_cold(kind: type[nn.Module]) -> None:
    with WrappedModel(made(kind)) as wrapped:
        assert not wrapped.verify(torch.randn(3, 8), cold=lambda: made(kind)).differing


def test_a_side_that_is_another_model_differs_and_is_refused_from_then_on() -> None:
    """As a model that is not the same each time it is made."""

    def other() -> nn.Module:
        torch.manual_seed(next(seeds))
        return Warm().eval()

    seeds = iter(range(5, 50))
    with WrappedModel(made(Warm)) as wrapped:
        report = wrapped.verify(torch.randn(2, 8), cold=other)
        assert not report.ok and len(report.differing) == 3 and not report.input_exact
        assert not any(layer.can_split for layer in wrapped.layers)
