"""Models that raise, inputs that do not fit: an error, and the wrapper works on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import InputMismatch, IsthmusError, ModelFailed
from tests.shared_hooks.cutting import through_bytes
from tests.zoo.case import Draw, seeded
from tests.zoo.compare import same
from tests.zoo.skips import Residual

build = seeded(Residual)
X = Draw(7).randn(2, 3, 16, 16)


def reference(x: Tensor, model: nn.Module | None = None) -> Any:
    with torch.no_grad():
        return (model or build())(x)


class Fragile(nn.Module):
    """Raises for inputs whose first value is beyond 100."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.a(x)))
        if self.armed:
            raise ValueError("the model's own complaint")
        return self.c(x)


def test_a_model_that_raises_leaves_the_wrapper_usable() -> None:
    x = Draw(0).randn(2, 8)
    with WrappedModel(seeded(Fragile)()) as wrapped:
        expected, early = wrapped.forward(x), wrapped.forward(x, end=0)
        wrapped.model.armed = True
        for attempt in (lambda: wrapped.forward(x), lambda: wrapped.forward(early, start=0)):
            with pytest.raises((ValueError, ModelFailed)) as caught:
                attempt()
            chain = [caught.value, caught.value.__cause__]
            assert any(isinstance(error, ValueError) and "own complaint" in str(error) for error in chain)
        with pytest.raises((ValueError, ModelFailed)):
            wrapped.forward(x, end=0)  # a flag of the model changed: the plan is another, and making it fails
        wrapped.model.armed = False
        assert same(wrapped.forward(x), expected)
        assert same(wrapped.forward(wrapped.forward(x, end=1), start=1), expected)


def test_a_model_that_raises_while_planned() -> None:
    x = Draw(0).randn(2, 8)
    with WrappedModel(seeded(Fragile)()) as wrapped:
        wrapped.model.armed = True
        with pytest.raises((ValueError, ModelFailed)):
            wrapped.plan(x)
        wrapped.model.armed = False
        assert same(wrapped.forward(wrapped.forward(x, end=1), start=1), reference(x, seeded(Fragile)()))


@pytest.mark.parametrize(
    "call",
    [
        ((), {}),
        ((torch.ones(2, 5, 16, 16),), {}),
        ((X, X), {}),
        ((X,), {"nonsense": 1}),
        (("text",), {}),
        ((None,), {}),
    ],
    ids=["nothing", "channels", "too many", "keyword", "string", "none"],
)
def test_inputs_the_model_does_not_take(call: Any) -> None:
    """What the model itself says, or an error of ours; and the wrapper works on."""
    args, kwargs = call
    with WrappedModel(build()) as wrapped:
        wrapped.plan(X)
        for cut in (None, 3):
            with pytest.raises((IsthmusError, TypeError, RuntimeError, AttributeError)):
                wrapped.forward(*args, end=cut, **kwargs)
        assert same(wrapped.forward(wrapped.forward(X, end=3), start=3), reference(X))


def test_frontiers_of_another_shape_are_not_swallowed() -> None:
    """A tail planned for one batch resumes an early output of another, or says why not."""
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    cloud.plan(X)
    x = Draw(4).randn(3, 3, 16, 16)
    early = through_bytes(edge.forward(x, end=4))
    try:
        assert same(cloud.forward(early, start=4), reference(x))
    except InputMismatch:
        pass
