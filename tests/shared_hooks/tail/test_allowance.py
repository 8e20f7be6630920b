"""Sizes that a tail's own Python reads from the data: bounded before any kernel takes the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks import EarlyOutput, RehearsalLimits, WrappedModel
from shared_hooks.errors import TooLarge
from shared_hooks.forward import Allowance
from shared_hooks.forward.foresight import REMEMBERED

MOST = 4 << 20


def ones(n: int, x: torch.Tensor) -> torch.Tensor:
    return torch.ones(n, 64).mean()


def outer(n: int, x: torch.Tensor) -> torch.Tensor:
    one = torch.arange(n, dtype=torch.float32)
    return (one[:, None] * one[None, :]).mean()


def pad(n: int, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(x, (0, n * 64)).mean()


def resize(n: int, x: torch.Tensor) -> torch.Tensor:
    return torch.empty(1).resize_(n, 64).zero_().mean()


def counts(n: int, x: torch.Tensor) -> torch.Tensor:
    return torch.bincount(x.new_tensor([64 * n]).long()).float().mean()


def repeats(n: int, x: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(x[0], x.new_tensor([64 * n] * x.shape[1]).long()).mean()


def one_hot(n: int, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.one_hot(x.new_tensor([64 * n]).long()).float().mean()


def caught(n: int, x: torch.Tensor) -> torch.Tensor:
    try:
        return ones(n, x)
    except Exception:
        return torch.zeros(())


class Reads(nn.Module):
    def __init__(self, made: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.made = nn.Linear(4, 4), nn.Linear(4, 4), made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        return self.last(y) + self.made(int(x[0, 0]), y)


class Made(TorchDispatchMode):
    """The largest result of a kernel, bytes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not found.is_meta and type(found) is torch.Tensor:
            self.largest = max(self.largest, found.untyped_storage().nbytes())
        return found


def given(number: float) -> torch.Tensor:
    x = torch.linspace(-1, 1, 4)[None].clone()
    x[0, 0] = number
    return x


@pytest.mark.parametrize("made", [ones, outer, pad, resize, counts, repeats, one_hot, caught])
@pytest.mark.parametrize("cut", ["input", "first"])
def test_a_number_of_the_data_makes_nothing_larger(made: Any, cut: str) -> None:
    edge, reference = WrappedModel(Reads(made).eval()), Reads(made).eval()
    cloud = WrappedModel(Reads(made).eval(), rehearsals=RehearsalLimits(held_bytes=MOST, native_bytes=MOST))
    with torch.no_grad():
        for number in (3.0, 5.0):
            early = EarlyOutput.from_bytes(edge.head(cut, given(number)).to_bytes())
            assert torch.equal(cloud.tail(early), reference(given(number)))
        early = EarlyOutput.from_bytes(edge.head(cut, given(60_000.0)).to_bytes()) if made is not outer else None
        if early is None:
            early = EarlyOutput.from_bytes(edge.head(cut, given(4000.0)).to_bytes())
        with Made() as seen, pytest.raises(TooLarge):
            cloud.tail(early)
        assert seen.largest <= MOST
        early = EarlyOutput.from_bytes(edge.head(cut, given(3.0)).to_bytes())
        assert torch.equal(cloud.tail(early), reference(given(3.0)))


def test_only_what_is_alive_counts() -> None:
    with Allowance(MOST, "it takes", alive=True):
        for _ in range(100):
            torch.ones(MOST // 8)  # half of it, and gone
        kept = torch.ones(MOST // 8)
        view = kept[:2]
        del kept
        with pytest.raises(TooLarge, match="it takes more than 4 MiB"):
            torch.ones(MOST // 6)
    assert view.sum() == 2
    with Allowance(MOST, "it takes"):
        torch.ones(MOST // 8)
        torch.ones(MOST // 8 - 16)
        with pytest.raises(TooLarge):
            torch.ones(64)


def test_refusal_is_remembered() -> None:
    with Allowance(MOST, "it takes", alive=True) as allowance:
        with pytest.raises(TooLarge):
            torch.ones(MOST)
        with pytest.raises(TooLarge):
            torch.ones(1)
    assert allowance.failure is not None


@pytest.mark.parametrize("way", [lambda x: x[:2], lambda x: x.view(-1)[1:], lambda x: x.t(), lambda x: x.detach()])
def test_a_view_keeps_what_it_shows(way: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.no_grad(), Allowance(MOST, "it takes", alive=True):
        view = way(torch.ones(MOST // 256, 32))  # half of it
        with pytest.raises(TooLarge):
            torch.ones(MOST // 6)
    assert view.numel()


def test_a_long_loop_leaves_little_behind() -> None:
    """Neither views of one tensor, nor many results that stay."""
    with Allowance(1 << 40, "it takes", alive=True) as allowance:
        base = torch.ones(4)
        for _ in range(3 * REMEMBERED):
            base.view(2, 2)
        assert allowance._noted <= REMEMBERED + 1
        kept = [torch.empty(1) for _ in range(2 * REMEMBERED)]
        assert allowance._prune_at > REMEMBERED
    assert kept
