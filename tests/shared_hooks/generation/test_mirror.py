"""Two sides of one state: what one changes, the other knows, however it is changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_hooks.errors import BadFrame
from shared_hooks.generation import register_state
from shared_hooks.generation.inputs import plain, same
from shared_hooks.generation.mirror import AGAIN, LastSent, Mirror, differences
from shared_hooks.generation.remote_tensor import RemoteTensor

HERE = torch.device("cpu")


@register_state
class State:
    def __init__(self) -> None:
        self.length = 0
        self.layers: list[Any] = []
        self.by_name: dict[str, Any] = {}


class Sides:
    """A state, and what the other side makes of what it hears."""

    def __init__(self) -> None:
        self.state = State()
        self.here = Mirror(self.state, HERE)
        self.there = Mirror.built(json.loads(json.dumps(plain(self.here.root, self.state))), HERE)
        self.said: LastSent = None
        self.heard: LastSent = None
        self.words: list[Any] = []

    def step(self) -> None:
        reported, self.said = differences(self.here.look(), self.said)
        self.words.append(reported)
        self.heard = self.there.put(self.heard, json.loads(json.dumps(reported)))
        assert same(self.there.root, self.here.root)
        assert same(Mirror(self.there.state, HERE).root, self.here.root)
        assert all(type(one) is RemoteTensor or one.dtype is torch.int64 for one in self.there.real())


def grow(state: State) -> None:
    """As a cache does: each layer's tensor has one row more."""
    state.length += 1
    for layer in state.layers:
        if isinstance(layer, State):
            layer.by_name["keys"] = torch.zeros(1, state.length, 4)


def add_layer(state: State) -> None:
    layer = State()
    layer.by_name["keys"] = torch.zeros(1, state.length, 4)
    state.layers.append(layer)


OPERATIONS = {
    "grow": grow,
    "layer": add_layer,
    "several": lambda state: state.layers.extend([[], torch.zeros(2, 3), [], torch.zeros(2, 3)]),
    "drop": lambda state: state.layers.pop() if state.layers else None,
    "name": lambda state: state.by_name.update({f"n{len(state.by_name)}": torch.ones(len(state.by_name) + 1, 2)}),
    "rename": lambda state: state.by_name.pop(next(iter(state.by_name)), None) if state.by_name else None,
    "replace": lambda state: setattr(state, "by_name", dict(state.by_name)),
    "number": lambda state: state.by_name.update(position=torch.tensor([state.length])),
    "other": lambda state: state.by_name.update(position=(1, torch.zeros(3), "text")),
    "write": lambda state: [one.add_(1) for one in state.by_name.values() if isinstance(one, torch.Tensor)],
    "nothing": lambda state: None,
}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=14))
def test_mirror_reproduces_the_state(names: list[str]) -> None:
    sides = Sides()
    for name in names:
        OPERATIONS[name](sides.state)
        sides.step()


def test_repeated_changes_are_one_word() -> None:
    sides = Sides()
    for _ in range(3):
        add_layer(sides.state)
    sides.step()
    for _ in range(5):
        grow(sides.state)
        sides.step()
    assert sides.words[-1] == AGAIN
    add_layer(sides.state)
    sides.step()
    assert sides.words[-1] != AGAIN
    for _ in range(3):
        grow(sides.state)
        sides.step()


def test_again_after_the_parts_were_replaced_is_of_the_new_ones() -> None:
    """The places of what grows are remembered: not those of objects that are no part of the state any more."""
    sides = Sides()
    sides.state.by_name["keys"] = torch.zeros(1, 1)
    sides.step()
    for size in (2, 3, 4):
        sides.state.by_name["keys"] = torch.zeros(1, size)
        sides.step()
    before = sides.there.snapshot()
    heard = sides.heard
    sides.there.put(None, [[["d", "", [["keys", ["m", [1, 9], [9, 1], "float32"]]]], [["by_name"]]]])
    sides.there.put(heard, AGAIN)
    assert sides.there.state.by_name["keys"].shape == (1, 10)
    assert sides.there.back_to(before)
    sides.there.put(heard, AGAIN)
    assert sides.there.state.by_name["keys"].shape == (1, 5)
    with pytest.raises(BadFrame):
        sides.there.put(None, AGAIN)


def test_only_places_that_are_said_again_are_remembered_and_they_count() -> None:
    sides = Sides()
    for _ in range(3):
        add_layer(sides.state)
    sides.step()
    there = sides.there
    bare = there.form_bytes
    paths = [["layers", number, "by_name", "keys"] for number in range(3)]
    known = None
    for size in range(1, 40):  # ever new ones
        known = there.put(known, [[["+m", [0, size, 0], [0, 0, 0]], paths]])
        assert not there._places and there.form_bytes == bare
    known = there.put(known, AGAIN)
    assert len(there._places) == 1 and there.form_bytes > bare
    there.put(known, [[["+m", [0, 1, 0], [0, 0, 0]], paths]])
    assert not there._places and there.form_bytes == bare
