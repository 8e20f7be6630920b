"""Python state behind the recording's back: exact or refused, over several requests; and planning moves none of it.

Edge, tail and reference are fresh copies of the model each: what one of them keeps, the others must not need.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import random
import threading
from collections.abc import Callable
from collections.abc import Iterator as Iterator_
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused, IsthmusError
from tests.shared_hooks.cutting import through_bytes

STACK: list[str] = []
COUNT = 0


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.set_up()

    def set_up(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Rnn(Base):
    def set_up(self) -> None:
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x) + (0 if self.h is None else self.h))
        self.h = self.b(h)
        return self.c(h)


class Counter(Base):
    def set_up(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.c(self.b(self.a(x)) * self.calls)


class CounterInAnObject(Base):
    class Box:
        __slots__ = ("n",)

        def __init__(self) -> None:
            self.n = 0

    def set_up(self) -> None:
        self.box = self.Box()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.box.n += 1
        return self.c(self.b(x) * self.box.n)


class Deque(Base):
    def set_up(self) -> None:
        self.last: collections.deque[Tensor] = collections.deque(maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.last.append(x)
        x = self.b(x)
        return self.c(x) + sum(self.last)


class InUserDict(Base):
    def set_up(self) -> None:
        self.kept: Any = collections.UserDict()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + self.kept.get("x", 0)
        self.kept["x"] = self.b(x)
        return self.c(self.kept["x"])


class Global(Base):
    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        return self.c(self.b(self.a(x)) * COUNT)


class Closure(Base):
    def set_up(self) -> None:
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)) * self.count())

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)()


class ClassAttribute(Base):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.c(self.b(self.a(x)) * self.calls)


class FunctionAttribute(Base):
    def set_up(self) -> None:
        self.gain = functools.partial(_gain, [0])

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)) * self.gain())


def _gain(calls: list[int]) -> int:
    calls[0] += 1
    return calls[0]


class Iterator(Base):
    def set_up(self) -> None:
        self.numbers = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)) * next(self.numbers))


class PythonsRandom(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)) * random.random())


class OwnRandom(Base):
    def set_up(self) -> None:
        self.random = random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)) * self.random.random())


class FirstInput(Base):
    """Built once, but from the first input."""

    def set_up(self) -> None:
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.mean()
        return self.c(self.b(self.a(x - self.mean)))


class FirstNumber(Base):
    def set_up(self) -> None:
        self.big: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.big is None:
            self.big = bool(x.mean() > 0)
        return self.c(self.b(self.a(x)) * (2 if self.big else 1))


class LastNumber(Base):
    """In planning it is set to what it was."""

    def set_up(self) -> None:
        self.big = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) * (2 if self.big else 1)
        self.big = bool(x.mean() > 0)
        return self.c(self.b(y))


class Table(Base):
    """A cache that hangs on no input may stay."""

    def set_up(self) -> None:
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 4).sin()
        return self.c(self.b(self.a(x) + self.table) * self.table)


class Flag(Base):
    """Set and put back: two runs look alike."""

    def set_up(self) -> None:
        self.inside = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * (3 if self.inside else 1)
        self.inside = True
        x = self.b(x)
        self.inside = False
        return self.c(x)


class Mode(Base):
    def set_up(self) -> None:
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * (3 if self.drop.training else 1)
        self.drop.train()
        x = self.b(x)
        self.drop.eval()
        return self.c(x)


class ScopeStack(Base):
    def set_up(self) -> None:
        self.scopes: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * (1 + len(self.scopes))
        self.scopes.append("inner")
        x = self.b(x)
        self.scopes.pop()
        return self.c(x)


class GlobalStack(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) * (1 + len(STACK))
        STACK.append("inner")
        x = self.b(x)
        STACK.pop()
        return self.c(x)


class DefaultDtype(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + torch.zeros(4).to(x.dtype) + len(str(torch.zeros(1).dtype))
        torch.set_default_dtype(torch.float64)
        x = self.b(x)
        torch.set_default_dtype(torch.float32)
        return self.c(x)


class HeldLock(Base):
    def set_up(self) -> None:
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        assert self.lock.acquire(timeout=2), "the lock is held"
        x = self.b(self.a(x))
        self.lock.release()
        return self.c(x)

    def __deepcopy__(self, memo: Any) -> Any:
        return type(self)()


class ProperLock(HeldLock):
    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            x = self.b(self.a(x))
        return self.c(x)


class Swapped(Base):
    """Parameters replaced for the time of a call."""

    def set_up(self) -> None:
        self.other = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        mine = self.b.weight
        x = self.a(x)
        self.b.weight = self.other
        x = self.b(x)
        self.b.weight = mine
        return self.c(self.b(x))


class Raises(Base):
    """Exceptions as control flow."""

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            raise KeyError("not mine")

    def set_up(self) -> None:
        self.picky = self.Picky()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        try:
            x = self.picky(x)
        except KeyError:
            x = self.b(x)
        return self.c(x)


class Trained(Base):
    """`train` and `eval` of the whole inside a forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.train()
        x = self.b(x)
        self.eval()
        return self.c(x)


