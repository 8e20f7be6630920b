"""Sizes and times for people: three digits or so, and a unit."""

from __future__ import annotations

import math
from typing import Final

_TIMES: Final = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))


def size(nbytes: float | None) -> str:
    """Bytes with a unit, such as "12.0 KiB"; "-" for None."""
    if nbytes is None or not math.isfinite(nbytes):
        return "-"
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def duration(ns: float | None) -> str:
    """Nanoseconds with the unit that fits, such as "1.25 ms"; "-" for None."""
    if ns is None or not math.isfinite(ns):
        return "-"
    for factor, unit in _TIMES:
        if abs(ns) >= factor:
            return f"{ns / factor:.3g} {unit}" if abs(ns) < 1000 * factor else f"{ns / factor:.0f} {unit}"
    return "0"
