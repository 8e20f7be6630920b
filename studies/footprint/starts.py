"""How soon a command answers that loads no model: help, version, completion, a slip. Each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from edge_client.commands.arguments import make_parser

WANTED_SECONDS = 0.1


@dataclass(frozen=True)
class Start:
    """The least of several tries. ``cpu``: what the process itself took, whoever else is at work."""

    command: str
    seconds: float
    cpu: float


def commands() -> list[list[str]]:
    """Every help, and some more."""
    (inner,) = (action for action in make_parser()._actions if action.dest == "command")
    names: list[list[str]] = [[], *([name] for name in inner.choices or ())]
    edge = [["edge_client", *name, "--help"] for name in names]
    edge += [["edge_client", "--version"], ["edge_client", "run", "--wrong"], ["edge_client", "wrong"]]
    cloud = [["cloud_server", *name, "--help"] for name in ([], ["doctor"], ["token"])]
    return [*edge, *cloud, ["cloud_server", "--version"], ["cloud_server", "--wrong"]]


def measured(tries: int) -> list[Start]:
    """Tries take turns, so that a slow minute meets all; the first one compiles, and is not counted."""
    found: dict[str, list[tuple[float, float]]] = {}
    for turn in range(tries + 1):
        for words in commands():
            took = _one(words)
            if turn:
                found.setdefault(" ".join(words), []).append(took)
    return [Start(name, *(min(column) for column in zip(*rows, strict=True))) for name, rows in found.items()]


def _one(words: Sequence[str]) -> tuple[float, float]:
    before, began = os.times(), time.perf_counter()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-m", *words], env=environment, capture_output=True, check=False)
    seconds, after = time.perf_counter() - began, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, cpu
