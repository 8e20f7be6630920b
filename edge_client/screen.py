"""Format what people see in a terminal or a notebook: numbers, tables, observations, progress.

Text from elsewhere - file names, labels, a server's errors - is escaped (`printable`). Progress is one bar with the
remaining time, drawn by rich where possible: on a terminal on standard error, removed at the end; in a notebook in the
cell, likewise; elsewhere (a pipe, a file, a log) a plain line as soon as the remaining time is known, and every few
seconds.

Imports nothing of the client, and no torch.
"""

from __future__ import annotations

import importlib
import io
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from shared_hooks.errors import SpecError
from shared_hooks.showing import Bar, bars, html_table, panel
from shared_hooks.showing import size as size

if TYPE_CHECKING:
    import pandas
    import polars
    from rich.console import Console
    from rich.progress import Progress


def printable(text: str) -> str:
    """Escape non-printing characters in ``text``, which could clear, colour or rewrite a terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def one_line(text: str) -> str:
    """Return ``text`` as one printable line."""
    return printable(" ".join(text.split()))


def milliseconds(ns: float) -> str:
    """Format nanoseconds as milliseconds with three decimals."""
    return f"{ns / 1e6:.3f}"


def duration(seconds: float) -> str:
    """Format a duration for people: "40 s", "3 min 20 s", "2 h 5 min"."""
    whole = max(0, round(seconds))
    if whole >= 600:
        whole = round(whole / 60) * 60
    elif whole >= 60:
        whole = round(whole / 10) * 10
    parts = [(whole // 3600, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    shown = [f"{count} {unit}" for count, unit in parts if count]
    return " ".join(shown) or "0 s"


def number(value: float) -> str:
    """Format four digits without an exponent; 0 for rounding noise."""
    if not math.isfinite(value):
        return "none" if math.isnan(value) else "without limit"
    if abs(value) < 1e-6:
        return "0"
    places = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def finite(value: Any) -> Any:
    """Convert ``value`` for JSON: NaN and infinities to None, tuples to lists, keys to text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


# Tables as text.


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Format columns as wide as their widest cell, those in ``right`` right-aligned. Nothing is cut, so lines can be
    searched.
    """
    widths = [max(len(row[column]) for row in (headers, *rows)) for column in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, rows)])


@dataclass(frozen=True)
class Column:
    """One column of a table; ``right``: right-aligned."""

    header: str
    cells: Sequence[str]
    right: bool = True


def fitted(columns: Sequence[Column], spare: Sequence[str], width: int | None) -> str:
    """Format a table no wider than ``width``, if possible by dropping the columns in ``spare`` in turn."""
    left, spares = list(columns), list(spare)
    while True:
        rows = list(zip(*(column.cells for column in left), strict=True))
        right = [number for number, column in enumerate(left) if column.right]
        text = table([column.header for column in left], rows, right)
        if width is None or not spares or max(map(len, text.splitlines())) <= width:
            return text
        out = spares.pop(0)
        left = [column for column in left if column.header != out]


# The result of a command: its rows as a data frame of polars or pandas, as text, as a table in a notebook.


Row = dict[str, Any]


class Tabular(ABC):
    """Base of results with rows. A column's name ends in its unit: _ns nanoseconds, _bytes, _j joules. Unknown values
    are null.
    """

    shown: ClassVar[Mapping[str, str]] = {}
    """In a notebook: column -> heading. Columns in _ns are shown in ms, bytes with a unit."""
    drawn: ClassVar[str] = ""
    """In a notebook: the column of numbers in the picture; empty for none."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return one dictionary per row, all with the same keys; values are numbers, flags, text or None."""

    @abstractmethod
    def text(self) -> str:
        """Format as the command prints it."""

    @abstractmethod
    def title(self) -> str:
        """Return one line: the subject and the result."""

    def to_polars(self) -> polars.DataFrame:
        """Return `rows` as a polars data frame. Raises SpecError if polars is not installed."""
        frame: polars.DataFrame = _library("polars", "isthmus[sweep]").DataFrame(self.rows(), infer_schema_length=None)
        return frame

    def to_pandas(self) -> pandas.DataFrame:
        """Return `rows` as a pandas data frame; pyarrow is not needed. Raises SpecError if pandas is not installed."""
        rows = self.rows()
        frame: pandas.DataFrame = _library("pandas", "pandas").DataFrame(rows)
        whole = [name for name in frame if _whole([row[name] for row in rows])]
        # otherwise a missing value would turn the column into floats
        return frame.astype(dict.fromkeys(whole, "Int64"))

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
        """Return a bar per row, for `drawn`."""
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
    """Return whether the values are counts, some of them unknown."""
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
    whole = len(str(value)) <= 80 or column == "name"  # the name is meant to be copied
    return printable(str(value)) if whole else f"{printable(str(value)[:79])}…"


