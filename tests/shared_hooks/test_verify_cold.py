"""`verify` with a cold model: what one model in one process hides is found."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import ModelFailed
from shared_hooks.middle import Apart, Gone, _starting_without_interrupts
from shared_hooks.state import Dice
from tests.shared_hooks.test_cold import Grows, Memo, Two, made
from tests.waiting import eventually


class Warm(Two):
    """Its answer depends on how often it ran, which a model that has run by then does not show."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.c(self.b(self.a(x)))
        return found


def test_all_is_exact_for_a_plain_model() -> None:
    x = torch.randn(2, 8)
    with WrappedModel(made(Warm)) as wrapped:
        report = wrapped.verify(x, cold=lambda: made(Warm))
        assert report.ok and report.input_exact and len(report.exact) == 3 and not report.differing


@pytest.mark.parametrize("kind", [Memo, Grows])
def test_exactness_and_refusals_hold_cold(kind: type[nn.Module]) -> None:
    with WrappedModel(made(kind)) as wrapped:
        assert not wrapped.verify(torch.randn(3, 8), cold=lambda: made(kind)).differing


def test_a_side_that_is_another_model_differs_and_is_refused_from_then_on() -> None:
    """As a model that is not the same each time it is made."""

    def other() -> nn.Module:
        torch.manual_seed(next(seeds))
        return Warm().eval()

    seeds = iter(range(5, 50))
    with WrappedModel(made(Warm)) as wrapped:
        report = wrapped.verify(torch.randn(2, 8), cold=other)
        assert not report.ok and len(report.differing) == 3 and not report.input_exact
        assert not any(layer.can_split for layer in wrapped.layers)


def test_processes_of_their_own_show_what_one_shares() -> None:
    x = torch.randn(2, 8)
    with WrappedModel(made(Warm)) as wrapped:
        report = wrapped.verify(x, cold=partial(made, Warm), processes=True)
        assert report.ok and report.input_exact and len(report.exact) == 3
    assert os.getpid() not in reported_pids(partial(reported_pid, made(Warm)))


def test_a_process_that_starts_is_not_interrupted_by_ctrl_c() -> None:
    """While it imports torch, too: the parent ends it."""
    show = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with _starting_without_interrupts():
        inside = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True).stdout
    assert inside == "True\n" and signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def reported_pid(model: nn.Module) -> nn.Module:
    model.register_buffer("pid", torch.tensor(os.getpid()))
    model.forward = lambda x: model.pid  # type: ignore[method-assign,assignment]
    return model


def reported_pids(make: partial[nn.Module]) -> list[int]:
    with Apart(make, WrappedModel) as one, Apart(make, WrappedModel) as other:
        return [int(each.whole((torch.zeros(1),), {}, Dice())) for each in (one, other)]


def test_a_model_that_fails_there_says_so() -> None:
    with Apart(partial(made, Warm), WrappedModel) as apart, pytest.raises(ModelFailed, match="mat1 and mat2"):
        apart.whole((torch.zeros(1, 3),), {}, Dice())
    with pytest.raises(Gone, match="cannot be made in another process"):
        Apart(lambda: made(Warm), WrappedModel)


class Draws(Two):
    """By all generators that a model may draw from without being handed one."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x)) * random.random() + float(np.random.rand())  # noqa: NPY002
        found: Tensor = self.c(y) + torch.rand(8)
        return found


@pytest.mark.parametrize("how", [{}, {"cold": True}, {"cold": True, "processes": True}])
def test_every_run_draws_the_same_numbers(how: dict[str, Any]) -> None:
    """Python's and NumPy's generators, too: else all cuts would be said to differ."""
    more = {**how, "cold": partial(made, Draws)} if how else {}
    with WrappedModel(made(Draws)) as wrapped:
        report = wrapped.verify(torch.randn(2, 8), **more)
        assert report.ok and report.input_exact and len(report.exact) == 3


class Ends(Two):
    """It ends its process, where that is not the one of the test: for want of memory, say."""

    def forward(self, x: Tensor) -> Tensor:
        if multiprocessing.parent_process() is not None:
            os._exit(1)
        found: Tensor = self.c(self.b(self.a(x)))
        return found


class Unsendable(Two):
    """What it gives goes to no other process."""

    def forward(self, x: Tensor) -> Any:
        return {"found": self.c(self.b(self.a(x))), "how": lambda: None}


@pytest.mark.parametrize("kind", [Ends, Unsendable])
def test_a_process_that_cannot_be_asked_says_nothing_of_the_cuts(kind: type[nn.Module]) -> None:
    with WrappedModel(made(kind)) as wrapped:
        with pytest.raises(ModelFailed):
            wrapped.verify(torch.randn(2, 8), cold=partial(made, kind), processes=True)
        assert all("verify" not in layer.reason for layer in wrapped.layers)


def test_process_ends_with_its_parent(tmp_path: Path) -> None:
    """Whatever its model does at that time."""
    file = tmp_path / "pid"
    script = (
        "from functools import partial\n"
        "from shared_hooks import WrappedModel\nfrom shared_hooks.middle import Apart\n"
        "from shared_hooks.state import Dice\nfrom tests.shared_hooks.test_verify_cold import sleeping\n"
        f"Apart(partial(sleeping, {str(file)!r}), WrappedModel).whole((), {{}}, Dice())\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        eventually(lambda: file.exists() and file.read_text())
        parent.kill()
    process = psutil.Process(int(file.read_text())) if psutil.pid_exists(int(file.read_text())) else None
    eventually(lambda: process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def sleeping(file: str) -> nn.Module:
    Path(file).write_text(str(os.getpid()))
    time.sleep(1000)
    return made(Warm)
