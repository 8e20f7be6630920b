"""The table on the screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from studies.benchmarks.row import Line

COLUMNS = ("what", "measured", "to reach", "reached?")


def table(lines: Iterable[Line]) -> str:
    """Fixed-width text; notes stand below their line."""
    lines = list(lines)
    cells = [(line.what, _value(line.value, line.unit), _limit(line), _reached(line)) for line in lines]
    widths = [max(len(row[i]) for row in (COLUMNS, *cells)) for i in range(4)]
    text = [_row(COLUMNS, widths), "-" * (sum(widths) + 6)]
    for line, row in zip(lines, cells, strict=True):
        text.append(_row(row, widths))
        if line.note:
            text += textwrap.wrap(line.note, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(text)


def heading(facts: Mapping[str, Any], threads: int) -> str:
    busy = facts["busy_before"]
    warning = " (too busy for the rows in wall-clock time)" if busy > 0.15 else ""
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {busy:.0%} busy{warning}; Python {facts['python']}, "
        f"torch {facts['torch']}, grpcio {facts['grpcio']}, {threads} thread(s)"
    )


def _row(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _value(value: float, unit: str) -> str:
    return f"{value:.3f} {unit}" if unit == "x" else f"{value:.3g} {unit}"


def _limit(line: Line) -> str:
    return "-" if line.limit is None else f"<= {line.limit:g} {line.unit}"


def _reached(line: Line) -> str:
    return {None: "", True: "yes", False: "NO"}[line.reached]
