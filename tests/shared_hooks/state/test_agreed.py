"""What somebody changes on a model after two sides agreed on it is noticed, and what its own code does is not."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.modules.constants import weights_hash
from shared_hooks.state.agreed import Agreed, TensorSamples
from tests.zoo import CASES, Case

SCALE = 2.0
TABLE = {"a": 1.0}


class Last(nn.Module):
    """Reads something of every kind, and keeps some things itself."""

    size = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()
        self.mode, self.scale, self.tensor, self.function = "mul", 2.0, torch.full((8,), 2.0), torch.relu
        self.listed, self.named, self.settings = [torch.ones(8), 2.0], {"a": "mul"}, SimpleNamespace(shift=0.5)
        self.register_buffer("table", torch.full((8,), 2.0), persistent=False)
        self.calls, self.memo, self.last, self.unread = 0, {}, None, 1

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = x
        self.remember(len(x))
        x = self.act(self.norm(self.linear(x)))
        x = x * self.scale if self.mode == "mul" else x + self.scale
        x = x * self.tensor * self.listed[0] * self.listed[1] + self.table
        x = x if self.named["a"] == "mul" else x * self.settings.shift
        return self.function(self.helper(x)) * SCALE * TABLE["a"] * self.size + self.settings.shift

    def remember(self, count: int) -> None:
        if count not in self.memo:
            self.memo[count] = count


class Net(nn.Module):
    """Whose last module is `Last`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), Last()
        self.rest = nn.Sequential(nn.Dropout(0.1), nn.LeakyReLU(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rest(self.last(self.first(x)))
        return found


class Other(Last):
    """Does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _set(name: str, value: Any) -> Callable[[Net], None]:
    def change(model: Net) -> None:
        *ways, last = name.split(".")
        held: Any = model
        for way in ways:
            held = held[way] if isinstance(held, dict) else getattr(held, way)
        if isinstance(held, (dict, list)):
            held[int(last) if last.isdecimal() else last] = value() if callable(value) else value
        else:
            setattr(held, last, value() if isinstance(value, types.LambdaType) else value)

    return change


CHANGES: dict[str, Callable[[Net], Any]] = {
    "the weights, in place": lambda model: model.last.linear.weight.add_(1),
    "the weights, other memory": lambda model: setattr(model.last.linear.weight, "data", torch.ones(8, 8)),
    "the weights, through data": lambda model: model.last.linear.weight.data.add_(1),
    "the weights, by NumPy": lambda model: model.last.linear.weight.detach().numpy().fill(1),
    "a buffer through data": lambda model: model.last.table.data.mul_(2),
    "the weights, another parameter": _set("last.linear.weight", lambda: nn.Parameter(torch.ones(8, 8))),
    "last.linear": _set("last.linear", lambda: nn.Linear(8, 8)),
    "rest.1": lambda model: model.rest.__setitem__(1, nn.GELU()),
    "rest.1.negative_slope": _set("rest.1.negative_slope", 0.2),
    "last.norm.eps": _set("last.norm.eps", 0.1),
    "last.mode": _set("last.mode", "add"),
    "last.scale": _set("last.scale", 3.0),
    "last.tensor": _set("last.tensor", lambda: torch.full((8,), 9.0)),
    "a tensor in place": lambda model: model.last.tensor.mul_(2),
    "a buffer in place": lambda model: model.last.table.mul_(2),
    "last.table": _set("last.table", lambda: torch.full((8,), 9.0)),
    "a list": _set("last.listed.1", 7.0),
    "a tensor in a list": lambda model: model.last.listed[0].add_(1),
    "a dictionary": _set("last.named.a", "add"),
    "last.settings.shift": _set("last.settings.shift", 1.5),
    "last.function": lambda model: setattr(model.last, "function", torch.tanh),
    "a method": lambda model: setattr(model.last, "helper", lambda x: x * 3),
    "a forward": lambda model: setattr(model.last.linear, "forward", lambda x: x * 3),
    "a class": lambda model: setattr(model.last, "__class__", Other),
}


def agreed(model: nn.Module) -> Agreed:
    found = Agreed(model)
    found.agree(weights_hash(model))
    return found


@pytest.mark.parametrize("what", CHANGES)
@torch.no_grad()
def test_changes_by_others_are_noticed(what: str) -> None:
    model = Net().eval()
    found = agreed(model)
    model(torch.ones(2, 8))
    found.ran()
    assert found.changed() == ""
    CHANGES[what](model)
    assert not found.is_same and found.changed() != ""
    assert found.changed() != ""  # looking does not settle it


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_elements_are_looked_at_where_they_are(dtype: torch.dtype) -> None:
    whole = torch.arange(1, 61, dtype=torch.float32).to(dtype)
    views = [whole, whole[7:], whole.view(6, 10).t(), whole.view(3, 4, 5)[1:, :, ::2], whole[:0], whole[3]]
    samples = TensorSamples(views)
    before = samples.now()
    bits = whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()])
    at = torch.arange(60)
    flat = [one.reshape(-1) for one in (at, at[7:], at.view(6, 10).t(), at.view(3, 4, 5)[1:, :, ::2], at[3])]
    places = [int(one[n]) for one in flat for n in sorted({0, len(one) // 2, len(one) - 1})]
    mask = (1 << 8 * whole.element_size()) - 1
    assert before == [int(bits[place]) & mask for place in places]
    whole.data.zero_()
    assert samples.now() == [0] * len(before)


@pytest.mark.parametrize("name", ["size", "helper", "forward"])
def test_state_of_a_class(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = agreed(Net())
    monkeypatch.setattr(Last, name, 5.0 if name == "size" else lambda self, x: x)
    assert found.changed() == f"Last.{name}"


def test_state_of_a_global(monkeypatch: pytest.MonkeyPatch) -> None:
    found = agreed(Net())
    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.SCALE", 5.0)
        assert "SCALE" in found.changed()
    assert found.changed() == ""
    monkeypatch.setitem(TABLE, "a", 5.0)
    assert "TABLE" in found.changed()


@torch.no_grad()
def test_changes_by_the_model_itself_do_not_count() -> None:
    model = Net().eval()
    found = agreed(model)
    for rows in range(1, 5):
        model(torch.ones(rows, 8))
        found.ran()
        assert found.changed() == ""
    model.last.unread = 7
    model.train()
    assert found.changed() == ""


@torch.no_grad()
def test_the_same_again_is_no_change() -> None:
    model = Net().eval()
    found = agreed(model)
    model.load_state_dict(model.state_dict())
    model.last.scale = float("2.0")
    model.last.tensor.copy_(model.last.tensor.clone())
    assert found.changed() == ""
    model.last.linear.weight.add_(1)
    assert found.changed() == "the weights"


def test_hooks_are_distinguished_by_the_module() -> None:
    model = Net()
    found = agreed(model)
    assert found.hooked() == []
    handle = model.last.linear.register_forward_hook(lambda *_: None)
    assert not found.is_same and found.changed() == "" and found.hooked() == [model.last.linear]
    handle.remove()
    assert found.is_same and found.hooked() == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_of_any_model_changes_nothing(case: Case) -> None:
    """But for what its code sets, and what the run wrote to its tensors."""
    model = case.build().eval()
    args, kwargs = case.inputs()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(*args, **kwargs)
        found = agreed(model)
        model(*args, **kwargs)
    found.ran()
    assert found.changed() == ""


class Subclass(torch.Tensor):
    """A tensor whose class is its own."""


def test_tensors_of_other_classes_are_reported_by_identity() -> None:
    model = Net()
    model.last.table = torch.ones(8).as_subclass(Subclass)
    found = agreed(model)
    assert found.is_same and found.changed() == ""
    model.last.table = torch.ones(8).as_subclass(Subclass) + 1
    assert found.changed() == "Net.last.table"


def test_the_same_weights_in_other_memory_are_looked_at_once() -> None:
    model = Net()
    found = agreed(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert not found.is_same and found.changed() == "" and found.is_same


def test_a_variable_that_has_no_value_yet() -> None:
    def made() -> nn.Module:
        class Model(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * later if self.training else super().forward(x)

        model = Model(4, 4)
        assert agreed(model).changed() == ""
        later = 2.0
        assert later
        return model

    assert agreed(made()).is_same


@torch.no_grad()
def test_agreeing_on_weights_forgives_no_other_tensor() -> None:
    model = Net()
    found = Agreed(model)
    model.last.table.mul_(2)
    model.last.linear.weight.mul_(2)
    found.agree(weights_hash(model))
    assert not found.is_same and found.changed() == "a tensor that the model keeps"
    model.last.table.div_(2)
    assert found.changed() == ""
    model.last.linear.weight.mul_(2)
    assert found.changed() == "the weights"


@torch.no_grad()
def test_weights_of_which_the_state_dictionary_holds_copies() -> None:
    model = Net()
    model.register_state_dict_post_hook(
        lambda module, state, *_: state.update({name: one.clone() for name, one in state.items()})
    )
    found = agreed(model)
    assert found.is_same
    model.last.linear.weight.add_(1)
    assert not found.is_same and found.changed() == "the weights"