def _library(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SpecError(f'{name} missing: pip install "{package}"') from error


ROWS: Final = 60
"""Maximum rows of a table; JSON has them all."""

MOST_BYTES: Final = 2**63
"""Largest plausible size."""

MOST_COLUMNS: Final = 6
MOST_CHARACTERS: Final = 40
"""Maximum characters of a table without its own layout, and of its cells."""

Record = Mapping[str, Any]
Columns = tuple[tuple[str, ...], Callable[[Record], list[str]]]
"""Headers, and a function for a record's cells."""


@dataclass(frozen=True)
class ObservationTable:
    """A table of an observer. ``title``, ``headers`` and ``rows`` of text; the first two columns are side and
    module.
    """

    title: str
    headers: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]


def tables(
    observations: Mapping[str, Mapping[str, Any]], most: int = ROWS, rest: str = "--json has them"
) -> Iterator[ObservationTable]:
    """Yield one table for each observer, of ``most`` rows; ``rest`` says where more are. ``observations``: side ->
    observer -> found (`shared_hooks.observers.named`).
    """
    names = dict.fromkeys(name for found in observations.values() for name in found)
    for observer in (*(name for name in _COLUMNS if name in names), *(name for name in names if name not in _COLUMNS)):
        headers, cells = _COLUMNS.get(observer) or _as_they_are(observer, observations)
        sides: list[list[tuple[str, ...]]] = []
        notes: list[str] = []
        for side, by_observer in observations.items():
            found = by_observer.get(observer)
            if found is None:
                continue
            sides.append(rows := [])
            for record in found["records"]:
                part = _text(record, "part")
                name = f"{_text(record, 'name')}[{part}]" if part not in ("", "0") else _text(record, "name")
                rows.append((side, printable(name), *map(printable, cells(record))))
            notes += [f"{side}: {printable(note)}" for note in found["notes"]]
            if found["failures"]:
                notes.append(f"{side}: failed {found['failures']} times, last at {printable(found['last_failure'])}")
            if found["left_out"]:
                notes.append(f"{side}: {found['left_out']} more were left out")
            if found.get("pictures_left_out"):
                notes.append(f"{side}: {found['pictures_left_out']} pictures were left out")
        count = sum(map(len, sides))
        if not count and observer == "debug":
            notes.append("no NaN and no Inf")
        if count > most:
            notes.append(f"{count - most} more rows; {rest}")
        yield ObservationTable(printable(observer), ("side", "module", *headers), _first(sides, most), notes)


