"""State in objects that hide it: a model that answers otherwise from its twelfth run on is refused when planned."""

from __future__ import annotations

import array
import collections
import configparser
import contextlib
import ctypes
import io
import itertools
import queue
import random
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused
from shared_hooks.state import PythonState
from shared_hooks.state.probes import MAX_BYTES, probe_of

Step = Callable[[Any], float]


OPEN: list[Any] = []


@pytest.fixture(autouse=True)
def files_are_closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def file() -> Any:
    OPEN.append(tempfile.TemporaryFile())  # noqa: SIM115
    return OPEN[-1]


class Steps(nn.Module):
    def __init__(self, make: Callable[[Any], object], step: Step) -> None:
        super().__init__()
        self.a, self.b, self.step = nn.Linear(4, 4), nn.Linear(4, 4), step
        make(self)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.a(x)) * (1.0 if self.step(self) < 12 else 2.0)
        return found


def held(value: Callable[[], Any]) -> Callable[[Any], None]:
    def make(model: Any) -> None:
        model.held = value()

    return make


def counted(model: Any) -> float:
    model.held[0] += 1
    return float(model.held[0])


def appended(model: Any) -> None:
    content: list[int] = []
    model.push, model.size = content.append, content.__len__


def pushed(model: Any) -> float:
    model.push(1)
    return float(model.size())


def viewed(model: Any) -> None:
    content = {"runs": 0}
    model.view, model.update = types.MappingProxyType(content), content.update


def updated(model: Any) -> float:
    model.update(runs=model.view["runs"] + 1)
    return float(model.view["runs"])


def written(model: Any) -> float:
    model.held.write(b"1")
    return float(model.held.tell())


def put(model: Any) -> float:
    model.held.put(1)
    return float(model.held.qsize())


def on_a_parameter(model: Any) -> float:
    model.a.weight.runs = getattr(model.a.weight, "runs", 0) + 1
    return float(model.a.weight.runs)


def added(model: Any) -> float:
    model.held.__setitem__("runs", model.held.get("runs", 0) + 1)
    return float(model.held.get("runs"))


THREADS = threading.local()


def of_a_thread(_: Any) -> float:
    THREADS.runs = getattr(THREADS, "runs", 0) + 1
    return float(THREADS.runs)


class Kept:
    runs = 0


KEPT = Kept()
WEAK = weakref.ref(KEPT)


def of_a_weak_reference(_: Any) -> float:
    kept: Any = WEAK()
    kept.runs += 1
    return float(kept.runs)


def of_a_function(_: Any) -> float:
    if not hasattr(of_a_function, "runs"):
        of_a_function.runs = 0.0  # type: ignore[attr-defined]
    of_a_function.runs += 1  # type: ignore[attr-defined]
    return float(of_a_function.runs)  # type: ignore[attr-defined]


class Hook:
    runs = 0

    def __call__(self, *_: Any) -> None:
        self.runs += 1


def hooked(model: Any) -> None:
    model.held = Hook()
    model.a.register_forward_hook(model.held)


def of_settings(model: Any) -> float:
    model.held["model"]["runs"] = str(int(model.held["model"]["runs"]) + 1)
    return float(model.held["model"]["runs"])


def settings() -> configparser.ConfigParser:
    made = configparser.ConfigParser()
    made["model"] = {"runs": "0"}
    return made


@pytest.fixture(autouse=True)
def nothing_has_run() -> None:
    for one in (THREADS, KEPT, of_a_function):
        vars(one).pop("runs", None)


HIDDEN: dict[str, tuple[Callable[[Any], object], Step]] = {
    "counter": (held(lambda: itertools.count().__next__), lambda model: model.held()),
    "generator": (held(lambda: (number for number in range(99)).send), lambda model: model.held(None)),
    "mapped": (held(lambda: map(int, itertools.count()).__next__), lambda model: model.held()),
    "list": (appended, pushed),
    "dictionary": (viewed, updated),
    "dictionary's items": (held(lambda: dict(enumerate(range(99))).popitem), lambda model: 99 - model.held()[0]),
    "deque": (held(lambda: collections.deque(range(99)).popleft), lambda model: model.held()),
    "random": (held(lambda: random.Random(0).random), lambda model: model.held()),
    "NumPy's": (held(lambda: np.random.default_rng(0).random), lambda model: model.held()),
    "array": (held(lambda: array.array("l", [0])), counted),
    "array of C": (held(lambda: (ctypes.c_int * 1)()), counted),
    "memory": (held(lambda: memoryview(bytearray(1))), counted),
    "bytes in memory": (held(io.BytesIO), written),
    "file": (held(file), written),
    "queue": (held(queue.SimpleQueue), put),
    "parent's": (held(lambda: super(collections.Counter, collections.Counter())), added),
    "parameter": (lambda _: None, on_a_parameter),
    "thread's": (lambda _: None, of_a_thread),
    "weak reference": (lambda _: None, of_a_weak_reference),
    "function's attribute": (lambda _: None, of_a_function),
    "hook": (hooked, lambda model: float(model.held.runs)),
    "settings": (held(settings), of_settings),
}


