"""``--server`` of every command: what it says, or the default (`edge_client.settings`), which is shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edge_client.settings import FILE_NAME, NONE, OWN, VARIABLE, how_named, server_of
from shared_hooks.errors import SpecError

if TYPE_CHECKING:
    from edge_client.model_choice import ModelChoice

OPTION = "--server"


def add_server(command: argparse.ArgumentParser, what: str = "") -> None:
    """The option. ``what``: what the command does with a server, or without one."""
    default = f"(default: {VARIABLE}, then [client] server of {FILE_NAME})"
    command.add_argument(
        OPTION,
        metavar=f"HOST:PORT|{OWN}|{NONE}",
        help=f'{what + "; " if what else ""}"{OWN}" starts one on this machine {default}',
    )


def chosen(options: argparse.Namespace) -> str | None:
    """``HOST:PORT``, or `OWN`, or None where there is none; a default is shown on standard error."""
    found = server_of(options.server, getattr(options, "config", None))
    if found.address is not None and found.origin != OPTION:
        print(f"edge-client: {found}", file=sys.stderr, flush=True)
    return found.address


def needed(options: argparse.Namespace) -> str:
    """The same, where there is no doing without. Raises SpecError."""
    server = chosen(options)
    if server is None:
        raise SpecError(f"no server: {how_named()}; --server {OWN} starts one on this machine for as long as this runs")
    return server


@contextmanager
def running(server: str | None, choice: ModelChoice, observers: Sequence[str] = ()) -> Iterator[str | None]:
    """``server``; in place of `OWN` the address of one of our own, for as long as the context lasts."""
    if server != OWN:
        yield server
        return
    from edge_client.process.local_server import local_server

    print("edge-client: starting a server on this machine", file=sys.stderr, flush=True)
    with local_server(choice, observers=observers) as address:
        yield address