class Context(Base):
    """An object handed through the layers."""

    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Identity()

        def forward(self, x: Tensor, context: Any) -> Tensor:
            context["depth"].append(1)
            return self.layer(x) * len(context["depth"])

    def set_up(self) -> None:
        self.one, self.two = self.Step(), self.Step()

    def forward(self, x: Tensor) -> Tensor:
        context: Any = collections.UserDict(depth=[])
        return self.c(self.two(self.one(self.a(x), context), context))


MODELS = [
    Rnn, Counter, CounterInAnObject, Deque, InUserDict, Global, Closure, ClassAttribute, FunctionAttribute, Iterator,
    PythonsRandom, OwnRandom, FirstInput, FirstNumber, LastNumber, Table, Flag, Mode, ScopeStack, GlobalStack,
    DefaultDtype, HeldLock, ProperLock, Swapped, Raises, Trained, Context,
]  # fmt: skip
MUST_WORK = [
    Table,
    Flag,
    Mode,
    ScopeStack,
    GlobalStack,
    DefaultDtype,
    ProperLock,
    Swapped,
    Raises,
    Trained,
    Context,
    PythonsRandom,
]
KEEPS = [model for model in MODELS if model not in (*MUST_WORK, HeldLock)]


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    reset()
    yield
    assert torch.get_default_dtype() is torch.float32
    torch.set_default_dtype(torch.float32)


def reset() -> None:
    """State that is not in a model: as in a new process."""
    global COUNT
    COUNT = ClassAttribute.calls = 0
    STACK.clear()
    random.seed(5)


def drawn() -> Iterator_[Tensor]:
    """The inputs, each with Python's generator in a state of its own: draws after a cut do not advance the edge's."""
    for number, x in enumerate(inputs()):
        random.seed(number)
        yield x


def inputs() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(2, 4, generator=draw) + shift for shift in (0.5, -1.0, 2.0, -2.0)]


def expected(build: Callable[[], nn.Module]) -> list[Tensor]:
    reset()
    model = build().eval()
    with torch.no_grad():
        found = [model(x) for x in drawn()]
    reset()
    return found


@pytest.mark.parametrize("build", MODELS)
def test_planning_moves_no_state(build: Callable[[], nn.Module]) -> None:
    """Whole, after planning, a model gives what it would have given without."""
    want = expected(build)
    wrapped = WrappedModel(build().eval())
    with contextlib.suppress(CutRefused):  # what cannot be put back is not run at all
        wrapped.plan(inputs()[0])
    for number, x in enumerate(drawn()):
        assert torch.equal(wrapped.forward(x), want[number]), number


