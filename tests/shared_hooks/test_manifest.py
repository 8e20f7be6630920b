"""What a model's digests are made of, and what two sides make of a difference."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared_hooks import WrappedModel
from shared_hooks.errors import BadFrame, TooLarge
from shared_hooks.modules.manifest import (
    CODE,
    MADE,
    MAX_BYTES,
    MAX_ENTRIES,
    MAX_TEXT,
    OPERATION,
    SET,
    USUAL,
    Fact,
    compare,
    decode,
    encode,
)
from tests.zoo import CASES, Case


class Net(nn.Module):
    def __init__(self, eps: float = 1e-5, mode: str = "zeros", slope: float = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1, padding_mode=mode)
        self.norm = nn.BatchNorm2d(2, eps=eps)
        self.slope = slope
        self.path = "/somewhere/else"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(self.norm(self.conv(x)), self.slope)


def facts(model: nn.Module, depth: int | None = None) -> dict[Fact, str]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return WrappedModel(model, depth=depth).manifest()


def test_sides_that_are_alike_have_nothing_to_say() -> None:
    assert compare(facts(Net()), facts(Net())) == compare({}, {})


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Net(eps=1e-3), "norm: eps: client 1e-05, server 0.001"),
        (Net(slope=0.2), "(model): slope: client 0.1, server 0.2"),
        (Net(mode="reflect"), "conv: padding_mode: client 'zeros', server 'reflect'"),
    ],
)
def test_a_number_that_differs_is_named_with_its_module(other: Net, says: str) -> None:
    assert says in compare(facts(Net()), facts(other)).differences


def test_a_depth_is_named() -> None:
    found = compare(facts(Net()), facts(Net(), depth=1)).differences
    assert found == ("(model): depth of layers: client None, server 1",)


def test_a_tensor_is_named_by_shape_or_content() -> None:
    mine, theirs = Net(), Net()
    client = facts(mine)
    server = facts(theirs)
    with torch.no_grad():
        theirs.norm.weight[1] += 1e-3
    server = WrappedModel(theirs).manifest()
    assert compare(client, server).differences == ("weights: other values in norm.weight",)
    wider = facts(nn.Sequential(nn.Linear(2, 3))), facts(nn.Sequential(nn.Linear(3, 3)))
    assert any("0: the tensor weight: client float32 [3, 2] " in text for text in compare(*wider).differences)
    (text,) = compare(
        facts(nn.Sequential(*[nn.Linear(1, 1)] * 3)), _moved(nn.Sequential(*[nn.Linear(1, 1)] * 3))
    ).differences
    assert text == "weights: other values in 0.weight, 0.bias, 1.weight, 1.bias and 2 more"


def _moved(model: nn.Module) -> dict[Fact, str]:
    facts(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    return WrappedModel(model).manifest()


def test_text_of_ones_own_modules_may_be_a_path() -> None:
    model = Net()
    before = facts(model)
    other = Net()
    other.path = "/here"
    assert compare(before, facts(other)).differences == ()


class Newer(nn.BatchNorm2d):
    """As a later release might have it."""

    def __init__(self, number: int, groups: int = 1) -> None:
        super().__init__(number)
        self.groups = groups
        self._doubled = 2 * number


Newer.__qualname__ = Newer.__name__ = "BatchNorm2d"
Newer.__module__ = nn.BatchNorm2d.__module__


@pytest.mark.parametrize("swap", [False, True])
def test_what_one_release_alone_has_is_a_note_unless_it_may_change_results(swap: bool) -> None:
    def both(groups: int) -> tuple[Mapping[Fact, str], Mapping[Fact, str]]:
        found = facts(nn.Sequential(nn.BatchNorm2d(2))), facts(nn.Sequential(Newer(2, groups)))
        return found[::-1] if swap else found

    harmless = compare(*both(1))
    assert harmless.differences == () and len(harmless.notes) == 2
    assert any("0: groups" in note for note in harmless.notes) and any("0: _doubled" in note for note in harmless.notes)
    (text,) = compare(*both(2)).differences
    assert text.startswith("0: groups: ") and "2" in text and "has none" in text


def test_of_operations_the_first_that_differs() -> None:
    def plan(*names: str) -> dict[Fact, str]:
        return {(OPERATION, str(number), ""): name for number, name in enumerate(names)}

    assert compare(plan("linear"), plan()) == compare({}, {}), "a side without an example has no plan"
    found = compare(plan("linear", "relu", "add"), plan("linear", "gelu", "relu", "add"))
    assert found.differences == ("operation 1 of the plan: client relu, server gelu",)


def test_code_is_named_by_its_class() -> None:
    found = compare({(CODE, "Net", ""): "a"}, {(CODE, "Net", ""): "b"})
    assert found.differences == ("code of Net: client a, server b",)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_model_has_one_that_survives_the_wire(case: Case) -> None:
    found = WrappedModel(case.build()).manifest()
    data = encode(found)
    assert data is not None and decode(data) == found
    assert compare(found, WrappedModel(case.build()).manifest()).differences == ()


TEXT = st.text(st.characters(blacklist_characters="\x1e\x1f", blacklist_categories=("Cs",)), max_size=20)
FACTS = st.dictionaries(st.tuples(st.sampled_from([SET, USUAL, MADE, CODE]), TEXT, TEXT), TEXT, min_size=1)


@given(FACTS, FACTS)
def test_every_difference_has_a_line_and_bytes_come_back(one: dict[Fact, str], other: dict[Fact, str]) -> None:
    data = encode(one)
    assert data is not None and decode(data) == one
    found = compare(one, other)
    assert all(text.isprintable() for text in (*found.differences, *found.notes))
    assert compare(one, one) == compare({}, {})


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", BadFrame),
        (b"junk", BadFrame),
        (zlib.compress(b"\xff\xfe"), BadFrame),
        (zlib.compress(b"set\x1fa"), BadFrame),
        (zlib.compress(b"other\x1fa\x1fb\x1fc"), BadFrame),
        (zlib.compress(b"set\x1fa\x1fb\x1fc\x1fd"), BadFrame),
        (zlib.compress(bytes(MAX_TEXT + 1)), TooLarge),
        (zlib.compress(b"\x1e" * MAX_ENTRIES), TooLarge),
        (bytes(MAX_BYTES + 1), TooLarge),
    ],
    ids=range(9),
)
def test_hostile_bytes(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode(data)


def test_what_cannot_go_over_the_wire_is_not_sent() -> None:
    assert encode({(SET, "a\x1e", "b"): "c"}) is None
    assert encode({(SET, str(number), ""): "" for number in range(MAX_ENTRIES + 1)}) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_model_has_digests_that_two_instances_share(case: Case) -> None:
    one, other = WrappedModel(case.build()), WrappedModel(case.build())
    assert one.weights_hash() == other.weights_hash() and one.structure_digest() == other.structure_digest()
    assert one.environment() == other.environment()
