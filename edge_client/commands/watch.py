"""Implement ``edge-client watch``: run inputs as ``run`` does, and show observations of both sides live."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from edge_client.answer import Answer, Failure
from edge_client.client import EdgeClient
from edge_client.commands import common
from edge_client.commands.common import credentials_of, needed, running, say
from edge_client.commands.feed import choice_of, cut_for, find
from edge_client.commands.hooks import configured
from edge_client.core import CONNECTION_ERRORS
from edge_client.model_choice import ModelChoice
from edge_client.screen import ObservationTable, one_line, printable, tables
from edge_client.transport import ConnectionOptions
from shared_hooks.models import InputItem
from shared_hooks.observers import named

Show = Callable[[Group], None]

MODULE = 12
"""Minimum columns of a module's name."""

WIDE = 200
"""Columns without a terminal, so that names are whole and can be searched."""


def main(options: argparse.Namespace) -> int:
    """Send the inputs, ``--repeat`` times, and show each answer's observations in place of the last; return the exit
    status.
    """
    server = needed(options)
    observers = named.check(options.observers)
    items = find(options.input)
    choice = choice_of(options)
    with running(server, choice, observers) as address:
        return _watch(options, address, choice, items, observers)


def _watch(
    options: argparse.Namespace,
    server: str | None,
    choice: ModelChoice,
    items: Sequence[InputItem],
    observers: Sequence[str],
) -> int:
    spec = choice.spec()
    failed = answered = 0
    client = EdgeClient(
        server,
        choice.with_spec(spec),
        metrics=False,
        observers=observers,
        lifecycle=configured(options.config, options.log_level, options.log_format),
        connection=ConnectionOptions(credentials=credentials_of(options)),
    )
    try:
        client.prepare()
        client.split = cut_for(client, options.split, items)
        client.open()
        inputs = itertools.chain.from_iterable(itertools.repeat(items, options.repeat))
        names = itertools.chain.from_iterable(itertools.repeat(items, options.repeat))
        with _screen() as (show, width):
            for item, answer in zip(
                names, client.infer_many(inputs, prepare=spec.preprocess, failures="return"), strict=True
            ):
                if isinstance(answer, Failure):
                    failed += 1
                    say(f"{printable(item.name)}: {one_line(str(answer.error))}")
                    continue
                answered += 1
                show(_picture(f"{printable(item.name)}, answer {answered}", answer, width))
    except CONNECTION_ERRORS as error:
        if options.debug:
            raise
        say(f"{one_line(f'{type(error).__name__}: {error}')}", "error")
        return common.CONNECTION
    finally:
        client.close()
    return common.SOME_FAILED if failed else common.OK


@contextmanager
def _screen() -> Iterator[tuple[Show, int]]:
    """Show in place on a terminal, one below the other elsewhere."""
    console = Console(file=sys.stdout, soft_wrap=False)
    if not console.is_terminal:
        console.width = WIDE
        yield console.print, WIDE
        return
    with Live(console=console, vertical_overflow="crop") as live:
        yield lambda group: live.update(group, refresh=True), console.width


def _picture(title: str, answer: Answer, width: int) -> Group:
    parts: list[Table | Text] = [Text(f"{title}, cut after {printable(answer.split)}")]
    for found in tables(answer.observations):
        shown = Table(
            title=found.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
        )
        for header in found.headers:
            shown.add_column(header, overflow="fold")  # truncated, -4.6e-10 would read as -4.6
        room = _room(found, width)
        for side, module, *cells in found.rows:
            name = module if len(module) <= room else f"…{module[-room + 1 :]}"  # its end is more informative
            shown.add_row(*(Text(cell) for cell in (side, name, *cells)))  # a name may contain [brackets]
        if found.rows:
            parts.append(shown)
        else:
            parts.append(Text(f"{found.title}: nothing"))
        parts += [Text(note) for note in found.notes]
    return Group(*parts)


def _room(found: ObservationTable, width: int) -> int:
    """Return the columns that the other cells leave for a module's name, two between each."""
    others = [max(map(len, column)) for column in zip(found.headers, *found.rows, strict=True)]
    return max(MODULE, width - sum(others) + others[1] - 2 * len(others))
