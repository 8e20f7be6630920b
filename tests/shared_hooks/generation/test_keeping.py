"""Models that keep things from one call to the next, of any kind and anywhere: exact step by step, or refused."""

from __future__ import annotations

import json
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shared_hooks.errors import CutRefused, IsthmusError
from shared_hooks.generation import DecodingTail, SplitForward
from shared_hooks.generation.edge_session import InProcess, StepReply
from shared_hooks.generation.middle import MiddleDecodingSession
from shared_hooks.modules import weights_hash
from shared_hooks.state import PythonState, entries
from tests.covering import examples

LAYERS = 4
KINDS = ("attribute", "dictionary", "list", "deque", "slot", "count")
HOLDERS = ("itself", "the model", "an object", "the next layer", "the last layer")
SOURCES = ("largest", "mean", "a number", "a table", "a length")


@dataclass(frozen=True)
class Put:
    layer: int
    holder: str
    kind: str
    source: str
    once: bool


@dataclass(frozen=True)
class Get:
    layer: int
    holder: str
    kind: str


@dataclass(frozen=True)
class Habits:
    """What the layers of a model keep and read; ``at_end``: what the model's own forward reads."""

    puts: tuple[Put, ...] = ()
    gets: tuple[Get, ...] = ()
    at_end: tuple[Get, ...] = ()


def made(source: str, x: Tensor) -> Any:
    if source == "largest":
        return x.abs().max()
    if source == "mean":
        return x.mean(0)
    if source == "a number":
        return float(x.sum())
    return torch.arange(1.0, 9.0) if source == "a table" else torch.arange(float(len(x))).sum() + 1


class Slots:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: Any = None


def empty(holder: Any) -> Any:
    """A holder that keeps nothing."""
    holder.kept, holder.bag, holder.listed, holder.count = None, {}, [], 0
    holder.last, holder.slots = deque(maxlen=2), Slots()
    return holder


class Layer(nn.Linear):
    def __init__(self, number: int, model: Keeper) -> None:
        super().__init__(8, 8)
        self.number, self.model = number, [model]
        empty(self)

    def forward(self, x: Tensor) -> Tensor:
        x, model = super().forward(x), self.model[0]
        for put in model.habits.puts:
            if put.layer != self.number:
                continue
            holder = model.holder(put.holder, self)
            if put.kind == "attribute" and (holder.kept is None or not put.once):
                holder.kept = made(put.source, x)
            elif put.kind == "dictionary" and ("a" not in holder.bag or not put.once):
                holder.bag["a"] = made(put.source, x)
            elif put.kind == "list" and not holder.listed:
                holder.listed.append(made(put.source, x))
            elif put.kind == "deque":
                holder.last.append(made(put.source, x))
            elif put.kind == "slot" and (holder.slots.kept is None or not put.once):
                holder.slots.kept = made(put.source, x)
            elif put.kind == "count":
                holder.count = 0 if put.once else holder.count + 1
        for get in model.habits.gets:
            if get.layer == self.number:
                x = scaled(x, get, model.holder(get.holder, self))
        return x


def scaled(x: Tensor, get: Get, holder: Any) -> Tensor:
    if get.kind == "attribute":
        kept = holder.kept
    elif get.kind == "dictionary":
        kept = holder.bag.get("a")
    elif get.kind == "slot":
        kept = holder.slots.kept
    elif get.kind == "count":
        kept = holder.count
    else:
        listed = holder.listed if get.kind == "list" else holder.last
        kept = listed[-1] if listed else None
    return x if kept is None else x / 2 + kept / 4


class Keeper(nn.Module):
    def __init__(self, habits: Habits) -> None:
        super().__init__()
        torch.manual_seed(3)
        empty(self)
        self.habits, self.object = habits, empty(SimpleNamespace())
        self.layers = nn.ModuleList()
        for number in range(LAYERS):
            self.layers.append(Layer(number, self))

    def holder(self, name: str, layer: Any) -> Any:
        if name == "itself":
            return layer
        if name == "the next layer":
            return self.layers[min(layer.number + 1, LAYERS - 1)]
        return {"the model": self, "an object": self.object, "the last layer": self.layers[-1]}[name]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for get in self.habits.at_end:
            x = scaled(x, get, self.holder(get.holder, self.layers[get.layer]))
        return x


