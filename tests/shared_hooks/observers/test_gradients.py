"""Full backward hooks: gradients by inputs and outputs against autograd, each with the call it belongs to."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_hooks.errors import InputMismatch
from shared_hooks.observers import GradientStats
from tests.shared_hooks.observers.left import hooks_left
from tests.shared_hooks.observers.small import Residual, image


@pytest.fixture(autouse=True)
def _without_torchs_advice() -> Iterator[None]:
    with warnings.catch_warnings():
        # of modules that are given data, which needs no gradient, or give a dictionary
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        warnings.filterwarnings("ignore", message="For backward hooks to be called")
        yield


class Mixing(nn.Module):
    """(n, 4) -> (n, 4); its block takes two inputs and gives two outputs, and its layer is called twice."""

    class Block(nn.Module):
        def forward(self, x: Tensor, scale: float, y: Tensor) -> tuple[Tensor, Tensor]:
            return x * y * scale, x.sin()

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.block = nn.Linear(4, 4), Mixing.Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        y = self.layer(x)
        one, other = self.block(x, 0.5, y)
        return one * other


def given(seed: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def check(record: Any, expected: Tensor) -> None:
    assert record.shape == tuple(expected.shape)
    assert record.mean == pytest.approx(expected.mean().item(), rel=1e-4, abs=1e-7)
    assert record.norm == pytest.approx(expected.norm().item(), rel=1e-4, abs=1e-7)


def test_gradients_by_inputs_and_outputs_are_autograds() -> None:
    model, x = Mixing(), given()
    with GradientStats(full=True).attach(model) as stats:
        model(x).square().sum().backward()
    hidden = model.layer(x)
    second = model.layer(hidden)
    one, other = model.block(hidden_in := hidden * 1, 0.5, second_in := second * 1)
    loss = (one * other).square().sum()
    wanted = {
        ("layer", "input", ""): x,
        ("layer", "output", ""): hidden,
        ("layer#2", "output", ""): second,
        ("block", "input", "0"): hidden_in,
        ("block", "input", "2"): second_in,
        ("block", "output", "0"): one,
        ("block", "output", "1"): other,
    }
    grads = dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))
    # what the second call of the layer gave back to its input is not all that came back to that value
    grads["layer#2", "input", ""] = grads["layer#2", "output", ""] @ model.layer.weight
    found = {(record.name, record.of, record.part): record for record in stats.records}
    assert set(found) == set(grads) and len(stats.records) == len(grads) and not stats.failures
    for key, grad in grads.items():
        check(found[key], grad)
    assert not hooks_left(model) and model.layer._is_full_backward_hook is None


def test_both_kinds_of_hooks_say_the_same_of_outputs() -> None:
    model = Mixing()
    with GradientStats(full=True).attach(model) as full, GradientStats().attach(model) as plain:
        model(given()).sum().backward()
    outputs = {(one.name, one.part): one.mean for one in full.records if one.of == "output"}
    assert outputs == {(one.name, one.part): one.mean for one in plain.records}
    assert {one.of for one in plain.records} == {"output"}


def test_gradients_of_parameters_are_the_same() -> None:
    plain, watched = Mixing(), Mixing()
    watched.load_state_dict(plain.state_dict())
    with GradientStats(full=True).attach(watched):
        watched(given()).sum().backward()
    plain(given()).sum().backward()
    pairs = zip(plain.parameters(), watched.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)  # type: ignore[arg-type]


def test_a_gradient_belongs_to_its_own_forward() -> None:
    """Backward passes in any order, after other forwards; steps that are not observed have no record."""
    model = nn.Sequential(nn.Linear(4, 4))
    with GradientStats(["0"], every_n=2, full=True).attach(model) as stats:
        losses = [model(given(step)).sum() * (step + 1) for step in range(5)]
        for step in (3, 0, 4, 1, 2):
            losses[step].backward()
    outputs = {record.step: record.mean for record in stats.records if record.of == "output"}
    assert outputs == {0: 1.0, 2: 3.0, 4: 5.0}


def test_a_first_layer_on_data_has_no_gradient_by_its_input() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with GradientStats(full=True).attach(model) as stats:
        model(given().detach()).sum().backward()
    assert [(one.name, one.of) for one in stats.records] == [("1", "input"), ("1", "output"), ("0", "output")]


def test_after_detaching_nothing_is_reported_and_nothing_stays() -> None:
    model = Mixing()
    stats = GradientStats(full=True)
    with stats.attach(model):
        loss = model(given()).sum()
    loss.backward()
    assert stats.records == [] and not hooks_left(model)
    with pytest.raises(ZeroDivisionError), stats.attach(model), stats.attach(model.layer):
        assert hooks_left(model)
        raise ZeroDivisionError
    assert not hooks_left(model)
    gone = weakref.ref(model)
    del model, loss
    gc.collect()
    assert gone() is None


def test_the_users_own_hooks_stay() -> None:
    model, reported = nn.Sequential(nn.Linear(4, 4)), []
    handle = model[0].register_full_backward_hook(lambda *given: reported.append(1))
    with GradientStats(full=True).attach(model) as stats:
        model(given()).sum().backward()
    assert reported == [1] and len(stats.records) == 2
    model(given()).sum().backward()
    assert reported == [1, 1] and model[0]._is_full_backward_hook
    handle.remove()
    old = nn.Linear(4, 4)
    old.register_backward_hook(lambda *given: None)
    with pytest.raises(InputMismatch, match="does not accept a full backward hook"):
        GradientStats(full=True).attach(nn.Sequential(nn.Linear(4, 4), old))
    assert hooks_left(old) == [""] and not old._forward_pre_hooks


def test_limits_of_full_backward_hooks() -> None:
    model = Residual()  # its ReLU works in place
    with GradientStats(full=True).attach(model), pytest.raises(RuntimeError, match="modified inplace"):
        model(image())
    assert not hooks_left(model)
    with GradientStats().attach(model) as stats:
        model(image()).sum().backward()
    assert stats.records


def test_outputs_out_of_sight_are_said() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x * 2}

    model = Named()
    with GradientStats("", full=True).attach(model) as stats:
        model(given())["x"].sum().backward()
    assert stats.records == [] and stats.notes == ("full backward hooks do not see into dict (first: (model))",)
