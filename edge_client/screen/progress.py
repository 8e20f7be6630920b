"""Progress on standard error: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from edge_client.screen.text import one_line

PLAIN_EVERY_SECONDS: Final = 5.0

Advance = Callable[[str], None]  # one step is done; the text says what comes or came


@contextmanager
def progress(what: str, total: int | None, show: bool = True) -> Iterator[Advance]:
    """Yields a function to call after each of ``total`` steps (None: unknown); its text may come from a server."""
    if not show:
        yield lambda text: None
    elif sys.stderr.isatty():
        with _bar(what, total) as advance:
            yield advance
    else:
        yield _plain(what, total)


def _plain(what: str, total: int | None) -> Advance:
    done, last = 0, time.monotonic()

    def advance(text: str) -> None:
        nonlocal done, last
        done += 1
        if time.monotonic() - last >= PLAIN_EVERY_SECONDS:
            last = time.monotonic()
            print(
                f"{what}: {done}{f' of {total}' if total else ''} {one_line(text)}".rstrip(),
                file=sys.stderr,
                flush=True,
            )

    return advance


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    # Lines printed meanwhile go above the bar if they go to the terminal, and straight to their file if not.
    with Progress(
        *columns[: None if total else 2],
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", markup=False),  # a file name may hold [brackets]
        console=Console(stderr=True),
        redirect_stdout=sys.stdout.isatty(),
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=total, text="")
        yield lambda text: bar.update(task, advance=1, text=one_line(text))
