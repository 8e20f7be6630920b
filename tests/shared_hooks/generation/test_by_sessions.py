"""Steps of sessions for any model, not only language models: the model's own answer, or a refusal."""

from __future__ import annotations

import json
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import BadFrame, CutRefused, IsthmusError, TooLarge
from shared_hooks.generation import DecodingTail, SplitForward
from shared_hooks.generation.edge_session import InProcess
from shared_hooks.generation.hidden import KeptState, differing, left_behind, read_comparison
from shared_hooks.generation.middle import MiddleDecodingSession
from shared_hooks.state import PythonState, poisoned
from tests.covering import every
from tests.zoo import CASES, Case
from tests.zoo.compare import differences

FORMS = ("instead of", "keys [")
"""How a difference begins that is one of containers: dictionaries of their own classes come as plain ones."""


def cuts_of(case: Case) -> list[str]:
    """All, of models that keep something to themselves; else one in the middle."""
    with case.setting(), WrappedModel(case.build()) as wrapped:
        args, kwargs = case.inputs()
        found = [cut.name for cut in wrapped.plan(*args, **kwargs).cuts if cut.name != "input" and "#" not in cut.name]
    return found if case.max_refused == 1.0 else found[len(found) // 2 :][:1]


@pytest.mark.parametrize("case", every(2, CASES), ids=lambda case: case.name)
def test_an_answer_is_the_models_own_or_none(case: Case) -> None:
    expected = case.run(case.build())
    for cut in cuts_of(case):
        edge, cloud = case.build(), case.build()
        try:
            tail = DecodingTail(cloud, cut)
        except IsthmusError:
            continue
        try:
            with SplitForward(edge, cut, InProcess(tail)):
                wrong = list(differences(case.run(edge), expected))
        except (IsthmusError, TypeError):  # of a model that is not called as language models are
            continue
        finally:
            tail.close()
        assert all(any(form in one for form in FORMS) for one in wrong), f"cut {cut}: {wrong}"


class Trimmed(nn.Module):
    """What crosses lies with gaps, or is one number many times."""

    def __init__(self, repeated: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(64, 64), nn.Linear(32, 8)
        self.cut = Repeat() if repeated else Trim()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.cut(self.first(x))
        return self.last(torch.tanh(y)), torch.tensor(y.stride())


class Trim(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, ::2]


class Repeat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, :1].expand(*x.shape[:2], 32)


@pytest.mark.parametrize("repeated", [False, True])
def test_crossing_tensors_keep_their_layout(repeated: bool) -> None:
    whole, edge, cloud = (Trimmed(repeated) for _ in range(3))
    x = torch.randn(2, 5, 64)
    with torch.no_grad(), SplitForward(edge, "cut", InProcess(DecodingTail(cloud, "cut"))):
        (found, strides), (wanted, as_they_are) = edge(x), whole(x)
    assert torch.equal(found, wanted)
    assert strides.tolist() == as_they_are.tolist() != list(torch.empty(2, 5, 32).stride())


@pytest.mark.parametrize(
    ("layouts", "error"),
    [
        (1, BadFrame),
        ([[0]], BadFrame),
        ([["0", [1, 1, 1]]], BadFrame),
        ([[7, [1, 1, 1]]], BadFrame),
        ([[0, [1, 1]]], BadFrame),
        ([[0, [-1, 1, 1]]], BadFrame),
        ([[0, [0.5, 1, 1]]], BadFrame),
        ([[0, [1 << 47, 1, 1]]], TooLarge),
        ([[0, [1 << 80, 1, 1]]], (BadFrame, TooLarge)),
        ([[0, None]], BadFrame),
        ([[0, [160, 32, 1]], [0, [160, 32, 1]]], BadFrame),
        ([[True, [160, 32, 1]]], BadFrame),
    ],
    ids=str,
)
def test_layouts_from_strangers(layouts: Any, error: type[Exception]) -> None:
    tail = DecodingTail(Trimmed(False), "cut")

    class Forged(InProcess):
        def step(self, session: int, number: int, header: Any, tensors: Any, *rest: Any) -> Any:
            return super().step(session, number, {**header, "l": layouts}, tensors, *rest)

    with torch.no_grad(), SplitForward(Trimmed(False), "cut", Forged(tail)) as split, pytest.raises(error):
        split.model(torch.randn(2, 5, 64))


class Keeps(nn.Module):
    """A counter of the model is raised by its layers and read behind the cut; a table is made on first use."""

    class Layer(nn.Module):
        def __init__(self, root: list[nn.Module], counts: bool) -> None:
            super().__init__()
            self.root, self.linear, self.counts = root, nn.Linear(8, 8), counts

        def forward(self, x: Tensor) -> Tensor:
            root: Any = self.root[0]
            if self.counts:
                root.count += 1
            if root.table is None:
                root.table = torch.arange(8.0)
            return self.linear(x) + root.table

    def __init__(self, *counts: int) -> None:
        """``counts``: layers that raise the counter."""
        super().__init__()
        torch.manual_seed(5)
        self.count, self.table = 0, None
        me: list[nn.Module] = [self]
        self.layers = nn.ModuleList(self.Layer(me, number in counts) for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count = 0
        for layer in self.layers:
            x = layer(x)
        return x * (1 + self.count)


@pytest.mark.parametrize(("cut", "is_served"), [("layers.0", False), ("layers.1", True)])
def test_layer_state_read_behind_the_cut(cut: str, is_served: bool) -> None:
    x, whole = torch.randn(2, 8), Keeps(0, 2)
    with torch.no_grad(), SplitForward(Keeps(0, 2), cut, InProcess(DecodingTail(Keeps(0, 2), cut))) as split:
        for _ in range(3):
            if is_served:  # the server runs the first layer's Python, too
                assert torch.equal(split.model(x), whole(x))
            else:
                with pytest.raises(CutRefused, match=r"keeps Keeps\.count"):
                    split.model(x)


def test_a_table_that_is_made_on_first_use_is_none_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    x, whole, edge, runs, run = torch.randn(2, 8), Keeps(), Keeps(), 0, SplitForward._run_head

    def counted(*given: Any) -> None:
        nonlocal runs
        runs += 1
        run(*given)

    monkeypatch.setattr(SplitForward, "_run_head", counted)
    with torch.no_grad(), SplitForward(edge, "layers.1", InProcess(DecodingTail(Keeps(), "layers.1"))):
        for _ in range(3):
            assert torch.equal(edge(x), whole(x))
    assert runs == 4, "the first head ran twice"


@pytest.mark.parametrize("counting", [(), (1,), (1, 2), (2,), (0,)])
def test_middle_part_state_read_by_the_next(counting: tuple[int, ...]) -> None:
    x, whole = torch.randn(2, 8), Keeps(*counting)
    last = InProcess(DecodingTail(Keeps(*counting), "layers.1"))
    middle = DecodingTail(Keeps(*counting), "layers.0")
    link = InProcess(middle, None, lambda: MiddleDecodingSession(middle, "layers.1", last))
    with torch.no_grad(), SplitForward(Keeps(*counting), "layers.0", link) as split:
        for _ in range(3):
            try:  # the table is made by each part for itself
                assert torch.equal(split.model(x), whole(x))
            except CutRefused as error:
                assert {0, 1} & {*counting} and "keeps Keeps.count" in str(error)


class Slots:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


def counter() -> Callable[[], int]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


class Bound:
    def __init__(self) -> None:
        self.number = 0

    def count(self) -> int:
        self.number += 1
        return self.number


def grown(one: Any) -> int:
    one.append(1)
    return len(one)


def raised(one: Any) -> int:
    one.number += 1
    return int(one.number)


def added(one: Any) -> int:
    one.add(len(one))
    return len(one)


HANDED: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
    "an object": (lambda: SimpleNamespace(number=0), raised),
    "one with slots": (Slots, raised),
    "a set": (set, added),
    "bytes": (bytearray, grown),
    "a deque": (deque, grown),
    "a list in a tuple": (lambda: ([],), lambda one: grown(one[0])),
    "an object in a dictionary": (lambda: {"a": SimpleNamespace(number=0)}, lambda one: raised(one["a"])),
    "a function": (counter, lambda one: int(one())),
    "a method": (lambda: Bound().count, lambda one: int(one())),
    "a part of a function": (lambda: partial(raised, SimpleNamespace(number=0)), lambda one: int(one())),
    "an array": (lambda: np.zeros(3), lambda one: int(np.add(one, 1, out=one).sum())),
    "Python's dice": (lambda: random.Random(3), lambda one: one.randrange(9)),
    "numpy's dice": (lambda: np.random.default_rng(3), lambda one: int(one.integers(9))),
    "an iterator": (lambda: iter(range(99)), lambda one: int(next(one))),
    "a generator of numbers": (
        lambda: torch.Generator().manual_seed(3),
        lambda one: int(torch.randint(9, (1,), generator=one)),
    ),
}


class Hands(nn.Module):
    """Hands something from layer to layer, which ``change`` changes and reads."""

    class Layer(nn.Module):
        def __init__(self, change: Callable[[Any], int]) -> None:
            super().__init__()
            self.linear, self.change = nn.Linear(8, 8), change

        def forward(self, x: Tensor, handed: Any) -> Tensor:
            return self.linear(x) + self.change(handed)

    def __init__(self, kind: str, *changing: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.make, change = HANDED[kind]
        self.layers = nn.ModuleList(self.Layer(change if at in changing else _nothing) for at in range(4))

    def forward(self, x: Tensor) -> Tensor:
        handed = self.make()
        for layer in self.layers:
            x = layer(x, handed)
        return x


def _nothing(_: Any) -> int:
    return 0


@pytest.mark.parametrize("kind", HANDED)
def test_values_passed_between_layers(kind: str) -> None:
    x = torch.randn(2, 8)
    tail = DecodingTail(Hands(kind, 0, 3), "layers.1")
    refused = pytest.raises(CutRefused, match=r"layers\.0, before the cut, changes")
    with torch.no_grad(), SplitForward(Hands(kind, 0, 3), "layers.1", InProcess(tail)) as split, refused:
        split.model(x)
    if kind == "an iterator":  # nobody can see whether it was used
        return
    whole, tail = Hands(kind, 2, 3), DecodingTail(Hands(kind, 2, 3), "layers.1")
    with torch.no_grad(), SplitForward(Hands(kind, 2, 3), "layers.1", InProcess(tail)) as split:
        assert torch.equal(split.model(x), whole(x))


@pytest.mark.parametrize("kind", HANDED)
def test_values_passed_on_by_a_middle_part(kind: str) -> None:
    last = InProcess(DecodingTail(Hands(kind, 1, 3), "layers.1"))
    middle = DecodingTail(Hands(kind, 1, 3), "layers.0")
    link = InProcess(middle, None, lambda: MiddleDecodingSession(middle, "layers.1", last))
    with torch.no_grad(), SplitForward(Hands(kind, 1, 3), "layers.0", link) as split, pytest.raises(IsthmusError):
        split.model(torch.randn(2, 8))


class Tags(nn.Module):
    """Numbers ride on tensors."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            made: Any = super().forward(x)
            made.depth = getattr(x, "depth", 0) + 1
            return made

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(self.Layer(8, 8) for _ in range(3))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x * x.depth


def test_attributes_of_tensors_do_not_cross() -> None:
    tail = DecodingTail(Tags(), "layers.1")
    refused = pytest.raises(CutRefused, match=r"layers\.1 gives a tensor with attributes of its own \(depth\)")
    with torch.no_grad(), SplitForward(Tags(), "layers.1", InProcess(tail)) as split, refused:
        split.model(torch.randn(2, 8))


OWN = threading.local()


class Outside(nn.Module):
    """Counts in the environment, or in what each thread has for itself."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            os.environ["ISTHMUS_TEST"] = str(int(os.environ["ISTHMUS_TEST"]) + 1)
            return super().forward(x) * int(os.environ["ISTHMUS_TEST"])

    class OfThread(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            OWN.count += 1
            return super().forward(x) * OWN.count

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(kind(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        os.environ["ISTHMUS_TEST"], OWN.count = "0", 0
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("kind", "said"), [(Outside.Layer, "os.environ"), (Outside.OfThread, "a threading.local")])
def test_state_outside_of_the_model(kind: type[nn.Linear], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_TEST", "0")
    tail = DecodingTail(Outside(kind), "layers.1")
    refused = pytest.raises(CutRefused, match=f"keeps {said}")
    with torch.no_grad(), SplitForward(Outside(kind), "layers.1", InProcess(tail)) as split, refused:
        split.model(torch.randn(2, 8))


class SetsOnce(nn.Module):
    """The first layer sets a number on first use, which the others read."""

    class Layer(nn.Linear):
        def __init__(self, root: list[nn.Module], first: bool) -> None:
            super().__init__(8, 8)
            self.root, self.first = root, first

        def forward(self, x: Tensor) -> Tensor:
            root: Any = self.root[0]
            if self.first and root.scale == 1:
                root.scale = 2
            return super().forward(x) * root.scale

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale, self.words = 1, nn.Embedding(9, 8)
        me: list[nn.Module] = [self]
        self.layers = nn.ModuleList(self.Layer(me, not number) for number in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_state_set_once_for_layers_behind_the_cut() -> None:
    tail, ids = DecodingTail(SetsOnce(), "layers.1"), torch.tensor([[1, 2]])
    with torch.no_grad(), SplitForward(SetsOnce(), "layers.1", InProcess(tail)) as split:
        for _ in range(3):
            with pytest.raises(CutRefused, match=r"keeps SetsOnce\.scale"):
                split.model(ids)


class Scale(nn.Module):
    """Keeps what it has found in its first input, or a table that is none of its input's business."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.kept, self.listed = kind, None, []

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "listed":
            self.listed = self.listed or [float(x.abs().max())]
            return x / self.listed[0]
        if self.kept is None:
            made: Any = torch.arange(1.0, 9.0) if self.kind == "table" else x.abs().max()
            self.kept = {"one": [made]} if self.kind == "dictionary" else made
        return x / (self.kept["one"][0] if isinstance(self.kept, dict) else self.kept)


class Calibrated(nn.Module):
    class Layer(nn.Linear):
        def __init__(self, scale: Scale, before: Any, reads: bool) -> None:
            super().__init__(8, 8)
            self.scale, self.reads, self.before = scale, reads, [before]

        def forward(self, x: Tensor) -> Tensor:
            x = self.scale(super().forward(x))
            kept = self.before[0].scale.kept if self.reads and self.before[0] is not None else None
            return x if kept is None else x * kept

    def __init__(self, kind: str = "", *, shared: bool = False, read: str = "") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.read, one, before = read, Scale(kind), None
        self.layers = nn.ModuleList()
        for _ in range(4):
            before = self.Layer(one if shared else Scale(kind), before, read == "by the next")
            self.layers.append(before)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        kept: Any = self.layers[0].scale.kept if self.read == "at the end" else None  # type: ignore[union-attr]
        return x if kept is None else x * kept


class Plain(nn.Sequential):
    """Layers with a table each, which no other code reads."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(*(nn.Sequential(nn.Linear(8, 8), Scale("table")) for _ in range(4)))


CALIBRATED = [
    Calibrated,
    partial(Calibrated, "dictionary"),
    partial(Calibrated, "listed"),
    partial(Calibrated, shared=True),
    partial(Calibrated, read="at the end"),
    partial(Calibrated, read="by the next"),
    partial(Calibrated, shared=True, read="by the next"),
]


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("cut", ["layers.0", "layers.1"])
@pytest.mark.parametrize("make", [*CALIBRATED, partial(Calibrated, "table", shared=True)])
def test_state_made_from_the_first_input_is_no_table(make: Callable[..., nn.Module], cut: str, ran: bool) -> None:
    whole, edge, dice = make(), make(), torch.Generator().manual_seed(3)
    answers, table = 0, isinstance(make, partial) and make.args == ("table",)
    with torch.no_grad():
        if ran:  # the edge's model, before it is split
            x = torch.randn(2, 8, generator=dice)
            assert torch.equal(edge(x), whole(x))
        with SplitForward(edge, cut, InProcess(DecodingTail(make(), cut))):
            for number in range(1, 5):
                x = number * torch.randn(2, 8, generator=dice)
                wanted = whole(x)
                try:
                    assert torch.equal(edge(x), wanted)
                    answers += 1
                except CutRefused as error:
                    assert not table and "keeps Calibrated." in str(error)
    assert answers == 4 if table else answers <= 1, "the first step, at most, is what it would be"


@pytest.mark.parametrize("make", [*CALIBRATED, partial(Calibrated, "table", shared=True), Plain])
def test_state_made_from_the_first_input_along_a_chain(make: Callable[..., nn.Module]) -> None:
    first, second = ("1", "2") if make is Plain else ("layers.1", "layers.2")
    last, middle = InProcess(DecodingTail(make(), second)), DecodingTail(make(), first)
    link = InProcess(middle, None, lambda: MiddleDecodingSession(middle, second, last))
    whole, dice, answers = make(), torch.Generator().manual_seed(3), 0
    with torch.no_grad(), SplitForward(edge := make(), first, link):
        for number in range(1, 5):
            x = number * torch.randn(2, 8, generator=dice)
            wanted = whole(x)
            try:
                assert torch.equal(edge(x), wanted)
                answers += 1
            except CutRefused as error:
                assert "keeps Calibrated." in str(error)
    assert answers == 4 if make not in CALIBRATED else answers <= 1


class Feeds(nn.Module):
    """What the second layer has made once, the first one reads from then on."""

    class Layer(nn.Linear):
        def __init__(self, root: list[nn.Module], number: int) -> None:
            super().__init__(8, 8)
            self.root, self.number = root, number

        def forward(self, x: Tensor) -> Tensor:
            root: Any = self.root[0]
            if self.number == 0 and root.table is not None:
                x = x * root.table
            if self.number == 1 and root.table is None:
                root.table = torch.arange(8.0)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, me = None, list[nn.Module]([self])
        self.layers = nn.ModuleList(self.Layer(me, number) for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_head_that_gives_something_else_with_its_table_is_refused() -> None:
    tail = DecodingTail(Feeds(), "layers.1")
    with torch.no_grad(), SplitForward(Feeds(), "layers.1", InProcess(tail)) as split:
        x = torch.randn(2, 8)
        with pytest.raises(CutRefused, match=r"keeps Feeds\.table"):
            split.model(x)


def test_a_table_that_each_layer_has_for_itself_is_none_of_that() -> None:
    whole, dice = Plain(), torch.Generator().manual_seed(3)
    with torch.no_grad(), SplitForward(edge := Plain(), "1", InProcess(DecodingTail(Plain(), "1"))):
        for _ in range(3):
            x = torch.randn(2, 8, generator=dice)
            assert torch.equal(edge(x), whole(x))


class Holds(nn.Module):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = x
        return self.kept + x


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        (torch.tensor([2e-4]), torch.tensor([9e-4]), False),
        (torch.tensor([1.0, 1e-9]), torch.tensor([1.0, -1e-9]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.00001]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0001]), False),
        (torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([1.0, 2.01]).bfloat16(), True),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([float("inf")]), torch.tensor([3.0]), False),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        ({"one": [2e-4]}, {"one": [9e-4]}, False),
        (None, torch.ones(1), False),
        (2e-4, 2e-4 * (1 + 1e-6), True),
    ],
)
def test_tables_of_two_machines(mine: Any, theirs: Any, same: bool) -> None:
    edge = KeptState.of(PythonState(Holds(mine), settings=False))
    found, asked = differing(edge.header_data(), PythonState(Holds(theirs), settings=False))
    compared = edge.compared([[name, one, one] for name, one in asked.items()])
    other, _, rest = read_comparison(compared, asked)
    assert not rest and bool(found or other) is not same
    assert "0002" not in json.dumps(edge.header_data()), "numbers are compared where they are"


@pytest.mark.parametrize("said", [1, [[]], [1], [["a"], [[], 1]], [[{}]]])
def test_malformed_tables(said: Any) -> None:
    model = nn.Linear(2, 2)
    for read in (
        lambda: differing(said, PythonState(model, settings=False)),
        lambda: left_behind(said, model),
        lambda: KeptState({}).compared(said),
        lambda: read_comparison(said, {}),
    ):
        with pytest.raises(BadFrame, match="malformed"):
            read()


def test_too_many_tables() -> None:
    said = [[f"Holds.a{number}", "1"] for number in range(10_000)]
    with pytest.raises(BadFrame, match="10000 values of a model's state"):
        differing(said, PythonState(Holds(None), settings=False))
    names = [f"Holds.a{number}" for number in range(4096)]
    state = PythonState(model := Holds(None), settings=False)
    with poisoned(state, names) as reached:
        assert reached and "a4095" in vars(model)
    assert "a4095" not in vars(model)


class Mapped(nn.Sequential):
    """Its own forward makes tensors inside `torch.vmap`."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.vmap(lambda row: torch.zeros_like(row) + row.sum())(x)
        return super().forward(x)


def test_tensors_that_are_made_inside_of_vmap() -> None:
    whole, x = Mapped(), torch.randn(2, 8)
    with torch.no_grad(), SplitForward(edge := Mapped(), "1", InProcess(DecodingTail(Mapped(), "1"))):
        for _ in range(2):
            assert torch.equal(edge(x), whole(x))
