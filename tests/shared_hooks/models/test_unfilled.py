"""Models built without memory for their parameters; all else as the factory makes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.models.unfilled import unfilled


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
def test_what_needs_its_values_gets_them(kind: type[nn.Module]) -> None:
    torch.manual_seed(3)
    wanted: Any = kind()
    torch.manual_seed(3)
    model: Any = unfilled(kind)
    assert torch.equal(model.linear.weight, wanted.linear.weight)
    for name in ("table", "largest"):
        assert torch.equal(torch.as_tensor(getattr(model, name, 0)), torch.as_tensor(getattr(wanted, name, 0)))


def test_an_error_is_the_factorys_own() -> None:
    def fails() -> nn.Module:
        nn.Linear(2, 2)
        raise RuntimeError("no such size")

    with pytest.raises(RuntimeError, match="no such size"):
        unfilled(fails)
    assert not nn.Linear(2, 2).weight.is_meta
