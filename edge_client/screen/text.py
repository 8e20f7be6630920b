"""Numbers as text; and what comes from elsewhere - file names, labels, a server's errors - made fit to be shown."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TextIO

from rich.cells import cell_len

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


# Text that comes in pieces, onto a screen or into a file.


LEAST: Final = 10
"""Columns of a terminal on which words are kept whole."""


class Flow:
    """Writes pieces at once. On a terminal a word that does not fit at the end of a line goes whole to the next one.

    Control characters other than the end of a line are written escaped: a model may say anything.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._width = shutil.get_terminal_size().columns - 1 if out.isatty() else 0
        self._column = 0
        self._word = ""
        self._open = False

    def write(self, text: str) -> None:
        """One piece, of any length."""
        for one in text:
            self._put("\n" if one == "\n" else " " if one == "\t" else printable(one))
        self._out.flush()

    def end(self) -> None:
        """The line is ended, if one is open."""
        if self._open:
            self._put("\n")
            self._out.flush()

    def _put(self, one: str) -> None:
        if one == "\n":
            self._out.write(one)
            self._column, self._word, self._open = 0, "", False
            return
        self._open = True
        size = cell_len(one)
        if self._width >= LEAST and self._column + size > self._width and self._turn(one):
            return
        self._word = "" if one == " " else self._word + one
        self._column += size
        self._out.write(one)

    def _turn(self, one: str) -> bool:
        """Goes on in the next line, with the word that is under way; True where ``one`` is not needed there."""
        if one == " ":
            self._out.write("\n")
            self._column, self._word = 0, ""
            return True
        size = cell_len(self._word)
        if size >= self._column:  # longer than a line
            self._word = ""
        elif size:
            self._out.write(f"\x1b[{size}D\x1b[K")
        self._out.write(f"\n{self._word}")
        self._column = cell_len(self._word)
        return False


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