def _first(sides: list[list[tuple[str, ...]]], most: int) -> list[tuple[str, ...]]:
    """Return so many rows, equally many of each side if possible."""
    limits: dict[int, int] = {}
    for number, side in enumerate(sorted(sides, key=len)):
        limits[id(side)] = min(len(side), (most - sum(limits.values())) // (len(sides) - number))
    return [row for side in sides for row in side[: limits[id(side)]]]


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _number(value: object, form: str) -> str:
    """Format a number. Non-finite numbers come as text; and a server may send anything."""
    try:
        return format(value, form) if isinstance(value, (int, float)) else str(value)
    except OverflowError:  # an integer beyond any float
        return "inf"


def _list(record: Record, key: str) -> list[Any]:
    value = record.get(key)
    return value if isinstance(value, list) else []


def _activation(record: Record) -> list[str]:
    shape = "x".join(map(str, _list(record, "shape")))
    return [shape, *(_text(record, key) for key in ("mean", "std", "min", "max", "sparsity", "nonfinite"))]


def _attention(record: Record) -> list[str]:
    entropy = ", ".join(_number(value, ".3g") for value in _list(record, "entropy"))
    positions = [pair[0] for pair in _list(record, "positions") if isinstance(pair, list) and pair]
    return ["x".join(map(str, _list(record, "shape"))), entropy, ", ".join(map(str, positions))]


def _bytes(value: object) -> str:
    if not isinstance(value, (int, float)) or not abs(value) < MOST_BYTES:  # NaN, too
        return "-"
    return f"{'-' if value < 0 else ''}{size(abs(round(value)))}"


def _reading(record: Record, key: str) -> str:
    reading = record.get(key)
    if not isinstance(reading, dict):
        return "-"
    text = _bytes(reading.get("value"))
    return text if text == "-" or reading.get("status") == "measured" else f"{text} ~"


def _memory(record: Record) -> list[str]:
    return [*(_reading(record, key) for key in ("allocated", "growth", "peak")), _bytes(record.get("output_bytes"))]


def _debug(record: Record) -> list[str]:
    return [_text(record, "nan"), _text(record, "inf"), ", ".join(map(str, _list(record, "where")))]


def _tokens(record: Record) -> list[str]:
    names = [f'"{one}"' for one in _list(record, "text")] or _list(record, "ids")
    shares = [_number(share, ".3f") for share in _list(record, "probabilities")]
    return [_text(record, "row"), ", ".join(f"{one} {share}" for one, share in zip(names, shares, strict=False))]


def _as_they_are(observer: str, observations: Mapping[str, Mapping[str, Any]]) -> Columns:
    """Return columns of an observer without a table of its own: its records' first few fields."""
    records = [record for side in observations.values() for record in side.get(observer, {"records": []})["records"]]
    found = dict.fromkeys(key for record in records for key in record if key not in ("name", "part", "step"))
    keys = tuple(found)[:MOST_COLUMNS]

    def cells(record: Record) -> list[str]:
        return [", ".join(map(str, _list(record, key))) or _text(record, key) for key in keys]

    return tuple(map(printable, keys)), lambda record: [text[:MOST_CHARACTERS] for text in cells(record)]


_COLUMNS: Final[Mapping[str, Columns]] = {
    "activation": (("shape", "mean", "std", "min", "max", "zeros", "not finite"), _activation),
    "attention": (("shape", "entropy by head", "most attended"), _attention),
    "memory": (("held", "growth", "peak", "output"), _memory),
    "debug": (("NaN", "Inf", "first at"), _debug),
    "tokens": (("row", "likeliest"), _tokens),
}
"""Observers with their own table."""


PLAIN_EVERY_SECONDS: Final = 5.0
KNOWN_AFTER_SECONDS: Final = 1.0
"""Seconds of work after which the remaining time is estimated."""
NOTEBOOK_EVERY_SECONDS: Final = 0.2
NOTEBOOK_COLUMNS: Final = 90
BAR: Final = 16
"""Columns of the bar itself, which leave room for text on 80."""
SHELLS: Final = ("ZMQInteractiveShell", "Shell")
"""IPython's in a notebook, and Colab's."""


class Advance(Protocol):
    """Reports a finished step; the text describes the next or last one. ``done``, ``total``: if steps are counted
    otherwise; ``left``: remaining seconds, if the caller knows better than the mean of the steps so far.
    """

    def __call__(
        self, text: str, *, done: int | None = None, total: int | None = None, left: float | None = None
    ) -> None: ...


@dataclass
class _Pace:
    """Finished steps, and an estimate of the remaining time."""

    total: int | None
    done: int = 0
    left: float | None = None
    """Seconds; None: unknown."""
    first: tuple[int, float] | None = None
    """The steps after the first report, and its time. What came before does not count: it has what starts or loads, or
    steps of an earlier run.
    """

    def step(self, done: int | None, total: int | None, left: float | None) -> None:
        self.done = self.done + 1 if done is None else done
        self.total = self.total if total is None else total
        now = time.monotonic()
        if self.first is None and self.done:
            self.first = self.done, now
        if left is None and self.total and self.first is not None:
            steps, took = self.done - self.first[0], now - self.first[1]
            if steps > 0 and took >= KNOWN_AFTER_SECONDS:
                left = took / steps * max(0, self.total - self.done)
        self.left = left

    @property
    def text(self) -> str:
        return "" if self.left is None else f"{duration(self.left)} left"


def counted(advance: Advance, most: float | None = None) -> Callable[[int, int, str], None]:
    """Return ``advance`` as a function of (steps done, total, text); 0 steps: unknown. ``most``: seconds until the work
    ends in any case.
    """
    began = time.monotonic()

    def step(done: int, total: int, what: str) -> None:
        took = time.monotonic() - began
        left = None
        if total and done and most is not None and took >= KNOWN_AFTER_SECONDS:
            left = max(0.0, min(most - took, took / done * (total - done)))
        advance(what, done=done, total=total or None, left=left)

    return step


@contextmanager
def progress(what: str, total: int | None, show: bool = True) -> Iterator[Advance]:
    """Yield a function to call after each of ``total`` steps (None: unknown); its text may come from a server."""
    if not show:
        yield lambda text, **counted: None
    elif in_notebook():
        with _notebook_cell(what, total) as advance:
            yield advance
    elif sys.stderr.isatty() and find_spec("rich") is not None:  # a light client has no progress bar
        with _bar(what, total) as advance:
            yield advance
    else:
        yield _plain(what, total)


def in_notebook() -> bool:
    """Return whether output goes to a notebook's cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ in SHELLS


def _plain(what: str, total: int | None) -> Advance:
    pace, last = _Pace(total), time.monotonic()

    def advance(text: str, *, done: int | None = None, total: int | None = None, left: float | None = None) -> None:
        nonlocal last
        unknown = pace.left is None  # unknown until now
        pace.step(done, total, left)
        if (unknown and (pace.left or 0) >= PLAIN_EVERY_SECONDS) or time.monotonic() - last >= PLAIN_EVERY_SECONDS:
            last = time.monotonic()
            count = f"{pace.done}{f' of {pace.total}' if pace.total else ''}"
            parts = [count, *([pace.text] if pace.text else []), *([one_line(text)] if text else [])]
            print(f"{what}: {', '.join(parts)}", file=sys.stderr, flush=True)

    return advance


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[Advance]:
    from rich.console import Console

    # Lines printed meanwhile appear above the bar on a terminal, and go straight to their file otherwise.
    with _made(total, Console(stderr=True), redirect_stdout=sys.stdout.isatty(), transient=True) as bar:
        yield _advancing(bar, what, total)


@contextmanager
def _notebook_cell(what: str, total: int | None) -> Iterator[Advance]:
    """Show progress in a cell's output: rich's own way needs ipywidgets."""
    from IPython.display import display  # type: ignore[import-not-found,unused-ignore]
    from rich.console import Console

    bar = _made(total, Console(file=io.StringIO(), force_jupyter=False), auto_refresh=False)
    step = _advancing(bar, what, total)
    place = display(  # type: ignore[no-untyped-call,unused-ignore]
        _bundle(_html(bar)), raw=True, display_id=True
    )
    last = time.monotonic()

    def advance(text: str, **counted: Any) -> None:
        nonlocal last
        step(text, **counted)
        if time.monotonic() - last >= NOTEBOOK_EVERY_SECONDS:
            last = time.monotonic()
            place.update(_bundle(_html(bar)), raw=True)

    try:
        yield advance
    finally:
        place.update(_bundle(""), raw=True)


def _advancing(bar: Progress, what: str, total: int | None) -> Advance:
    pace = _Pace(total)
    task = bar.add_task(what, total=total, text="", left="")

    def advance(text: str, *, done: int | None = None, total: int | None = None, left: float | None = None) -> None:
        pace.step(done, total, left)
        bar.update(task, completed=pace.done, total=pace.total, text=one_line(text), left=pace.text)

    return advance


def _made(total: int | None, console: Console, **how: Any) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    columns = [
        SpinnerColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=BAR),
        MofNCompleteColumn(),
    ]
    return Progress(
        *columns[: None if total else 2],
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
        # A file name may contain [brackets]. Long names are truncated here, and nowhere else.
        TextColumn(
            "{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
        ),
        console=console,
        expand=True,
        **how,
    )


def _bundle(html: str) -> dict[str, str]:
    """Return what a notebook shows; the same where it is read as text."""
    return {"text/html": html, "text/plain": ""}


def _html(bar: Progress) -> str:
    from rich.console import Console

    page = Console(
        file=io.StringIO(),
        record=True,
        width=NOTEBOOK_COLUMNS,
        force_terminal=True,
        force_jupyter=False,
        color_system="truecolor",
    )
    page.print(bar.get_renderable())
    return page.export_html(inline_styles=True, code_format='<pre style="margin:0;line-height:1.2">{code}</pre>')
