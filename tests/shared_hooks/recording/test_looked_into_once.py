"""A recording does not look into calls of which it knows what they do below (`repeats`). That loses nothing: what it
finds is what a recording finds that looks into every call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused, IsthmusError
from shared_hooks.recording import trace as looked
from tests.covering import ALL
from tests.zoo import CASES, Case


def all_said(model: nn.Module, *args: Any, **kwargs: Any) -> list[Any]:
    """All that a plan says: its digest, and of every cut the bytes and the crossing, or why there is none."""
    with WrappedModel(model) as wrapped:
        try:
            plan = wrapped.plan(*args, **kwargs)
        except IsthmusError as error:
            return [type(error), str(error)]
        found: list[Any] = [plan.digest, [one.reason for one in plan.trace.refusals]]
        for number in range(-1, len(plan.layers)):
            try:
                found.append((plan.frontier_bytes(number), plan.cutting(number)[1].digest))
            except CutRefused as error:
                found.append(str(error))
        return found


def look_into_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(looked.Repeats, "may_be_unseen", False)


@pytest.mark.parametrize("case", CASES if ALL else CASES[::2], ids=lambda case: case.name)
def test_nothing_is_lost(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with case.setting():
        args, kwargs = case.inputs()
        one = all_said(case.build(), *args, **kwargs)
        look_into_all(monkeypatch)
        args, kwargs = case.inputs()
        assert all_said(case.build(), *args, **kwargs) == one


class Steps(nn.Module):
    """Six steps of a cell, with a view, a slice that is written to, and a constant on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(4, 4), nn.Linear(4, 3)
        self.start = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden, memory = self.start, torch.zeros(2, 4)
        kept = torch.empty(6, 2, 4)
        for step in range(6):
            hidden, memory = self.cell(x[:, step], (hidden, memory))
            kept[step] = hidden
        result: Tensor = self.out(kept.transpose(0, 1)[:, 2:])
        return result


def counted(patch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operations that run unseen from now on."""
    found: list[str] = []
    run = looked.run_unseen

    def noted(func: Any, args: Any, kwargs: Any) -> Any:
        found.append(func.__name__)
        return run(func, args, kwargs)

    patch.setattr("shared_hooks.recording.operations.run_unseen", noted)
    return found


def test_a_loop_is_looked_into_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Steps().eval(), torch.randn(2, 6, 4)
    unseen = counted(monkeypatch)
    one = all_said(model, x)
    # the first step begins with what hangs on no input, the second does not
    assert unseen.count("lstm_cell") == 4 and unseen.count("__setitem__") == 6
    # seven of the model's, six to see where a slice that is written to lies
    assert unseen.count("__getitem__") == 7 + 6
    look_into_all(monkeypatch)
    unseen.clear()
    assert all_said(model, x) == one and not unseen


def test_a_recording_that_differs_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Steps().eval(), torch.randn(2, 6, 4)
    one = all_said(model, x)
    unseen = counted(monkeypatch)
    monkeypatch.setattr(looked.Repeat, "gives", lambda *_: False)
    assert all_said(model, x) == one and unseen


class Draws(nn.Module):
    """The same call on the same forms, which draws, or reads what it is given."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call
        self.layer = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x + self.call(x))
        return x


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: torch.nn.functional.dropout(x, 0.5, True),
        lambda x: x[x.abs() > 0.5].sum(),
        lambda x: torch.masked_select(x, x > 0).sum(),
        lambda x: x.sum() if torch.allclose(x, x) else x,
        lambda x: torch.repeat_interleave(x, 2, 0)[:2],
    ],
)
def test_value_dependent_calls_are_examined(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    one = all_said(Draws(call), x)
    look_into_all(monkeypatch)
    assert all_said(Draws(call), x) == one


class Looks(nn.Module):
    """A model that looks at kernels itself sees all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[str] = []

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        with Mode():
            for _ in range(4):
                x = self.cell(x, x + 1)
        return x + len(seen)


def test_a_mode_of_the_models_own_sees_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Looks().eval(), torch.randn(2, 4)
    one = all_said(model, x)  # how many kernels it has seen stands in the digest
    look_into_all(monkeypatch)
    assert all_said(model, x) == one