LAYER = st.integers(0, LAYERS - 1)
PUT = st.builds(Put, LAYER, st.sampled_from(HOLDERS), st.sampled_from(KINDS), st.sampled_from(SOURCES), st.booleans())
GET = st.builds(Get, LAYER, st.sampled_from(HOLDERS), st.sampled_from(KINDS))
HABITS = st.builds(
    Habits,
    st.lists(PUT, min_size=1, max_size=3).map(tuple),
    st.lists(GET, min_size=1, max_size=3).map(tuple),
    st.lists(GET, max_size=1).map(tuple),
)


def answers(
    habits: Habits, cut: int, second: int | None, *, ran: bool, lengths: list[int], private: bool = False
) -> int:
    """How many steps were answered before one was refused: each as the whole model answers it."""
    whole, edge, dice = Keeper(habits), Keeper(habits), torch.Generator().manual_seed(5)
    found = 0
    with torch.no_grad():
        if ran:  # the edge's model, before it is split
            x = torch.randn(3, 8, generator=dice)
            edge(x), whole(x)
        try:
            tail = DecodingTail(Keeper(habits), f"layers.{cut}")
            link = InProcess(tail)
            if second is not None:
                last = InProcess(DecodingTail(Keeper(habits), f"layers.{second}"))
                link = InProcess(tail, None, lambda: MiddleDecodingSession(tail, f"layers.{second}", last))
            with SplitForward(edge, f"layers.{cut}", link, private=frozenset({"x"}) if private else None):
                for number, length in enumerate(lengths):
                    x = (number + 1) * torch.randn(length, 8, generator=dice)
                    wanted = whole(x)
                    assert torch.equal(edge(x), wanted), f"step {number} of {habits}"
                    found += 1
        except IsthmusError:
            pass
    return found


@settings(max_examples=examples(300), deadline=None)
@given(
    HABITS,
    st.integers(0, LAYERS - 2),
    st.integers(0, LAYERS - 2),
    st.booleans(),
    st.sampled_from(("same", "grow", "same, private", "grow, private")),
)
def test_kept_state_is_right_or_refused(habits: Habits, cut: int, second: int, ran: bool, sizes: str) -> None:
    lengths = [3, 3, 3, 3] if "same" in sizes else [2, 3, 4, 5]
    answers(habits, cut, second if second > cut else None, ran=ran, lengths=lengths, private="private" in sizes)


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize(
    ("habits", "cut"),
    [
        # a table that each has for itself, whatever other code is called alike
        (Habits((Put(0, "itself", "attribute", "a table", True),), (Get(0, "itself", "attribute"),)), 0),
        (Habits((Put(2, "itself", "dictionary", "a table", True),), (Get(2, "itself", "dictionary"),)), 1),
        (Habits((Put(3, "the model", "list", "a table", True),), (Get(3, "the model", "list"),)), 1),
        # written again in each call, and read behind that
        (Habits((Put(2, "an object", "attribute", "mean", False),), (Get(3, "an object", "attribute"),)), 1),
        # kept, and read by no code that runs
        (Habits((Put(0, "an object", "list", "a number", True),), ()), 1),
    ],
)
def test_state_kept_on_the_reading_side_is_exact(habits: Habits, cut: int, ran: bool) -> None:
    assert answers(habits, cut, None, ran=ran, lengths=[3, 3, 3, 3]) == 4


@pytest.mark.parametrize(
    "habits",
    [
        Habits((Put(3, "the model", "attribute", "mean", True),), (Get(0, "the model", "attribute"),)),
        Habits((Put(3, "an object", "dictionary", "a table", False),), (Get(0, "an object", "dictionary"),)),
        Habits((Put(3, "the last layer", "list", "a table", True),), (Get(0, "the last layer", "list"),)),
    ],
)
def test_state_made_behind_and_read_before_the_cut_is_refused(habits: Habits) -> None:
    assert answers(habits, 1, None, ran=False, lengths=[3, 3, 3, 3]) <= 1


def test_state_of_an_earlier_edge_run_is_refused() -> None:
    habits = Habits((Put(0, "an object", "attribute", "mean", True),), (Get(3, "an object", "attribute"),))
    assert answers(habits, 1, None, ran=True, lengths=[3, 3]) == 0


