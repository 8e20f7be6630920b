"""Numbers as text; and what comes from elsewhere - file names, labels, a server's errors - made fit to be shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared_hooks.showing import size as size


def printable(text: str) -> str:
    """``text`` with what does not print escaped: control characters would clear, colour or rewrite a terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def one_line(text: str) -> str:
    """``text`` as one printable line."""
    return printable(" ".join(text.split()))


def milliseconds(ns: float) -> str:
    """Nanoseconds as milliseconds with microseconds shown."""
    return f"{ns / 1e6:.3f}"


def duration(seconds: float) -> str:
    """As people say how long something takes: "40 s", "3 min 20 s", "2 h 5 min"."""
    whole = max(0, round(seconds))
    if whole >= 600:
        whole = round(whole / 60) * 60
    elif whole >= 60:
        whole = round(whole / 10) * 10
    parts = [(whole // 3600, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    shown = [f"{count} {unit}" for count, unit in parts if count]
    return " ".join(shown) or "0 s"


def number(value: float) -> str:
    """Four digits without an exponent; 0 for what only rounding has left."""
    if not math.isfinite(value):
        return "none" if math.isnan(value) else "without limit"
    if abs(value) < 1e-6:
        return "0"
    places = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def finite(value: Any) -> Any:
    """``value`` for JSON: NaN and infinities as None, tuples as lists, keys as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


# Tables as text.


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell, those in ``right`` flush right. Nothing is cut: lines can be searched."""
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, rows)])


@dataclass(frozen=True)
class Column:
    """One column of a table; ``right``: flush right."""

    header: str
    cells: Sequence[str]
    right: bool = True


def fitted(columns: Sequence[Column], spare: Sequence[str], width: int | None) -> str:
    """A table no wider than ``width`` where that can be done by leaving columns out, those of ``spare`` in turn."""
    left, spares = list(columns), list(spare)
    while True:
        rows = list(zip(*(column.cells for column in left), strict=True))
        right = [number for number, column in enumerate(left) if column.right]
        text = table([column.header for column in left], rows, right)
        if width is None or not spares or max(map(len, text.splitlines())) <= width:
            return text
        out = spares.pop(0)
        left = [column for column in left if column.header != out]
