"""Numbers as text; and what comes from elsewhere - file names, labels, a server's errors - made fit to be shown."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shared_hooks.errors import SpecError
from shared_hooks.showing import Bar, bars, html_table, panel
from shared_hooks.showing import size as size

if TYPE_CHECKING:
    import pandas
    import polars


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


# What a command found: its rows as a data frame of polars or pandas, as text, as a table in a notebook.


Row = dict[str, Any]


class Tabular(ABC):
    """A column's name ends in its unit: _ns nanoseconds, _bytes, _j joules. A value that is unknown is null."""

    shown: ClassVar[Mapping[str, str]] = {}
    """In a notebook: column -> heading. What is in _ns is shown in ms, bytes with a unit."""
    drawn: ClassVar[str] = ""
    """In a notebook: the column of numbers that the picture shows; none without."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """One dictionary a row, all with the same keys; values are numbers, flags, text or None."""

    @abstractmethod
    def text(self) -> str:
        """As the command prints it."""

    @abstractmethod
    def title(self) -> str:
        """In one line: of what it is, and what came out."""

    def to_polars(self) -> polars.DataFrame:
        """`rows` as a polars data frame. Raises SpecError where polars is not installed."""
        frame: polars.DataFrame = _library("polars", "isthmus[sweep]").DataFrame(self.rows(), infer_schema_length=None)
        return frame

    def to_pandas(self) -> pandas.DataFrame:
        """`rows` as a pandas data frame; pyarrow is not needed. Raises SpecError where pandas is not installed."""
        rows = self.rows()
        frame: pandas.DataFrame = _library("pandas", "pandas").DataFrame(rows)
        whole = [name for name in frame if _whole([row[name] for row in rows])]
        return frame.astype(dict.fromkeys(whole, "Int64"))  # else a missing one would make numbers of all of them

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        title = printable(self.title())
        return f"<{type(self).__name__}: {title if len(title) <= 400 else f'{title[:399]}…'}>"

    def _repr_html_(self) -> str:
        rows = self.rows()
        cells = [[_cell(name, row[name]) for name in self.shown] for row in rows]
        numbers = [at for at, name in enumerate(self.shown) if any(_is_number(row[name]) for row in rows)]
        return panel(self.title(), self._picture(rows), html_table(list(self.shown.values()), cells, numbers))

    def _picture(self, rows: list[Row]) -> str:
        """A bar a row, for `drawn`."""
        if not self.drawn:
            return ""
        known = [row for row in rows if row[self.drawn] is not None]
        label = self.shown.get(self.drawn, self.drawn)
        reported = [Bar(row[self.drawn], f"{row.get('name')}: {_cell(self.drawn, row[self.drawn])}") for row in known]
        most = _cell(self.drawn, max((row[self.drawn] for row in known), default=None))
        return bars(reported, f"{label} of each row, at most {most}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(values: list[Any]) -> bool:
    """Numbers of things, some of them unknown."""
    known = [value for value in values if value is not None]
    return 0 < len(known) < len(values) and all(type(value) is int for value in known)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column.endswith("_ns"):
        return f"{value / 1e6:.3f}"
    if isinstance(value, bool):
        return "yes" if value else "-"
    if "bytes" in column:
        return size(round(value))
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    whole = len(str(value)) <= 80 or column == "name"  # which is to be copied
    return printable(str(value)) if whole else f"{printable(str(value)[:79])}…"


def _library(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SpecError(f'{name} missing: pip install "{package}"') from error
