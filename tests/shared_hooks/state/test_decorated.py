"""Code behind decorators of libraries is looked at as any: what it keeps is state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused

KEPT: dict[str, float] = {}


def keeps(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = nn.Linear.forward(self, x)
    if "scale" not in KEPT:
        KEPT["scale"] = float(x.detach().abs().max())
    return x * KEPT["scale"]


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.no_grad()(torch.inference_mode()(function))


@pytest.mark.parametrize(
    "decorator", [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", enabled=False), twice],
    ids=["no_grad", "inference_mode", "autocast", "twice"],
)  # fmt: skip
def test_state_of_a_decorated_forward_is_refused(decorator: Any) -> None:
    KEPT.clear()
    decorated = type("Decorated", (nn.Linear,), {"forward": decorator(keeps), "__module__": __name__})
    model = nn.Sequential(nn.Linear(8, 8), decorated(8, 8)).eval()
    x = torch.randn(1, 8)
    with WrappedModel(model) as wrapped, pytest.raises(CutRefused, match="KEPT"):
        wrapped.head("0", x)
