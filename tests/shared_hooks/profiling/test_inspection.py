"""The ledger counts every storage once, while it lives; multiplications are those of the layer's definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks import WrappedModel
from shared_hooks.profiling.timers import Inspection, inspect, weights_bytes
from tests.zoo import CASES, Case

ROW = 4 * 2 * 8  # bytes of a (2, 8) float tensor


def look(model: nn.Module, *args: Any) -> Inspection:
    with WrappedModel(model) as wrapped:
        return inspect(model, wrapped.modules, args, {})


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        return self.two(y) + y


def test_dropped_tensors_are_freed() -> None:
    found = look(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(2, 8))
    # input and output of a layer are alive with the model's own input, never a fourth
    assert [layer.allocated for layer in found.layers] == [2 * ROW, 3 * ROW, 3 * ROW]
    assert found.peak == 3 * ROW


def test_a_skip_connection_is_kept() -> None:
    found = look(Residual(), torch.ones(2, 8))
    assert [layer.allocated for layer in found.layers] == [2 * ROW, 3 * ROW]
    assert found.peak == 4 * ROW  # the sum, outside the layers


def test_in_place_and_views_take_nothing() -> None:
    found = look(nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(0), nn.Identity()), torch.ones(2, 8))
    assert found.peak == ROW


def test_temporary_memory_of_a_layer_is_in_its_peak() -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x] * 10).sum(0, keepdim=True)

    found = look(nn.Sequential(Wide(), nn.Identity()), torch.ones(2, 8))
    assert found.layers[0].peak == 11 * ROW + ROW // 2
    assert found.layers[0].allocated == ROW + ROW // 2
    assert [layer.peak_so_far for layer in found.layers] == [found.layers[0].peak] * 2


def test_features() -> None:
    found = look(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()), torch.ones(2, 3, 5, 5))
    conv, relu = (layer.features for layer in found.layers)
    outputs = 2 * 4 * 5 * 5
    assert conv == {
        "input_elements": 150.0,
        "output_elements": float(outputs),
        "parameters": 4.0 * 27 + 4,
        "macs": outputs * 27.0,
    }
    assert "macs" not in relu


def test_a_shared_weight_counts_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert weights_bytes(model) == 4 * 64


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.loud][::9], ids=lambda case: case.name if isinstance(case, Case) else ""
)
def test_layers_are_the_plans(case: Case) -> None:
    model = case.build()
    args, kwargs = case.inputs()
    with case.setting(), WrappedModel(model) as wrapped:
        plan = wrapped.plan(*args, **kwargs)
        found = inspect(model, wrapped.modules, *case.inputs())
    assert [layer.module_type for layer in found.layers] == [layer.layer_type for layer in plan.layers]
    for layer in found.layers:
        assert 0 <= layer.allocated <= layer.peak <= layer.peak_so_far <= found.peak
