"""Names and sizes of what goes into a model and comes out, as any client sees them."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from cloud_server.models.admission import form_of, leaves
from shared_hooks import WrappedModel
from shared_hooks.tensors import flatten


class Pair(NamedTuple):
    first: torch.Tensor
    rest: list[torch.Tensor]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor, *more: torch.Tensor, mask: torch.Tensor, scale: float = 2.0) -> dict[str, Any]:
        table = self.weight(mask) * scale
        return {"table": table, "states": (table + 1, more[0] * 1), "count": 3, "ids": {"same": ids * 1}}


class Counting(nn.Module):
    """Keeps a number of its calls, takes even lengths only, and writes to its input."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x += 1
        return x.view(-1, 2).sum(1)


def form(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
    with WrappedModel(model.eval()) as wrapped:
        return form_of(wrapped.plan(*args, **kwargs), wrapped, args, kwargs)


def test_names_are_those_of_parameters_and_keys() -> None:
    ids, more, mask = torch.ones(3, 5), torch.ones(7), torch.ones(3, 4)
    found = form(Mixed(), ids, more, mask=mask, scale=3.0)
    assert found["inputs"] == [
        ["ids", "float32", [-1, -1]],
        ["more.0", "float32", [-1]],
        ["mask", "float32", [-1, 4]],
    ]
    assert found["outputs"] == [
        ["table", "float32", [-1, 2]],
        ["states.0", "float32", [-1, 2]],
        ["states.1", "float32", [-1]],
        ["ids.same", "float32", [-1, -1]],
    ]


def test_leaves_of_a_value() -> None:
    one = torch.ones(1)
    assert [name for name, _ in leaves(flatten(one)[0])] == ["output"]
    assert [name for name, _ in leaves(flatten((one, {"a": one}, 3))[0])] == ["output.0", "output.1.a", "output.2"]
    assert [name for name, _ in leaves(flatten({"p": Pair(one, [one])})[0])] == ["p.0", "p.1.0"]


def test_the_model_and_its_example_stay_as_they_are() -> None:
    model, x = Counting(), torch.zeros(4)
    with WrappedModel(model.eval()) as wrapped:
        plan, calls = wrapped.plan(x), model.calls
        x.zero_()
        found = form_of(plan, wrapped, (x,), {})
    assert "refused" not in found and model.calls == calls and not x.any()


class Keeping(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2


def test_buffers_stay_as_they_are() -> None:
    model = Keeping()
    with WrappedModel(model.eval()) as wrapped:
        plan = wrapped.plan(torch.ones(2))
        before = model.calls.clone()
        form_of(plan, wrapped, (torch.ones(2),), {})
    assert torch.equal(model.calls, before)


def test_a_model_that_fails_beside_its_plan_is_served_to_edges_none_the_less() -> None:
    model = nn.Linear(2, 2).eval()
    with WrappedModel(model) as wrapped:
        plan = wrapped.plan(torch.ones(1, 2))
        assert "fails on its example" in form_of(plan, wrapped, (torch.ones(1, 3),), {})["refused"]


@pytest.mark.parametrize("seed", [0, 1])
def test_generators_stay_as_they_are(seed: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    with WrappedModel(model.train()) as wrapped:
        plan = wrapped.plan(torch.ones(1, 2))
        torch.set_rng_state(before)
        form_of(plan, wrapped, (torch.ones(1, 2),), {})
    assert torch.equal(torch.get_rng_state(), before)