@pytest.mark.parametrize("build", MODELS)
def test_every_cut_is_exact_or_refused_over_several_requests(build: Callable[[], nn.Module]) -> None:
    want = expected(build)
    first = WrappedModel(build().eval())
    with contextlib.suppress(CutRefused):
        first.plan(inputs()[0])
    cuts = ["input", 0, 1, 2]
    worked = 0
    for cut in cuts:
        reset()
        edge, cloud = WrappedModel(build().eval()), WrappedModel(build().eval())
        for number, x in enumerate(drawn()):
            try:
                early = edge.forward(x, end=cut)
            except IsthmusError:
                break
            assert torch.equal(cloud.forward(through_bytes(early)), want[number]), (cut, number)
            worked += 1
            random.seed(number)
            assert torch.equal(edge.forward(x), want[number]) or build in KEEPS, (cut, number)
    assert worked or build not in MUST_WORK


@pytest.mark.parametrize("build", KEEPS)
def test_stateful_model_is_refused_by_name(build: Callable[[], nn.Module]) -> None:
    wrapped = WrappedModel(build().eval())
    with pytest.raises(CutRefused, match=r"keeps state from one run to the next: \w|cannot be put back: \w"):
        wrapped.plan(inputs()[0])
        wrapped.forward(inputs()[0], end=0)


def test_a_held_lock_is_named() -> None:
    wrapped = WrappedModel(HeldLock().eval())
    wrapped.plan(inputs()[0])
    with pytest.raises(CutRefused, match=r"HeldLock\.lock"):
        wrapped.forward(inputs()[0], end=0)
    assert wrapped.layers[2].can_split


def test_a_counter_that_nobody_reads_does_not_matter() -> None:
    class CallReports(Base):
        def set_up(self) -> None:
            self.calls, self.seen = 0, None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen = self.a(x)
            return self.c(self.b(x))

    wrapped = WrappedModel(CallReports().eval())
    wrapped.plan(inputs()[0])
    assert all(layer.can_split for layer in wrapped.layers)
    assert wrapped.model.calls == 0 and wrapped.model.seen is None


class Scaled(Base):
    class Settings:
        def __init__(self) -> None:
            self.twice = False

    def set_up(self) -> None:
        self.scale, self.settings = 2, self.Settings()

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x) * self.scale)
        return self.c(x * 2 if self.settings.twice else x)


CHANGES: dict[str, Callable[[Any], None]] = {
    "a number": lambda model: setattr(model, "scale", 3),
    "its type": lambda model: setattr(model, "scale", 2.0),
    "a number of torch's own": lambda model: setattr(model.a, "in_features", 5),
    "a number of an object": lambda model: setattr(model.settings, "twice", True),
    "a new number": lambda model: setattr(model, "more", 1),
    "text in a tuple": lambda model: setattr(model, "scale", (2, "x")),
    "one less": lambda model: delattr(model.settings, "twice"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_number_changed_after_planning_is_planned_again(change: Callable[[Any], None]) -> None:
    wrapped = WrappedModel(Scaled().eval())
    x = inputs()[0]
    key = wrapped._planner.key((x,), {})
    wrapped.plan(x)
    key = wrapped._planner.key((x,), {})
    assert wrapped._planner.key((x,), {}) == key
    before = copy.deepcopy(vars(wrapped.model.settings)), wrapped.model.scale
    change(wrapped.model)
    assert wrapped._planner.key((x,), {}) != key
    vars(wrapped.model.settings).update(before[0])
    wrapped.model.scale, wrapped.model.a.in_features = before[1], 4
    vars(wrapped.model).pop("more", None)
    assert wrapped._planner.key((x,), {}) == key


def test_a_number_changed_on_both_sides_gives_the_answer_of_the_change() -> None:
    edge, cloud = WrappedModel(Scaled().eval()), WrappedModel(Scaled().eval())
    x = inputs()[0]
    for scale, twice in ((2, False), (3, False), (3, True), (2, False)):
        for side in (edge, cloud):
            side.model.scale, side.model.settings.twice = scale, twice
        plain = Scaled().eval()
        plain.scale, plain.settings.twice = scale, twice
        with torch.no_grad():
            assert torch.equal(cloud.forward(through_bytes(edge.forward(x, end=1))), plain(x))
    assert edge._planner.made == 3
