"""Plausible lies: descriptions of cuts in which every entry is of the right form, and some are not true.

A lie is refused by an error of the tree, or it gives an answer made of nothing but what the liar sent (a liar may as
well send other data). It reads no other memory, it changes no weights, and an honest client is answered as before.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from shared_hooks import EarlyOutput
from shared_hooks.errors import IsthmusError
from tests.shared_hooks.hostile import Target, at, paths_of, put, target
from tests.zoo import Case
from tests.zoo.compare import same

SAMPLES = [
    ("branch_on_item", 1),
    ("preallocated_output", 3),
    ("mixture_of_experts", 4),
    ("multihead_attention", 2),
    ("transformer_encoder_padded", 3),
    ("complex_numbers", 1),
    ("base_and_view_cross_then_write", 1),
    ("monte_carlo_dropout", 0),
    ("packed_sequence_lstm", 1),
]
INPUTS = ["", 0, -1]
DTYPES = "float64 float32 float16 complex64 int64 int32 int8 uint8 bool".split()
MOST = 12
"""Lies reported of one sample; those of a kind with more of them are drawn."""

Lie = tuple[str, Any]


def numbers(victim: Target) -> Iterator[Lie]:
    """Every size, stride, offset and number, off by one, doubled, nought."""
    for field in ("inputs", "slots", "marks", "fills", "given", "layouts", "cut"):
        for rest in paths_of(victim.json[field]):
            path = (field, *rest)
            old = at(victim.json, path)
            if type(old) is int:
                for new in {old - 1, old + 1, 2 * old, old // 2, 0, 1, 4096} - {old}:
                    yield f"{path}: {new}", put(*path, value=new)
            elif type(old) is bool:
                yield f"{path}: {not old}", put(*path, value=not old)


def dtypes(victim: Target) -> Iterator[Lie]:
    """Every dtype, another."""
    for path in paths_of(victim.json):
        if at(victim.json, path) in DTYPES and path[0] != "context":
            for name in DTYPES:
                yield f"{path}: {name}", put(*path, value=name)


def shapes(victim: Target) -> Iterator[Lie]:
    """Shapes and strides of other kinds, and flags."""
    for number in range(len(victim.json["marks"])):
        for flags in ("c", "n", "cn"):
            yield f"mark {number} {flags}", put("marks", number, 7, value=flags)
        _, _, _, shape, _, _, _, _ = victim.json["marks"][number]
        for stride in ([0] * len(shape), [1] * len(shape), [1 << 30] * len(shape)):
            yield f"mark {number} strides {stride}", put("marks", number, 4, value=stride)
    for number, (_, elements, _, _) in enumerate(victim.json["slots"]):
        for pieces in ([], [[[1], [1], 0]], [[[elements], [0], 0]], [[[elements, 1], [1, 0], 0]], [[[], [], 0]] * 2):
            yield f"slot {number} pieces {pieces}", put("slots", number, 3, value=pieces)
        yield f"slot {number} larger", put("slots", number, 1, value=2 * elements + 7)


def places(victim: Target) -> Iterator[Lie]:
    """Marks, fills, reads, layouts and given results at all places; two of them swapped; one of them left out."""
    all_places = [INPUTS, *(place for place, _ in victim.places())]
    calls = [[path, number, -1] for (path, number, _) in all_places]
    for field in ("marks", "fills", "given", "reads", "layouts"):
        entries = victim.json[field]
        for number in range(len(entries)):
            for place in (*all_places, *calls):
                yield f"{field} {number} at {place}", put(field, number, 0, value=place)
                yield f"{field} {number} also at {place}", put(field, value=[*entries, [place, *entries[number][1:]]])
            for other in range(number):
                places = entries[number][0], entries[other][0]
                swapped = copy.deepcopy(entries)
                swapped[number][0], swapped[other][0] = reversed(places)
                yield f"{field} {number} and {other} swapped", put(field, value=swapped)
            yield f"{field} without {number}", put(field, value=[one for k, one in enumerate(entries) if k != number])
    for slot, (dtype, elements, _, _) in enumerate(victim.json["slots"]):
        for place in all_places:
            for argument in range(3):
                fills = [*victim.json["fills"], [place, argument, slot]]
                yield f"fill of argument {argument} at {place} from {slot}", put("fills", value=fills)
            mark = [place, 0, slot, [elements], [1], 0, dtype, ""]
            yield f"mark of all of slot {slot} at {place}", put("marks", value=[*victim.json["marks"], mark])


def given(victim: Target) -> Iterator[Lie]:
    """Results that could be worked out are reported: other forms, arguments handed through, writes."""
    tensors = [["t", 0], ["tuple", [["t", 0]]], ["v", 3], ["tuple", []], ["t", 7]]
    form = [[2, 2], [2, 1], "float32"]
    for place, name in victim.places():
        for leaves in ([0], [1], [2], [form], [[[1 << 14], [1], "float32"]], [[[4], [0], "bool"]]):
            for writes in ([], [0], [1]):
                for structure in tensors[: 1 if writes else None]:
                    reported = [*victim.json["given"], [place, name, structure, leaves, writes]]
                    yield (
                        f"{name} at {place} gives {structure} of {leaves}, writes {writes}",
                        put("given", value=reported),
                    )
        for form_of_value in (["v", "int"], ["v", "bool"], ["list", [["v", "float"]]]):
            reads = [*victim.json["reads"], [place, name, form_of_value]]
            yield f"{name} at {place} reads {form_of_value}", put("reads", value=reads)
        for stride in ([], [0], [0, 0], [1, 1], [1 << 39, 1], [1, 7], [0, 0, 0, 0]):
            layouts = [*victim.json["layouts"], [place, 0, stride]]
            yield f"{name} at {place} has strides {stride}", put("layouts", value=layouts)


def others(victim: Target) -> Iterator[Lie]:
    """The cut, the path, the settings."""
    names = [layer.name for layer in victim.plan.layers]
    for number, name in enumerate(["input", *names, "nobody"], -1):
        yield f"cut {number} {name}", put("cut", value=[number, name])
        yield f"cut {name}", put("cut", 1, value=name)
    for depth in (0, 1, 2, 99):
        yield f"depth {depth}", put("depth", value=depth)
    yield "path", put("path", value="0" * 32)
    for generators in ([], ["torch"], ["python"], ["numpy"], ["torch", "python", "numpy"], ["torch", "torch"]):
        yield f"generators {generators}", put("generators", value=generators)
    for autocast in ([["cpu", "bfloat16"]], [["cuda", "float16"]], [["cpu", "float64"]], [["moon", "float32"]]):
        yield f"autocast {autocast}", put("context", "autocast", value=autocast)
    yield "training", put("context", "training", value=names)
    for structure in (["tuple", [["tuple", []], ["dict", []]]], ["tuple", []], ["t", 0], ["v", None]):
        yield f"inputs {structure}", put("inputs", 0, value=structure)


KINDS = [numbers, dtypes, shapes, places, given, others]


def suffer(victim: Target, lies: list[Lie]) -> Counter[str]:
    """Tell the lies, and count what becomes of them."""
    found: Counter[str] = Counter()
    for what, change in lies:
        try:
            try:
                data = victim.reported(change(copy.deepcopy(victim.json)))
            except (ValueError, IndexError):  # no lie that can be known
                continue
            found["not read" if data is None else victim.suffers(data)] += 1
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    victim.serves()
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", SAMPLES, ids=lambda one: one[0])
def test_lies_are_refused_or_harm_the_liar_alone(name: tuple[str, int], kind: Any) -> None:
    victim = target(*name)
    lies = list(kind(victim))
    if len(lies) > MOST:
        lies = random.Random(5).sample(lies, MOST)
    found = suffer(victim, lies)
    assert sum(found.values()) > 0


@pytest.mark.parametrize("name", SAMPLES[:4], ids=lambda one: one[0])
def test_two_lies_at_once(name: tuple[str, int]) -> None:
    victim = target(*name)
    chance = random.Random(7)
    lies = [lie for kind in KINDS for lie in kind(victim)]

    def both(first: Lie, second: Lie) -> Lie:
        return f"{first[0]}; {second[0]}", lambda data: second[1](first[1](data))

    pairs = [both(*chance.sample(lies, 2)) for _ in range(MOST)]
    suffer(victim, pairs)


# --- what attacks did before


class Weights(nn.Module):
    """Uses its weights in every way an operation can: argument, view, result of a call, in-place neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.register_buffer("table", torch.randn(8))
        self.mid = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        y = y + self.table
        y = F.conv2d(y.reshape(1, 1, -1, 8), self.conv.weight).relu_()
        y = y.sum(1)[0] * self.weight.t()[0]
        z = torch.zeros(2, 8)
        z.add_(y)
        return self.last(self.mid(y) + z)


