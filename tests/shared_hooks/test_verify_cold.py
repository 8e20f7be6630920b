"""`verify` with a cold model: what one model in one process hides is found."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.apart import Apart
from shared_hooks.errors import ModelFailed
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


def test_processes_of_their_own_show_what_one_shares() -> None:
    x = torch.randn(2, 8)
    with WrappedModel(made(Warm)) as wrapped:
        report = wrapped.verify(x, cold=partial(made, Warm), processes=True)
        assert report.ok and report.input_exact and len(report.exact) == 3
    assert os.getpid() not in told_pids(partial(told_pid, made(Warm)))


def told_pid(model: nn.Module) -> nn.Module:
    model.register_buffer("pid", torch.tensor(os.getpid()))
    model.forward = lambda x: model.pid  # type: ignore[method-assign,assignment]
    return model


def told_pids(make: partial[nn.Module]) -> list[int]:
    with Apart(make, WrappedModel) as one, Apart(make, WrappedModel) as other:
        return [int(each.whole((torch.zeros(1),), {}, torch.get_rng_state())) for each in (one, other)]


def test_a_model_that_fails_there_says_so() -> None:
    with Apart(partial(made, Warm), WrappedModel) as apart, pytest.raises(ModelFailed, match="mat1 and mat2"):
        apart.whole((torch.zeros(1, 3),), {}, torch.get_rng_state())
    with pytest.raises(ModelFailed, match="cannot be made in another process"):
        Apart(lambda: made(Warm), WrappedModel)
