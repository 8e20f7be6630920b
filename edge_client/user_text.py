"""The texts of users: names of settings on the command line and in Python, ways to run a request, and sizes, rates and
durations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shared_hooks.errors import SpecError

_commanded = False


@contextmanager
def by_command() -> Iterator[None]:
    """Use the command line's names while a command runs."""
    global _commanded
    before, _commanded = _commanded, True
    try:
        yield
    finally:
        _commanded = before


def either(command: str, python: str) -> str:
    """Return the text for the current interface."""
    return command if _commanded else python


def option(keyword: str, value: object = None) -> str:
    """``max_edge_memory``, or ``--max-edge-memory``; with its ``value``, if given: ``rate=2``, ``--rate 2``."""
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
"""One of these, a cut, or a set of calls: the fastest, measured once (`edge_client.planning.mincut`)."""

WORDS: Final = (EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE, AUTO, LEAST)
"""All values of a split that are no cut of the model."""


# Sizes, rates and durations, and a check of seconds.

_SIZES: Final = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BITS: Final = ("bit", "bit/s", "bps")  # 20mbit, 20 Mbit/s as in our output, 20Mbps
_RATES: Final = {
    prefix + bit: bytes_ for prefix, bytes_ in (("", 0.125), ("k", 125.0), ("m", 125e3), ("g", 125e6)) for bit in _BITS
}
LONGEST_SECONDS: Final = 1_000_000.0  # in milliseconds it fits gRPC's 32 bits
_TIMES: Final = {"us": 1e3, "ms": 1e6, "s": 1e9}


def size(name: str, text: str) -> float:
    """Return the bytes in "64MiB". Raises SpecError naming ``name``."""
    return _parse(name, text, _SIZES, "64MiB, 500kB or a number of bytes")


def rate(name: str, text: str) -> float:
    """Return the bytes per second in "5mbit", "5 Mbit/s" or "5Mbps"."""
    value = _parse(name, text, _RATES, "5mbit, 800kbit or 1gbit")
    if value <= 0:
        raise SpecError(f"{name} {text}: must be above 0")
    return value


def nanoseconds(name: str, text: str) -> float:
    """Return the nanoseconds in "30ms"."""
    return _parse(name, text, _TIMES, "30ms, 0.5s or 200us")


def _parse(name: str, text: str, units: dict[str, float], expected: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z/]*)\s*", str(text).lower())
    if match is None or match[2] not in units:
        raise SpecError(f"{name} {text!r}: expected {expected}")
    return float(match[1]) * units[match[2]]


def check_seconds(name: str, value: float) -> float:
    """``value``, or SpecError unless it is above 0 and at most `LONGEST_SECONDS`."""
    if not 0 < value <= LONGEST_SECONDS:  # rejects NaN, too
        raise SpecError(f"{name}={value}: must be more than 0 and at most {LONGEST_SECONDS:.0f} seconds")
    return value
