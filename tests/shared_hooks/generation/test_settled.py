"""A model that keeps something of its own between calls is refused by name, on whichever side of the cut it does so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.errors import CutRefused
from shared_hooks.generation import DecodingTail, InProcess, SplitForward
from tests.shared_hooks.generation.small import cut_of, make, prompt


class Remembers(nn.Module):
    """Adds to a block's result what was the mean of the one before."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.mean = torch.zeros(())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.block(*args, **kwargs) + self.mean
        self.mean = found.mean()
        return found


class BuildsOnce(nn.Module):
    """Makes a table on first use."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.table: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.table is None:
            self.table = torch.linspace(0.9, 1.1, 32)
        return self.block(*args, **kwargs) * self.table


def with_block(number: int, cls: type[nn.Module]) -> Any:
    model: Any = make("llama")
    model.model.layers[number] = cls(model.model.layers[number])
    return model


@pytest.mark.parametrize("number", [0, 3], ids=["before the cut", "after the cut"])
def test_module_state_for_the_next_call_is_refused_by_name(number: int) -> None:
    here, there = with_block(number, Remembers), with_block(number, Remembers)
    with (
        SplitForward(here, cut_of("llama"), InProcess(DecodingTail(there, cut_of("llama")))),
        pytest.raises(CutRefused, match="mean"),
    ):
        here.generate(**prompt(), max_new_tokens=6)


@pytest.mark.parametrize("number", [0, 3], ids=["before the cut", "after the cut"])
def test_a_table_that_is_built_once_is_none_such(number: int) -> None:
    whole = with_block(number, BuildsOnce).generate(**prompt(), max_new_tokens=6, do_sample=False)
    here, there = with_block(number, BuildsOnce), with_block(number, BuildsOnce)
    with SplitForward(here, cut_of("llama"), InProcess(DecodingTail(there, cut_of("llama")))):
        for _ in range(3):
            assert torch.equal(here.generate(**prompt(), max_new_tokens=6, do_sample=False), whole)