OF_ALL = ("thread's", "weak reference", "function's attribute")
"""What two models have together."""


@pytest.mark.parametrize("name", HIDDEN)
def test_it_is_seen(name: str) -> None:
    model = WrappedModel(Steps(*HIDDEN[name]).eval())
    try:
        model.plan(torch.ones(1, 4))
    except CutRefused as error:
        assert "put back" in str(error)
    else:
        assert not any(layer.can_split for layer in model.layers)


@pytest.mark.parametrize("name", sorted(HIDDEN.keys() - {"queue", *OF_ALL}))
def test_planning_puts_it_back(name: str) -> None:
    model, plain = (Steps(*HIDDEN[name]).eval() for _ in range(2))
    with WrappedModel(model) as wrapped, contextlib.suppress(CutRefused):
        wrapped.plan(torch.ones(1, 4))
    assert model.step(model) == plain.step(plain)


def test_a_text_in_memory_is_put_back() -> None:
    model = Steps(held(io.StringIO), lambda model: model.held.write("ab") + model.held.tell()).eval()
    model.held.write("before")
    with WrappedModel(model) as wrapped:
        wrapped.plan(torch.ones(1, 4))
    assert model.held.getvalue() == "before"
    assert model.held.tell() == 6


def test_large_objects_are_not_copied() -> None:
    large = memoryview(bytearray(MAX_BYTES + 1))
    assert probe_of(large) is None
    assert probe_of(large[:9]) is not None


def test_a_view_that_was_given_back_is_none() -> None:
    view = memoryview(bytearray(9))
    probe = probe_of(view)
    assert probe is not None
    view.release()
    probe.restore(probe.now())


def test_an_iterator_that_cannot_be_read_may_have_advanced_at_any_time() -> None:
    """As most of itertools from Python 3.14 on."""

    class Cycle:
        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            return 1

        def __reduce__(self) -> Any:
            raise TypeError("cannot pickle 'itertools.cycle' object")

    Cycle.__module__ = "itertools"

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cycle = Cycle()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * next(self.cycle)

    state = PythonState(Holds())
    assert not state.is_same and not state.looks_same
    assert [change.name for change in state.changes()] == state.unrepeatable == [probe for probe, *_ in state.probes]


@pytest.mark.parametrize(
    "made",
    [
        *(
            lambda: itertools.count(3),
            lambda: iter([1, 2, 3]),
            lambda: itertools.cycle([1, 2]),
            lambda: zip([1, 2], [3, 4], strict=False),
        ),
        *(
            lambda: map(str, [1, 2]),
            lambda: filter(None, [1, 2]),
            lambda: enumerate(map(str, [1, 2])),
            lambda: twice(),
            lambda: (one for one in [1, 2, 3]),
        ),
        *(
            lambda: itertools.chain([1, 2], [3]),
            lambda: itertools.takewhile(bool, [1, 2]),
            lambda: iter(memoryview(b"ab")),
        ),
        *(lambda: itertools.zip_longest([1, 2], [3]), lambda: itertools.compress([1, 2], [1, 1]), lambda: counted()),
    ],
)
def test_an_iterator_that_advances_is_not_the_same(made: Callable[[], Iterator[Any]]) -> None:
    model = nn.Linear(1, 1)
    model.held = made()  # type: ignore[assignment]
    for _ in range(2):
        state = PythonState(model)
        next(model.held)  # type: ignore[call-overload]
        assert not state.is_same and not state.looks_same


def twice() -> Iterator[int]:
    """In its second pass."""
    made = itertools.cycle([1, 2, 3])
    for _ in range(4):
        next(made)
    return made


def counted() -> Iterator[int]:
    return iter(map(int, [1, 2, 3]).__next__, 9)


def test_an_iterator_that_can_be_read_stays_the_same() -> None:
    for value in (itertools.count(3), itertools.repeat(2), iter([1, 2]), zip([1], [2], strict=False), map(str, [1])):
        model = nn.Linear(1, 1)
        model.held = value  # type: ignore[assignment]
        state = PythonState(model)
        assert state.is_same and state.looks_same
