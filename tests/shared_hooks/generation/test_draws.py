"""Random numbers of the model's own: drawn here as they would be, refused by name where the other side draws them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks.errors import CutRefused
from shared_hooks.generation import DecodingTail, InProcess, SplitForward
from tests.shared_hooks.generation.small import cut_of, make, prompt


class Noise(nn.Module):
    def __init__(self, block: nn.Module, kind: str) -> None:
        super().__init__()
        self.block = block
        self.kind = kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.block(*args, **kwargs)
        return found + (random.random() if self.kind == "python" else torch.rand_like(found))


def noisy(number: int, kind: str) -> Any:
    model: Any = make("llama")
    model.model.layers[number] = Noise(model.model.layers[number], kind)
    return model


@pytest.mark.parametrize("kind", ["torch", "python"])
def test_draws_before_the_cut_equal_the_whole_models(kind: str) -> None:
    def run(model: Any) -> Any:
        torch.manual_seed(3)
        random.seed(3)
        return model.generate(**prompt(), max_new_tokens=6, do_sample=True)

    whole = run(noisy(0, kind))
    here = noisy(0, kind)
    with SplitForward(here, cut_of("llama"), InProcess(DecodingTail(noisy(0, kind), cut_of("llama")))):
        assert torch.equal(run(here), whole)


@pytest.mark.parametrize("kind", ["torch", "python"])
def test_draws_behind_the_cut_are_refused(kind: str) -> None:
    here = noisy(3, kind)
    with (
        SplitForward(here, cut_of("llama"), InProcess(DecodingTail(noisy(3, kind), cut_of("llama")))),
        pytest.raises(CutRefused, match=r"rand|python"),
    ):
        here.generate(**prompt(), max_new_tokens=6)


def test_dropout_behind_the_cut_in_training_is_refused() -> None:
    here: Any = make("gpt2")
    there = make("gpt2").train()
    with (
        SplitForward(here, cut_of("gpt2"), InProcess(DecodingTail(there, cut_of("gpt2")))),
        pytest.raises(CutRefused, match=r"dropout|bernoulli"),
    ):
        here.generate(**prompt(), max_new_tokens=6)
