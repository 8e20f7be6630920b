"""Progress with the time that is left: one bar, drawn by rich wherever there is a place for it.

On a terminal on standard error, gone when the work is done; in a notebook in the cell, the same way; elsewhere (a pipe,
a file, a log) a plain line as soon as the time left is known, and every few seconds.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol

from edge_client.screen.text import duration, one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PLAIN_EVERY_SECONDS: Final = 5.0
KNOWN_AFTER_SECONDS: Final = 1.0
"""The time left is estimated after this much work."""
NOTEBOOK_EVERY_SECONDS: Final = 0.2
NOTEBOOK_COLUMNS: Final = 90
BAR: Final = 16
"""Columns of the bar itself: on 80 the text beside it is read, too."""
SHELLS: Final = ("ZMQInteractiveShell", "Shell")
"""IPython's in a notebook, and Colab's."""


class Advance(Protocol):
    """One step is done; the text says what comes or came. ``done``, ``total``: where steps are counted otherwise;
    ``left``: seconds of work that are left, where the caller knows better than by the mean of the steps so far.
    """

    def __call__(
        self, text: str, *, done: int | None = None, total: int | None = None, left: float | None = None
    ) -> None: ...


@dataclass
class _Pace:
    """Steps that were made, and how long the others will take."""

    total: int | None
    done: int = 0
    left: float | None = None
    """Seconds; None: unknown."""
    began: float = field(default_factory=lambda: time.monotonic())

    def step(self, done: int | None, total: int | None, left: float | None) -> None:
        self.done = self.done + 1 if done is None else done
        self.total = self.total if total is None else total
        took = time.monotonic() - self.began
        if left is None and self.total and self.done and took >= KNOWN_AFTER_SECONDS:
            left = took / self.done * max(0, self.total - self.done)
        self.left = left

    @property
    def text(self) -> str:
        return "" if self.left is None else f"{duration(self.left)} left"


def counted(advance: Advance, most: float | None = None) -> Callable[[int, int, str], None]:
    """``advance`` as a function of (steps done, of how many, what); no steps = unknown. ``most``: seconds from now in
    which the work ends in any case.
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
    """Yields a function to call after each of ``total`` steps (None: unknown); its text may come from a server."""
    if not show:
        yield lambda text, **counted: None
    elif in_notebook():
        with _cell(what, total) as advance:
            yield advance
    elif sys.stderr.isatty() and find_spec("rich") is not None:  # a light client has none
        with _bar(what, total) as advance:
            yield advance
    else:
        yield _plain(what, total)


def in_notebook() -> bool:
    """Whether what is shown goes into a notebook's cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ in SHELLS


def _plain(what: str, total: int | None) -> Advance:
    pace, last = _Pace(total), time.monotonic()

    def advance(text: str, *, done: int | None = None, total: int | None = None, left: float | None = None) -> None:
        nonlocal last
        unknown = pace.left is None  # until now
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

    # Lines printed meanwhile go above the bar if they go to the terminal, and straight to their file if not.
    with _made(total, Console(stderr=True), redirect_stdout=sys.stdout.isatty(), transient=True) as bar:
        yield _advancing(bar, what, total)


@contextmanager
def _cell(what: str, total: int | None) -> Iterator[Advance]:
    """rich's own way into a notebook needs ipywidgets; the cell's output can be replaced without them."""
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
        # A file name may hold [brackets]. What does not fit is cut off here, and nowhere else.
        TextColumn(
            "{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
        ),
        console=console,
        expand=True,
        **how,
    )


def _bundle(html: str) -> dict[str, str]:
    """What a notebook shows; no more than that where it is read as text."""
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
