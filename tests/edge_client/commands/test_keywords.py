"""An option of a command and the keyword of its task are one: none is missing on either side, and none differs."""

from __future__ import annotations

import argparse
import importlib
import inspect
from typing import Any

import pytest

from edge_client.commands.arguments import make_parser

TASKS = {
    "bench": "bench",
    "calibrate": "calibrate",
    "export": "export",
    "hierarchy": "hierarchy",
    "plan": "plan",
    "plan_generation": "plan",
    "profile": "profile",
    "prune": "prune",
    "sweep": "sweep",
    "verify": "verify",
}
"""Task -> its command."""
GIVEN = {"credentials", "progress", "failures", "say"}
"""Keywords that a command makes of several options, or of none."""
OWN = {"plan": {"power"}, "plan_generation": {"power", "goal"}}
(parsers,) = (action for action in make_parser()._actions if action.dest == "command")
assert isinstance(parsers, argparse._SubParsersAction)


def options(command: str) -> dict[str, argparse.Action]:
    return {action.dest: action for action in parsers.choices[command]._actions}


def keywords(task: str) -> dict[str, Any]:
    function = getattr(importlib.import_module(f"edge_client.tasks.{task}"), task)
    found = inspect.signature(function).parameters
    return {name: one.default for name, one in found.items() if one.kind is one.KEYWORD_ONLY}


@pytest.mark.parametrize("task", TASKS)
def test_every_keyword_has_an_option(task: str) -> None:
    assert keywords(task).keys() - options(TASKS[task]).keys() <= GIVEN | OWN.get(task, set())


UNLIKE = {
    ("sweep", "output"),
    ("export", "output"),
    ("export", "split"),
    ("sweep", "observers"),
    ("calibrate", "max_loss"),
    ("prune", "serve"),
    ("plan_generation", "draft"),
}
"""Required as an option; a list; "1%"; on by default, where there is a server; None for no --draft."""


@pytest.mark.parametrize("task", TASKS)
def test_defaults_are_the_same(task: str) -> None:
    here = options(TASKS[task])
    unlike = {
        (task, name) for name, default in keywords(task).items() if name in here and here[name].default != default
    }
    assert unlike <= UNLIKE
