"""Functions under `functools.lru_cache`: their results are made again wherever they are missing; what is state in
disguise is refused.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared_hooks.errors import CutRefused
from shared_hooks.generation import DecodingTail, SplitForward
from shared_hooks.generation.edge_session import InProcess
from shared_hooks.state import PythonState
from shared_hooks.state.probes import is_repeatable, results_in

SOURCE = """
import functools, random
from dataclasses import dataclass
import torch
from torch import nn

SETTING = {"scale": 2.0}

@dataclass(slots=True)
class Counter:
    n: int = 0

class Helper:
    def __init__(self):
        self.table = torch.arange(1.0, 9.0)

@functools.lru_cache
def table(length, *, base=2.0):
    return torch.arange(length) / base

@functools.lru_cache(maxsize=1, typed=True)
def offsets(length, step=1):
    return [float(n) for n in range(0, length, step)]

@functools.cache
def helper():
    return Helper()

@functools.cache
def scaled(length):
    return torch.ones(length) * SETTING["scale"]

@functools.cache
def dictionary():
    return {"n": 0}

@functools.cache
def counter():
    return Counter()

@functools.lru_cache(4)
def scratch(length):
    return torch.ones(length)

@functools.cache
def drawn(length):
    return torch.rand(length)

@functools.cache
def generator():
    return random.Random(0)

@functools.cache
def last():
    return []

class Layer(nn.Linear):
    def __init__(self, kind):
        super().__init__(8, 8)
        self.kind = kind

    @functools.lru_cache(8)
    def row(self, number):
        return self.weight[number].detach() * 2

    def forward(self, x):
        x, kind = super().forward(x), self.kind
        if kind == "table":
            return x + table(8, base=3.0)
        if kind == "offsets":
            return x + torch.tensor(offsets(8)) + offsets(4, step=2)[1]
        if kind == "helper":
            return x * helper().table
        if kind == "method":
            return x + self.row(1)
        if kind == "scaled":
            return x * scaled(8)
        if kind == "dictionary":
            dictionary()["n"] += 1
            return x * dictionary()["n"]
        if kind == "counter":
            counter().n += 1
            return x * counter().n
        if kind == "scratch":
            return x * scratch(8).mul_(1.5)
        if kind == "drawn":
            return x * drawn(8)
        if kind == "generator":
            return x * generator().random()
        if kind == "last":
            seen = last()
            seen[:] = [x.sum().item()]
            return x * seen[0]

def model(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Layer(kind), nn.Linear(8, 8), Layer(kind)).eval()
"""
RESULTS = ("table", "offsets", "helper", "method", "scaled")
STATE = ("dictionary", "counter", "scratch", "generator", "last")


def loaded(where: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The code as a process of its own has it."""
    module = types.ModuleType(f"{where}.cached")
    module.__file__ = f"/{where}/cached.py"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(SOURCE, module.__file__, "exec"), vars(module))
    return module


def exact_steps(kind: str, cut: str, before: int, monkeypatch: pytest.MonkeyPatch, change: Any = None) -> int:
    """How many of three steps were not refused; none was another one than the whole model's."""
    modules = [loaded(where, monkeypatch) for where in ("here", "there", "whole")]
    here, there, whole = (module.model(kind) for module in modules)
    inputs = torch.randn(before + 3, 1, 8, generator=torch.Generator().manual_seed(1))
    exact = 0
    with torch.no_grad():
        for x in inputs[:before]:
            torch.manual_seed(len(x))
            wanted = whole(x)
            torch.manual_seed(len(x))
            assert torch.equal(here(x), wanted)
        torch.manual_seed(9)
        if change is not None:
            for module in modules:
                change(module)
        with SplitForward(here, cut, InProcess(DecodingTail(there, cut))):
            for x in inputs[before:]:
                wanted = whole(x)
                with suppress(CutRefused):
                    assert torch.equal(here(x), wanted)
                    exact += 1
    return exact


@pytest.mark.parametrize("before", [0, 2], ids=["fresh", "ran"])
@pytest.mark.parametrize("cut", ["0", "2"])
@pytest.mark.parametrize("kind", RESULTS)
def test_results_are_no_state(kind: str, cut: str, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exact_steps(kind, cut, before, monkeypatch) == 3


@pytest.mark.parametrize("before", [0, 2], ids=["fresh", "ran"])
@pytest.mark.parametrize("cut", ["0", "2"])
@pytest.mark.parametrize("kind", STATE)
def test_state_is_refused(kind: str, cut: str, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exact_steps(kind, cut, before, monkeypatch) == 0


def test_drawn_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exact_steps("drawn", "2", 2, monkeypatch) == 0


def test_result_of_what_is_another_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(module: Any) -> None:
        module.SETTING["scale"] = 3.0

    assert exact_steps("scaled", "2", 2, monkeypatch, change) == 0
    assert exact_steps("scaled", "2", 0, monkeypatch, change) == 3


ARGUMENTS = st.one_of(
    st.integers(), st.text(max_size=3), st.booleans(), st.none(), st.tuples(st.integers()), st.floats()
)


@given(
    calls=st.lists(st.tuples(st.lists(ARGUMENTS, max_size=3), st.dictionaries(st.sampled_from("abc"), ARGUMENTS))),
    typed=st.booleans(),
    size=st.sampled_from([None, 1, 3, 128]),
)
def test_any_call_is_made_again_from_its_key(calls: Any, typed: bool, size: int | None) -> None:
    @functools.lru_cache(size, typed)
    def cached(*args: Any, **kwargs: Any) -> Any:
        return [*map(repr, args), *map(repr, kwargs.items())]

    for args, kwargs in calls:
        cached(*args, **kwargs)
    assert len(results_in(cached)) == cached.cache_info().currsize
    assert is_repeatable(cached)
    for _, result in results_in(cached)[:1]:
        result.append("more")
        assert not is_repeatable(cached)


def test_looks_at_generators_and_draws_none() -> None:
    @functools.cache
    def cached(n: int) -> float:
        return random.random() if n else 0.0

    cached(0)
    before = random.getstate()
    assert is_repeatable(cached)
    cached(1)
    random.setstate(before)
    random.random()
    state = random.getstate()
    assert not is_repeatable(cached)
    assert random.getstate() == state


def test_a_new_result_is_noticed_and_no_change() -> None:
    @functools.cache
    def cached(n: int) -> list[int]:
        return [n]

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + cached(2)[0]

    model = Model()
    state = PythonState(model)
    model(torch.ones(1))
    assert not state.is_same
    assert not state.looks_same
    assert state.changes() == []
    later = PythonState(model)
    cached(2).append(3)
    assert [change.name for change in later.changes()] != []
    later.restore()
    assert cached(2) == [2]
