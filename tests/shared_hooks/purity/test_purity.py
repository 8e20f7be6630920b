"""What is found pure, and what must never be: each module here that is not writes state, or might."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.models.digits.network import digits
from shared_hooks.purity.modules import is_pure, pure_modules, trouble_of
from studies.benchmarks.networks import CLASSICS
from tests.shared_hooks.purity.impure import IMPURE, SCALE, Counts, Global, Plain, logged, noted, with_forward


class Bottleneck(nn.Module):
    """As torchvision writes it."""

    expansion: int = 4

    def __init__(self, width: int = 4, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        result: Tensor = self.relu(out)
        return result


class Dense(nn.Module):
    """Loops, lists made here, helpers, module lists, a default argument, a choice by name."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.gate = nn.Parameter(torch.ones(4))
        self.sizes, self.mode, self.act = [4, 4], "relu", F.gelu

    def _mixed(self, x: Tensor, scale: float) -> Tensor:
        return (x * self.gate * scale).clamp(min=0)

    @staticmethod
    def _twice(x: Tensor) -> Tensor:
        return torch.cat([x, x], dim=-1).chunk(2, -1)[0]

    def forward(self, x: Tensor, scale: float = 1.0, *more: Tensor) -> tuple[Tensor, Tensor]:
        """Something."""
        outs = []
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x)) if number % 2 else self.act(conv(x))
            outs.append(x)
        for _, layer in self.named.items():
            x = layer(x)
        x = self.convs[0](x)
        for conv in self.convs[1:]:
            x = conv(x)
        if self.mode == "relu" and not self.training:
            x = F.relu(x) * SCALE
        elif self.mode != "none":
            raise ValueError(f"no mode {self.mode}")
        total = sum([out * 1 for out in outs]) + torch.zeros(self.sizes[0], dtype=x.dtype)
        assert_free = x.reshape(x.shape[0], -1)
        return self._mixed(self._twice(x), scale), total + assert_free.mean()


class OnlyBuilt(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), Bottleneck())


PURE: list[Callable[[], nn.Module]] = [
    Bottleneck,
    lambda: Bottleneck(4, nn.Sequential(nn.Conv2d(4, 4, 1), Bottleneck())),
    Dense,
    OnlyBuilt,
    lambda: nn.LSTM(4, 4, 2, bidirectional=True),
    lambda: nn.MultiheadAttention(8, 2),
    lambda: nn.TransformerEncoderLayer(8, 2, activation="gelu"),
    lambda: nn.TransformerEncoderLayer(8, 2, activation=F.relu),
    lambda: nn.Embedding(3, 4),
    lambda: nn.BatchNorm1d(4).train(),
]


@pytest.mark.parametrize("build", PURE)
def test_computing_modules_are_pure(build: Callable[[], nn.Module]) -> None:
    module = build()
    assert trouble_of(module) == ""
    assert pure_modules(module.modules()) >= {part for part in module.modules() if type(part) is not nn.ModuleList}


@pytest.mark.parametrize("build", [*CLASSICS.values(), digits])
def test_real_networks_are_pure(build: Callable[[], nn.Module]) -> None:
    model = build()
    found = {type(module).__name__: trouble_of(module) for module in model.modules()}
    assert not any(found.values()), found


def test_our_own_shim_is_no_override() -> None:
    model = Bottleneck()
    with WrappedModel(model) as wrapped:
        wrapped.plan(torch.ones(1, 4, 3, 3))
        assert "forward" in model.__dict__
        assert pure_modules(model.modules()) == set(model.modules())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IMPURE)
def test_modules_that_may_write_state_are_impure(name: str) -> None:
    assert not is_pure(IMPURE[name]())


def test_a_child_replaced_later_is_looked_at_again() -> None:
    module = Plain()
    assert is_pure(module)
    module.child = Counts()
    assert not is_pure(module)
    module.child = nn.ReLU()
    assert is_pure(module)


def test_a_class_changed_later_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module, relu = Plain(), nn.ReLU()
    assert is_pure(module) and is_pure(relu)
    monkeypatch.setattr(Plain, "forward", Global.forward)
    assert not is_pure(module)
    monkeypatch.undo()
    assert is_pure(module)
    monkeypatch.setattr(nn.ReLU, "forward", noted)
    assert not is_pure(relu)
    monkeypatch.undo()
    monkeypatch.setattr(F, "relu", logged(F.relu))
    assert not is_pure(relu)
    monkeypatch.undo()
    monkeypatch.setattr(nn.Module, "__call__", functools.partialmethod(nn.Module.__call__))
    assert not is_pure(relu)
    monkeypatch.undo()
    assert is_pure(relu)


def test_a_hook_for_all_modules_is_seen() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    assert not is_pure(nn.ReLU())
    handle.remove()
    assert is_pure(nn.ReLU())


def test_a_shim_over_a_forward_of_the_instance_is_none_of_ours() -> None:
    with WrappedModel(with_forward(Plain)) as wrapped:
        assert not is_pure(wrapped.model)


def test_children_of_what_failed_are_judged_by_themselves() -> None:
    """A parent and a child that call each other: that the parent fails tells on the child, not on its brothers."""
    parent = Counts()
    child = Plain()
    child.__dict__["child"] = parent
    parent.other = child
    known: dict[nn.Module, str] = {}
    assert not is_pure(parent, known) and not is_pure(child, known) and is_pure(parent.child, known)


def test_a_function_of_torchs_that_is_replaced_is_seen_and_so_is_its_return(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_pure(nn.Linear(2, 2))
    with monkeypatch.context() as patched:
        patched.setattr(nn.functional, "relu", lambda x: x)
        assert trouble_of(nn.Linear(2, 2)) == "functions of torch are replaced"
        assert not is_pure(nn.ReLU())
    assert is_pure(nn.Linear(2, 2)) and is_pure(nn.ReLU())
