"""What its user calls a setting, for messages: an option on the command line, a keyword in Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_commanded = False


@contextmanager
def by_command() -> Iterator[None]:
    """While a command runs: it is all of its process."""
    global _commanded
    before, _commanded = _commanded, True
    try:
        yield
    finally:
        _commanded = before


def either(command: str, python: str) -> str:
    """The one that is understood."""
    return command if _commanded else python


def option(keyword: str, value: object = None) -> str:
    """``max_edge_memory``, or ``--max-edge-memory``; with its ``value``, if there is one: ``rate=2``, ``--rate 2``."""
    command = f"--{keyword.replace('_', '-')}"
    return either(command, keyword) if value is None else either(f"{command} {value}", f"{keyword}={value!r}")


# The ways to run a request without a cut, by the names that ``--split`` takes.


EDGE_ONLY: Final = "edge-only"
CLOUD_ONLY: Final = "cloud-only"
CLOUD_FILE: Final = "cloud-only-file"
"""Everything on the cloud: the raw input crosses (the cut "input"), or the file it came as."""

AUTO: Final = "auto"
"""One of these or a cut, chosen for every request (`edge_client.adaptive`)."""

LEAST: Final = "min"
"""One of these, a cut, or a set of calls: what takes the least, measured once (`edge_client.planning.mincut`)."""

WORDS: Final = (EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE, AUTO, LEAST)
"""All that a split may be and that is no cut of the model."""
