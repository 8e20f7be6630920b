"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
