"""What every task's result can: its rows as a data frame of polars or pandas, as text, as a table in a notebook."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from edge_client.screen.text import printable, size
from shared_hooks.errors import SpecError
from shared_hooks.showing import Bar, bars, html_table, panel

if TYPE_CHECKING:
    import pandas
    import polars

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