def test_a_layer_may_remember_what_it_was_last_given() -> None:
    class Remembers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last.relu()

    def made() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(*(Remembers(8, 8) for _ in range(4)))

    whole, edge = made(), made()
    with torch.no_grad(), SplitForward(edge, "1", InProcess(DecodingTail(made(), "1"))):
        for _ in range(4):
            x = torch.randn(3, 8)
            assert torch.equal(edge(x), whole(x))
            mine: Any = edge[0]
            assert torch.equal(mine.last, whole[0].last), "a user of the edge may look at it"  # type: ignore[arg-type]


NAMES = sorted(entries(PythonState(Keeper(Habits()), settings=False)))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
NAME = st.sampled_from(NAMES) | st.sampled_from(NAMES).map(lambda name: f"{name}.more") | st.text(max_size=40)
SAID = st.lists(st.tuples(NAME).map(list) | st.tuples(NAME, JSON).map(list), max_size=12) | JSON
SAID_AT_ALL = st.fixed_dictionaries({"m": SAID}, optional={"u": SAID})


class Forged(InProcess):
    """Says something else of what the edge's model keeps."""

    said: Any = None

    def step(self, session: int, number: int, header: Any, tensors: Any, *rest: Any) -> Any:
        return super().step(session, number, {**header, **self.said}, tensors, *rest)


@settings(max_examples=examples(150), deadline=None)
@given(HABITS, SAID_AT_ALL)
def test_reports_of_an_edge_do_not_change_the_servers_model(habits: Habits, said: Any) -> None:
    model = Keeper(habits)
    before, weights = PythonState(model, settings=False), weights_hash(model)
    link = Forged(DecodingTail(model, "layers.1"))
    link.said = said
    with torch.no_grad(), SplitForward(Keeper(habits), "layers.1", link) as split:
        for _ in range(2):
            with suppress(IsthmusError):
                split.model(torch.randn(3, 8))
            assert not before.changes() and weights_hash(model) == weights


class Listens(InProcess):
    """Keeps what the edge says of its model."""

    heard: str = ""

    def step(self, session: int, number: int, header: Any, tensors: Any, *rest: Any) -> Any:
        self.heard += json.dumps([header.get("m"), header.get("u")])
        return super().step(session, number, header, tensors, *rest)


def test_numbers_that_an_edge_keeps_do_not_cross() -> None:
    """They may be made of an input, and so may keys."""

    class Remembers(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.last: Any = None
            self.total, self.seen = 0.0, {}  # type: ignore[var-annotated]

        def forward(self, x: Tensor) -> Tensor:
            self.last, self.total = super().forward(x), 0.25
            self.seen = {(71, 72, 73): 1}
            made: Tensor = self.last.relu()
            return made

    def made() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(*(Remembers() for _ in range(4)))

    whole, edge, link = made(), made(), Listens(DecodingTail(made(), "1"))
    with torch.no_grad(), SplitForward(edge, "1", link, private=frozenset({"input"})):
        for _ in range(3):
            x = torch.randn(3, 8)
            assert torch.equal(edge(x), whole(x))
            mine: Any = edge[0]
            assert not any(f"{number:.6f}"[:-1] in link.heard for number in mine.last.flatten().tolist())
    assert "0.last" in link.heard and "0.25" not in link.heard and "72" not in link.heard


def test_a_server_that_guesses_at_what_an_edge_keeps_is_left() -> None:
    """It may compare a value a few times, once in each answer."""

    class Guesses(InProcess):
        asked = 0

        def step(self, session: int, number: int, header: Any, tensors: Any, *rest: Any) -> Any:
            self.asked += 1
            rows = [["Keeper.kept", str(self.asked), "0"], ["Keeper.kept", "3", "0"]]
            return StepReply({"need": ["kept", rows], "why": "guesses"}, [], 0, 0)

    habits = Habits((Put(0, "the model", "attribute", "mean", False),), ())
    link = Guesses(DecodingTail(Keeper(habits), "layers.1"))
    with torch.no_grad(), SplitForward(Keeper(habits), "layers.1", link) as split, pytest.raises(CutRefused):
        split.model(torch.randn(3, 8))
    assert link.asked == 9
