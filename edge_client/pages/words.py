"""Numbers as people read them."""

from __future__ import annotations


def duration(ns: float | None) -> str:
    """Nanoseconds with a unit that suits."""
    if ns is None:
        return "–"
    for factor, unit in ((1e9, "s"), (1e6, "ms")):
        if abs(ns) >= factor:
            return f"{short(ns / factor)} {unit}"
    return f"{short(ns / 1e3)} µs"


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def counted(number: int, what: str) -> str:
    """A number and a noun: "1 input", "3 inputs"."""
    return f"{number} {what}{'' if number == 1 else 's'}"
