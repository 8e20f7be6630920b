"""An option that is declared once is a keyword argument and a word of the command line, with one default."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from dataclasses import MISSING, dataclass, fields
from typing import Any

import pytest

import edge_client.options
from edge_client.commands.arguments import make_parser
from edge_client.commands.common import keywords
from shared_hooks.options import add_options, option, option_of, positive_int, takes


@dataclass(frozen=True, kw_only=True)
class Walk:
    steps: int = option(20, "N", "at most N steps", parse=positive_int)
    speed: float = option(1.5, "X", "100%% is a stroll", parse=float)
    to: str = option(metavar="PLACE", help="where to")
    shade: bool = option(True, help="out of the sun")
    alone: bool = option(False, help="without the dog")
    here: str | None = option(None, "A", "by way of A", exclusive="way")
    there: str | None = option(None, "B", "by way of B", exclusive="way")
    say: Any = print


@takes(Walk)
def walk(who: str, pace: str = "slow", *, options: Walk) -> tuple[str, str, Walk]:
    """Walk somewhere."""
    return who, pace, options


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, Walk)
    return parser.parse_args(words)


def test_a_function_takes_the_fields_as_keywords() -> None:
    assert walk("Ada", to="the sea", steps=3) == ("Ada", "slow", Walk(to="the sea", steps=3))
    assert walk("Ada", "fast", to="home")[1:] == ("fast", Walk(to="home"))


def test_wrong_keywords_are_the_callers() -> None:
    with pytest.raises(TypeError, match=r"walk\(\) got an unexpected keyword argument 'stepz'"):
        walk("Ada", to="the sea", stepz=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="to"):
        walk("Ada")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'options'"):
        walk("Ada", options=Walk(to="the sea"))  # type: ignore[call-arg]


def test_help_shows_what_may_be_given() -> None:
    shown = str(inspect.signature(walk))
    assert shown.startswith(
        "(who: 'str', pace: 'str' = 'slow', *, steps: 'int' = 20, speed: 'float' = 1.5, to: 'str', "
    )
    assert "options" not in shown and walk.__doc__ == "Walk somewhere."


def test_words_of_a_command_line() -> None:
    found = parsed("--to", "the sea", "--no-shade", "--alone", "--steps", "4", "--here", "x")
    assert (found.steps, found.speed, found.to) == (4, 1.5, "the sea")
    assert not found.shade and found.alone and found.here == "x" and not hasattr(found, "say")
    assert parsed("--to", "a").shade and not parsed("--to", "a").alone


@pytest.mark.parametrize(
    "words", [["--steps", "3"], ["--to", "a", "--steps", "0"], ["--to", "a", "--here", "1", "--there", "2"]]
)
def test_words_that_are_refused(words: list[str]) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parsed(*words)


def test_the_default_stands_in_the_help() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, Walk)
    text = " ".join(parser.format_help().split())
    assert "at most N steps (default: 20)" in text and "100% is a stroll (default: 1.5)" in text
    assert "out of the sun (default" not in text


# Every task of the edge client, and its command.

TASKS = {
    "bench": "bench",
    "calibrate": "calibrate",
    "export": "export",
    "hierarchy": "hierarchy",
    "leakage": "leakage",
    "learn": "learn",
    "plan": "plan",
    "plan_chain": "plan",
    "plan_generation": "plan",
    "profile": "profile",
    "prune": "prune",
    "sweep": "sweep",
    "verify": "verify",
}
"""Task -> its command."""
NEEDED = {
    "export": ["--split", "a", "--output", "b"],
    "learn": ["--split", "a", "--output", "b", "--input", "c"],
    "sweep": ["--output", "b"],
    "prune": ["--split", "a", "--input", "c"],
    "calibrate": ["--input", "c"],
    "leakage": ["--input", "c"],
}
PLANS = {"plan_chain", "plan_generation"}
"""Share a command with `plan`, whose defaults it has."""


def signature(task: str) -> dict[str, inspect.Parameter]:
    function = getattr(edge_client, task)
    found = inspect.signature(function).parameters
    return {name: one for name, one in found.items() if one.kind is one.KEYWORD_ONLY}


@pytest.mark.parametrize("task", TASKS)
def test_a_command_gives_its_task_the_tasks_own_defaults(task: str) -> None:
    options = make_parser().parse_args([TASKS[task], *NEEDED.get(TASKS[task], [])])
    function = getattr(edge_client, task)
    given = keywords(options, function)
    own = {name: one.default for name, one in signature(task).items()}
    assert own.keys() - given.keys() <= {"say", "power", "goal", "credentials"}
    alike = {name for name in given if own[name] is not inspect.Parameter.empty} - {"credentials", "failures"}
    alike -= {"correct"} if task in PLANS else set()
    assert {name: given[name] for name in alike} == {name: own[name] for name in alike}


def test_every_options_dataclass_can_be_a_command() -> None:
    made = [one for one in vars(edge_client.options).values() if dataclasses.is_dataclass(one)]
    assert len(made) > len(TASKS)
    for one in made:
        add_options(argparse.ArgumentParser(), one)  # type: ignore[arg-type]
        for each in fields(one):
            declared = option_of(each)
            assert declared is not None or each.default is not MISSING, f"{one}.{each.name}"
