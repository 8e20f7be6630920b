"""Specs written into a folder of their own, beside a module with small factories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shared_hooks.models import ModelSpec, load_spec

MODULE = """
import torch
from torch import nn
from shared_hooks.models import Prediction


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, token_ids, scale=1.0):
        return {"logits": self.head(self.embed(token_ids)).mean(1) * scale}


def linear(features=4):
    return nn.Linear(features, 3)


def broken():
    raise ValueError("no such luck")


def example():
    return {"input": torch.ones(1, 4)}


def wave(path):
    return torch.full((1, 4), float(path.stem))


def name_it(output):
    return [Prediction("it", 0, float(output.sum()))]


model = nn.Linear(2, 2)
number = 7
"""

_counter = iter(range(10**6))


@pytest.fixture
def write_spec(tmp_path: Path) -> Callable[[str], ModelSpec]:
    """Writes a spec file and loads it; ``net:`` in it is this file's module, under a name used once."""
    module = f"isthmus_net_{next(_counter)}"
    (tmp_path / f"{module}.py").write_text(MODULE)

    def write(text: str) -> ModelSpec:
        path = tmp_path / "spec.toml"
        path.write_text(text.replace("net:", f"{module}:"))
        return load_spec(path)

    return write
