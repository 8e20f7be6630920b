"""Tables that no state dictionary names: other numbers in a formula are refused, other last bits are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.modules.manifest import compare, decode, encode
from shared_hooks.modules.tables import WHOLE, compared, tables

POSITIONS = 300


def angles(theta: float, count: int = 64) -> Tensor:
    return torch.outer(torch.arange(POSITIONS), theta ** -(torch.arange(count) / count))


MADE: dict[str, Callable[[float], Any]] = {
    "frequencies": lambda theta: theta ** -(torch.arange(64) / 64),
    "sines": lambda theta: angles(theta).sin(),
    "sines in half the bits": lambda theta: angles(theta).sin().bfloat16(),
    "frequencies in half the bits": lambda theta: (theta ** -(torch.arange(64) / 64)).half(),
    "turns": lambda theta: torch.polar(torch.ones(POSITIONS, 8), angles(theta, 8)),
    "in twice the bits": lambda theta: theta ** -(torch.arange(64).double() / 64),
    "widened": lambda theta: (theta ** -(torch.arange(64) / 64)).double(),
    "an array": lambda theta: theta ** -(np.arange(64, dtype=np.float32) / 64),
    "mask": lambda theta: torch.full((POSITIONS, POSITIONS), -math.inf).triu(int(theta) // 7),
    "lowest": lambda theta: torch.full((POSITIONS, POSITIONS), torch.finfo(torch.float32).min).triu(int(theta) // 7),
    "truth values": lambda theta: torch.ones(POSITIONS, POSITIONS).triu(int(theta) // 7) > 0,
    "whole numbers": lambda theta: (torch.arange(64) * theta).long(),
    "window": lambda theta: torch.hann_window(400) ** theta,
}


class Net(nn.Module):
    """``where`` it keeps its table; what it computes depends on every value of it."""

    def __init__(self, table: Any, where: str = "buffer") -> None:
        super().__init__()
        if where == "buffer" and isinstance(table, Tensor):
            self.register_buffer("freq", table, persistent=False)
        else:
            kept = {"list": [1, (table,)], "dictionary": {"a": {"b": table}}, "object": Kept(table)}
            self.freq = kept.get(where, table)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        found: Any = self.freq
        table = torch.as_tensor(
            {
                "list": lambda: found[1][0],
                "dictionary": lambda: found["a"]["b"],
                "object": lambda: found.table,
            }.get(self.where, lambda: found)()
        )
        table = torch.view_as_real(table) if table.is_complex() else table
        return x + table.double().clamp(-1e6, 1e6).flatten() @ torch.linspace(1, 2, table.numel(), dtype=torch.double)


class Kept:
    def __init__(self, table: Any) -> None:
        self.table = table


def reported(table: Any, where: str = "buffer") -> tuple[WrappedModel, Any]:
    wrapped = WrappedModel(Net(table, where))
    return wrapped, decode(encode(wrapped.manifest()) or b"")


@pytest.mark.parametrize("other", [10.0, 9999.0, 10010.0])
@pytest.mark.parametrize("what", MADE)
def test_another_number_in_the_formula_is_refused(what: str, other: float) -> None:
    (one, mine), (two, theirs) = reported(MADE[what](10000.0)), reported(MADE[what](other))
    x = torch.zeros(1, dtype=torch.double)
    if what == "mask":
        assert not torch.equal(one.model.freq, two.model.freq) or other != 10.0
    elif other == 10.0:
        assert not torch.equal(one(x), two(x))
    if torch.equal(torch.as_tensor(one.model.freq), torch.as_tensor(two.model.freq)):
        assert one.environment() == two.environment()
        return  # rounded to the same
    assert one.environment()["model_tables"] != two.environment()["model_tables"]
    for sides in ((mine, theirs), (theirs, mine)):
        found = compare(*sides)
        assert len(found.differences) == 1 and found.differences[0].startswith("(model): the table freq: client ")
        assert not found.notes and not found.rounding


@pytest.mark.parametrize("where", ["buffer", "attribute", "list", "dictionary", "object"])
@pytest.mark.parametrize("what", ["frequencies", "an array", "truth values"])
def test_wherever_it_is_kept(what: str, where: str) -> None:
    (one, mine), (two, theirs), (same, again) = (
        reported(MADE[what](theta), where) for theta in (10000.0, 10.0, 10000.0)
    )
    x = torch.zeros(1, dtype=torch.double)
    assert torch.equal(one(x), same(x)) and not torch.equal(one(x), two(x))
    assert compare(mine, again) == compare({}, {}) and one.environment() == same.environment()
    assert one.environment() != two.environment() and len(compare(mine, theirs).differences) == 1
    (alone,) = compare({fact: value for fact, value in mine.items() if fact[0] != "table"}, mine).differences
    assert "client has none" in alone


def as_elsewhere(table: Any, ulps: int, seed: int) -> Any:
    """As functions make it that round in their own way: each value some neighbours away."""
    moved = torch.as_tensor(table)
    moved = (torch.view_as_real(moved) if moved.is_complex() else moved).clone()
    steps = torch.randint(-ulps, ulps + 1, moved.shape, generator=torch.Generator().manual_seed(seed))
    for step in range(ulps):
        for sign in (-1, 1):
            toward = torch.nextafter(moved, torch.full_like(moved, sign * math.inf))
            moved = torch.where((steps * sign > step) & moved.isfinite() & (moved != 0), toward, moved)
    return torch.view_as_complex(moved) if torch.as_tensor(table).is_complex() else moved


@settings(max_examples=40)
@given(
    what=st.sampled_from(["frequencies", "sines", "turns", "in twice the bits", "an array", "window", "mask"]),
    theta=st.sampled_from([10.0, 500.0, 10000.0]),
    seed=st.integers(0, 99),
)
def test_other_last_bits_are_named_and_welcome(what: str, theta: float, seed: int) -> None:
    table = MADE[what](theta)
    moved = as_elsewhere(table, 3, seed)
    (one, mine), (two, theirs) = reported(table), reported(moved)
    found = compare(theirs, mine)
    assert found.differences == () and found.notes == ()
    assert len(found.rounding) == (0 if torch.equal(torch.as_tensor(table), moved) else 1)
    assert (one.environment() == two.environment()) == (not found.rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sines_of_frequencies_that_another_processor_makes(dtype: torch.dtype) -> None:
    """The angle of a late position is as far off as that position times the frequency's last bit."""
    frequencies = MADE["frequencies"](10000.0)
    positions = torch.arange(2000)
    both = frequencies, as_elsewhere(frequencies, 1, 7)
    one, other = (torch.outer(positions, each).cos().to(dtype) for each in both)
    assert not torch.equal(one, other)
    found = compare(reported(other)[1], reported(one)[1])
    assert found.differences == () and len(found.rounding) == 1