@cache
def weights() -> Target:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return Weights().eval()

    case = Case("weights", build, lambda draw: ((draw.randn(2, 8),), {}))
    return Target(case, "mid")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_lies_about_weights(kind: Any) -> None:
    suffer(weights(), list(kind(weights())))


def attack(**changes: Any) -> str:
    """What becomes of a description with these fields."""
    victim = weights()
    data = victim.reported({**copy.deepcopy(victim.json), **changes})
    outcome = "not read" if data is None else victim.suffers(data)
    victim.serves()
    return outcome


def place_of(name: str, number: int = 0) -> list[Any]:
    return [place for place, one in weights().places() if one == name][number]


def test_a_weight_is_not_handed_through() -> None:
    """The weight as an operation's result would be read by the tail, or written by what comes next, in place."""
    form = [[2, 8], [8, 1], "float32"]
    for name in ("conv2d", "linear", "add", "__mul__", "mul"):
        for place, one in weights().places():
            if one == name:  # after the cut nobody listens, and the answer is right
                assert attack(given=[[place, name, ["t", 0], [1], []]]) != "other", name
                assert attack(given=[[place, name, ["t", 0], [form], [1]]]) != "other", name


def test_a_fill_without_pieces_is_zeros() -> None:
    victim = target("preallocated_uninitialised", 1)
    fill = victim.json["fills"][0]
    data = victim.reported(put("slots", fill[2], 3, value=[])(copy.deepcopy(victim.json)))
    assert data is not None
    for poison in (1.0, 2.0, float("nan")):
        kept = [torch.full((size,), poison) for size in range(1, 2048)]
        del kept
        victim.suffers(data)
    assert not bool(torch.cat([leaf.flatten() for leaf in tree_leaves(victim.answer(data))]).isnan().any())


