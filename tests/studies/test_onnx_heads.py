"""The sweep of exported heads, on two models and one that breaks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from studies import onnx_heads


def small() -> onnx_heads.Made:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), ((torch.rand(2, 4),), {})


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if float(x.sum()) > 100 else self.second(-x)


def reads() -> onnx_heads.Made:
    return Reads(), ((torch.rand(2, 4),), {})


def breaks() -> onnx_heads.Made:
    raise ValueError("no model")


def test_counted_outcomes() -> None:
    found = list(onnx_heads.run({"small": small, "reads": reads, "breaks": breaks}, cuts=2, seed=1))
    states: dict[str, Any] = {one["model"]: one["state"] for one in found}
    assert states["small"] == "exported" and states["breaks"] == "failed"
    assert states["reads"] in ("exported", "refused")
    counted = onnx_heads.summary(found)
    assert counted["models"] == 3 and counted["failed"] == 1 and counted["heads"] >= 2
    assert counted["labels changed"] == 0 and counted["largest difference"] < 1e-5
    assert "ValueError: no model" in counted["reasons"]