def test_halves_that_are_rounded_to_another_neighbour() -> None:
    one = MADE["frequencies in half the bits"](10000.0)
    few, many = one.clone(), as_elsewhere(one, 1, 3)
    few[5] = torch.nextafter(few[5], torch.tensor(1.0).half())
    assert compare(reported(few)[1], reported(one)[1]).rounding
    assert compare(reported(many)[1], reported(one)[1]).differences


@pytest.mark.parametrize("size", [WHOLE, WHOLE + 1, 5000])
def test_one_value_in_a_large_table(size: int) -> None:
    """A changed value shows in the mean of its part."""
    one = torch.ones(size)
    for place in (0, size // 3, size - 1):
        other = one.clone()
        other[place] = 1.1
        assert len(compare(reported(other)[1], reported(one)[1]).differences) == 1


def test_stateful_value_is_no_table() -> None:
    model = nn.Sequential(nn.LSTM(2, 2), nn.BatchNorm2d(2), nn.MultiheadAttention(4, 2))
    assert tables(model) == {} and "model_tables" not in WrappedModel(model).environment()


@pytest.mark.parametrize(
    "fact",
    [
        "",
        "float32[3]",
        "float32[3] x",
        "float32[3] x -",
        "float32[3] x a:b",
        "float32[3] x a:single:3:!!",
        "float32[3] x a:single:x:AAAA",
        "float32[3] x a:single:3:",
        "float32[3] x a:double:3:AAAA",
        "float32[9999999] x a:single:3:AAAA",
        "x[" + "9" * 5000,
    ],
)
def test_a_strangers_table_is_another_one(fact: str) -> None:
    model = Net(torch.tensor([1.0, 0.1, 0.01]))
    (own,) = tables(model).values()
    assert not compared(fact, own).alike
    nan = own.replace(own.rpartition(":")[2], "AADAfwAAwH8AAMB/AADAfw==")
    assert not compared(nan, own).alike


class Chain:
    """An object that holds the next one."""

    held: Any = None


def test_a_table_is_found_however_deep_it_lies() -> None:
    class Holder(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.chain = at = Chain()
            for _ in range(5000):
                at.held = Chain()
                at = at.held
            at.held = torch.tensor([value])
            self.lists: list[Any] = []
            for _ in range(5000):
                self.lists = [self.lists]

    one, same, other = (tables(Holder(value)) for value in (1.0, 1.0, 2.0))
    assert len(one) == 1 and one == same != other