class Chooses(nn.Module):
    """What it writes to is chosen by a value that is read from data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8))
        self.mid, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scratch = torch.zeros(2, 8)
        chosen = self.weight if bool(x.sum() > 100) else scratch
        chosen.add_(x)
        return self.last(self.mid(x) + chosen)


def test_a_value_that_is_a_lie_does_not_choose_a_weight() -> None:
    """The recipe was made with the honest value; with the other the code hands a parameter to what is filled."""

    def build() -> nn.Module:
        torch.manual_seed(3)
        return Chooses().eval()

    victim = Target(Case("chooses", build, lambda draw: ((draw.randn(2, 8),), {})), "mid")
    assert victim.early.values == (["v", False],) and victim.json["fills"]
    lie = dataclasses.replace(victim.early, values=(["v", True],)).to_bytes()
    assert victim.suffers(lie) == "PlanMismatch"
    victim.serves()


def test_a_weight_is_not_filled() -> None:
    for place, _ in weights().places():
        for argument in range(3):
            for slot in range(len(weights().json["slots"])):
                outcome = attack(fills=[[place, argument, slot]])
                assert outcome not in ("other",), (place, argument)


def test_a_weight_is_not_marked() -> None:
    marks = weights().json["marks"]
    for place, name in weights().places():
        if name in ("t", "__getitem__", "__get__", "zeros"):
            for mark in marks:
                assert attack(marks=[[place, *mark[1:]]]) not in ("right", "other"), name


def test_a_slot_without_pieces_is_zeros(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Not memory that somebody used before, which torch fills with NaN for this test."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    assert torch.empty(3).isnan().all()
    victim = weights.__wrapped__()  # planned under that setting, which both sides must share
    for number in range(len(victim.json["slots"])):
        data = victim.reported(put("slots", number, 3, value=[])(copy.deepcopy(victim.json)))
        assert data is not None
        assert victim.suffers(data) == "other"
        with victim.case.setting():  # without the guard pages that `suffers` has around slots
            answer = victim.server.tail(EarlyOutput.from_bytes(data, max_bytes=1 << 20))
        assert not bool(answer.isnan().any())


def test_four_bytes_do_not_become_a_batch() -> None:
    for batch in (1 << 14, 1 << 20, 1 << 30):
        form = [[batch, 8], [0, 0], "float32"]
        inputs = [weights().json["inputs"][0], [form]]
        mark = [INPUTS, 0, 0, [batch, 8], [0, 0], 0, "float32", ""]
        slots = [["float32", 1, False, [[[1], [1], 0]]]]
        assert attack(cut=[-1, "input"], inputs=inputs, slots=slots, marks=[mark], fills=[], path="") not in (
            "right",
            "other",
        )


def test_two_clients_at_once() -> None:
    """A liar's request between two honest ones leaves no trace in what is kept between requests."""
    victim = weights()
    chance = random.Random(9)
    lies = [lie for kind in KINDS for lie in kind(victim)]
    for _, change in chance.sample(lies, 60):
        data = victim.reported(change(copy.deepcopy(victim.json)))
        if data is not None:
            try:
                victim.answer(data)
            except IsthmusError:
                pass
            assert same(victim.answer(victim.honest), victim.expected)
