"""When requests begin: by chance (Poisson), evenly, or as a file says. Nothing of it waits for an answer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import numpy as np

from edge_client.spoken import option
from shared_hooks.errors import SpecError, near

POISSON: Final = "poisson"
CONSTANT: Final = "constant"
KINDS: Final = (POISSON, CONSTANT)
MOST: Final = 5_000_000
"""Requests of one rate: beyond, what is kept of each would fill this machine's memory."""


def arrivals(kind: str, rate: float, seconds: float, dice: np.random.Generator) -> np.ndarray:
    """Seconds from the beginning, ascending, all below ``seconds``; ``rate`` a second on the mean. Raises SpecError."""
    if rate * seconds > MOST:
        raise SpecError(
            f"{option('rate', rate)} for {seconds:g} s: {rate * seconds:.0f} requests; {MOST} at most can be kept"
        )
    if kind == CONSTANT:
        return np.arange(math.ceil(rate * seconds)) / rate
    expected = rate * seconds
    gaps = dice.exponential(1 / rate, size=int(expected + 10 * math.sqrt(expected) + 20))
    times = np.cumsum(gaps)
    return times[times < seconds]


def trace(kind: str) -> np.ndarray | None:
    """The times in the file ``kind``, in seconds from its first; None for a kind that is no file.

    A number a line, ascending; empty lines and those that begin with # are left out. Raises SpecError.
    """
    if kind in KINDS:
        return None
    path, given = Path(kind), option("arrivals", kind)
    if not path.is_file():
        raise SpecError(f"{given}: must be {', '.join(KINDS)}, or a file of times in seconds.{near(kind, KINDS)}")
    times: list[float] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise SpecError(f"{given}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not (text := line.strip()) or text.startswith("#"):
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (times and value < times[-1]):
            raise SpecError(f"{given}: line {number}: {text[:40]!r} is no time in seconds, or before the one above it")
        times.append(value)
    if len(times) < 2 or times[-1] == times[0]:
        raise SpecError(f"{given}: holds {len(times)} times; two that differ are the least")
    if len(times) > MOST:
        raise SpecError(f"{given}: holds {len(times)} times; {MOST} at most can be kept")
    return np.asarray(times) - times[0]


def at_rate(times: np.ndarray, rate: float | None) -> np.ndarray:
    """A trace stretched to ``rate`` a second on the mean; as it is for None."""
    return times if rate is None else times * (mean_rate(times) / rate)


def mean_rate(times: np.ndarray) -> float:
    """Requests a second of a trace."""
    return float((len(times) - 1) / times[-1])
