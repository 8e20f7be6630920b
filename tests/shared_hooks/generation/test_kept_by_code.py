"""What code keeps beside objects, in globals, classes, defaults and variables around a function, of a model that ran
before it was split: the server's code has another one, or none.
"""

from __future__ import annotations

import sys
import types
from contextlib import suppress
from typing import Any

import pytest
import torch

from shared_hooks.errors import CutRefused
from shared_hooks.generation import DecodingTail, SplitForward
from shared_hooks.generation.edge_session import InProcess

SOURCE = """
import torch
from torch import nn

TABLES, LIST, TABLE, NUMBERED = {}, [], None, {}
LARGE = {"b" * 30 + chr(97 + n // 26) + chr(97 + n % 26): n for n in range(600)} | {f"c{n}": n for n in range(5000)}
class Kept:
    table = None

def by_default(make, kept={}):
    if "a" not in kept:
        kept["a"] = make()
    return kept["a"]

def around():
    table, tables = None, {}
    def variable(make):
        nonlocal table
        if table is None:
            table = make()
        return table
    def dictionary(make):
        if "a" not in tables:
            tables["a"] = make()
        return tables["a"]
    return variable, dictionary

VARIABLE, DICTIONARY = around()

def found(kind, make):
    global TABLE
    if kind == "dictionary":
        if "a" not in TABLES:
            TABLES["a"] = make()
        return TABLES["a"]
    if kind == "numbered":
        if 5 not in NUMBERED:
            NUMBERED[5] = make()
        return NUMBERED[5]
    if kind == "large":
        if "a" not in LARGE:
            LARGE["a"] = make()
        return LARGE["a"]
    if kind == "list":
        if not LIST:
            LIST.append(make())
        return LIST[0]
    if kind == "global":
        if TABLE is None:
            TABLE = make()
        return TABLE
    if kind == "class":
        if Kept.table is None:
            Kept.table = make()
        return Kept.table
    if kind == "function":
        if not hasattr(found, "table"):
            found.table = make()
        return found.table
    return {"default": by_default, "variable": VARIABLE, "around": DICTIONARY}[kind](make)

class Last(nn.Linear):
    def __init__(self, kind, of_data):
        super().__init__(8, 8)
        self.kind, self.of_data = kind, of_data

    def forward(self, x):
        x = super().forward(x)
        return x * found(self.kind, lambda: x.abs().max() if self.of_data else torch.arange(1.0, 9.0))

def model(kind, of_data):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Last(kind, of_data)).eval()
"""
KINDS = ("dictionary", "numbered", "large", "list", "global", "class", "function", "default", "variable", "around")


def loaded(where: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The code as a process of its own has it."""
    module = types.ModuleType(f"{where}.kept")
    module.__file__ = f"/{where}/kept.py"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(SOURCE, module.__file__, "exec"), vars(module))
    return module


def outputs(kind: str, of_data: bool, before: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many of three steps were the whole model's, and refused; none was another one."""
    here, there, whole = (loaded(where, monkeypatch).model(kind, of_data) for where in ("here", "there", "whole"))
    given = torch.randn(6, 1, 8, generator=torch.Generator().manual_seed(1))
    exact = refused = 0
    with torch.no_grad():
        for x in given[:3] if before else ():
            assert torch.equal(here(x), whole(x))
        with SplitForward(here, "0", InProcess(DecodingTail(there, "0"))):
            for x in given[3:]:
                wanted = whole(x)
                with suppress(CutRefused):
                    assert torch.equal(here(x), wanted)
                    exact += 1
                    continue
                refused += 1
    return exact, refused


@pytest.mark.parametrize("of_data", [True, False], ids=["data", "table"])
@pytest.mark.parametrize("before", [True, False], ids=["ran", "fresh"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_is_another_one(kind: str, before: bool, of_data: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, refused = outputs(kind, of_data, before, monkeypatch)
    assert exact + refused == 3
    if of_data and before:
        assert refused == 3
    elif kind in ("dictionary", "list", "default", "around"):  # the others are refused where a table appears later
        assert exact == (1 if of_data else 3)
    elif before:  # a table that the step makes as the edge has it; tables of tables are compared as one value
        assert exact == (0 if kind in ("numbered", "large") else 3)
