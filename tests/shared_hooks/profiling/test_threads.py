"""Several threads are warned of where one is much faster, and only there; their number is as before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.profiling import machine
from shared_hooks.profiling.timers import Inputs


class Clock:
    """Nanoseconds that pass where somebody says so."""

    def __init__(self) -> None:
        self.ns = 0

    def perf_counter_ns(self) -> int:
        return self.ns

    def monotonic(self) -> float:
        return self.ns / 1e9

    def sleep(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


class Timed(nn.Module):
    """Takes so many milliseconds, by the number of threads."""

    def __init__(self, clock: Clock, took: dict[int, float]) -> None:
        super().__init__()
        self.clock, self.took, self.calls = clock, took, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.clock.sleep(self.took[torch.get_num_threads()] / 1e3)
        return x


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def said(monkeypatch: pytest.MonkeyPatch, took: dict[int, float]) -> tuple[tuple[str, ...], int]:
    """The warnings, and how many forwards ran."""
    clock = Clock()
    monkeypatch.setattr(machine, "time", clock)
    model = Timed(clock, took)
    with WrappedModel(model) as wrapped:
        found = machine.warnings_of_threads(wrapped, Inputs(wrapped, (torch.zeros(1),), {}), 0.005, 1.0)
    return found, model.calls


def test_threads_that_cost_more_than_they_gain_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,), calls = said(monkeypatch, {2: 80.0, 1: 2.0})
    assert line.startswith("2 threads take 80.0 ms for a forward, one takes 2.0 ms")
    assert "--threads 1" in line and "OMP_WAIT_POLICY=passive" in line
    assert calls == 2 * machine.TRIES and torch.get_num_threads() == 2


@pytest.mark.parametrize("several", [1.1, 2.0, 3.9])
def test_threads_that_help_or_hardly_cost_are_nothing_to_say(monkeypatch: pytest.MonkeyPatch, several: float) -> None:
    assert said(monkeypatch, {2: several, 1: 2.0})[0] == ()


def test_a_slow_model_is_tried_less_often_and_one_thread_never(monkeypatch: pytest.MonkeyPatch) -> None:
    found, calls = said(monkeypatch, {2: 3000.0, 1: 1000.0})
    assert found and calls == 2 * machine.LEAST
    torch.set_num_threads(1)
    assert said(monkeypatch, {1: 2.0}) == ((), 0)


def test_a_model_that_raises_leaves_the_threads_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        said(monkeypatch, {2: 1.0})
    assert torch.get_num_threads() == 2
