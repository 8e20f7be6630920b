"""Models built without memory for their parameters; all else as the factory makes it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shared_hooks.models.weights import unfilled


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        shared = nn.Parameter(torch.zeros(3))
        self.one, self.other = shared, shared
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class ReadsWhatItMade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.largest = self.linear.weight.abs().max().item()


class KeepsAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.rows = [self.linear.weight.detach()[:2]]


class DrawsATable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(4), persistent=False)


def test_parameters_have_no_memory_and_stay_tied() -> None:
    model: Any = unfilled(Tied)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert model.head.weight is model.embed.weight and model.one is model.other
    assert model.table.tolist() == [0, 1, 2, 3]
    assert not nn.Linear(2, 2).weight.is_meta, "only what it builds"


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_scripted_model_has_its_own_memory() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4))

    model: Any = unfilled(Inner)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("kind", [ReadsWhatItMade, KeepsAView, DrawsATable])
def test_weights_whose_values_are_needed_are_filled(kind: type[nn.Module]) -> None:
    torch.manual_seed(3)
    wanted: Any = kind()
    torch.manual_seed(3)
    model: Any = unfilled(kind)
    assert torch.equal(model.linear.weight, wanted.linear.weight)
    for name in ("table", "largest"):
        assert torch.equal(torch.as_tensor(getattr(model, name, 0)), torch.as_tensor(getattr(wanted, name, 0)))


def _put_back() -> float:
    """As a factory does that wants to disturb nobody."""
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


DRAWS: dict[str, Callable[[], object]] = {
    "array": lambda: torch.randn(4).numpy(),
    "number in a dictionary": lambda: {"scale": torch.rand(()).item()},
    "closure": lambda: (lambda scale: lambda: scale)(torch.rand(()).item()),
    "truth value": lambda: bool(torch.randint(1 << 20, ()).item() % 2),
    "in place": lambda: torch.empty(3).uniform_().tolist(),
    "order": lambda: torch.randperm(1000).tolist(),
    "put back": _put_back,
    "numpy": lambda: np.random.rand(3).tolist(),  # noqa: NPY002
    "python": lambda: [random.random()],
}
FORGOTTEN: list[object] = []


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("what", DRAWS)
def test_random_initialisation_equals_an_ordinary_build(what: str, where: str) -> None:
    """Wherever it goes: onto the model, or into a variable of a module; and whatever comes after it."""

    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if where == "before":
                self.kept = DRAWS[what]()
            self.linear, self.drawn = nn.Linear(4, 4), nn.Parameter(torch.randn(2))
            if where == "after":
                self.kept = DRAWS[what]()
            FORGOTTEN.append(DRAWS[what]())

    def reported(value: Any) -> str:
        return repr(value() if callable(value) else value)

    def everything(build: Callable[[], Any]) -> list[str]:
        torch.manual_seed(3)
        np.random.seed(3)  # noqa: NPY002
        random.seed(3)
        model = build()
        return [
            reported(model.kept),
            reported(FORGOTTEN[-1]),
            reported(torch.rand(1)),
            reported(np.random.rand(1)),  # noqa: NPY002
            reported(random.random()),
        ]

    wanted = everything(Draws)
    assert everything(lambda: unfilled(Draws)) == wanted


def test_an_error_is_the_factorys_own() -> None:
    def fails() -> nn.Module:
        nn.Linear(2, 2)
        raise RuntimeError("no such size")

    with pytest.raises(RuntimeError, match="no such size"):
        unfilled(fails)
    assert not nn.Linear(2, 2).weight.is_meta
