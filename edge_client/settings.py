"""The server to use if none is named: one default for every command and for Python.

The first of ``--server`` (or the argument), the variable ISTHMUS_SERVER, and ``[client] server`` of the settings file::

    [client]
    server = "192.168.1.20:50051"

The file is ./isthmus.toml, or else ``isthmus/config.toml`` in $XDG_CONFIG_HOME (~/.config). It may also have the tables
of ``--config``, ``[lifecycle]`` and ``[tracing]``, which are read if ``--config`` names it. ``--help`` imports this
module, and must be quick: what it does not need is imported where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from edge_client.user_text import either
from shared_hooks.errors import SpecError

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE: Final = "ISTHMUS_SERVER"
OWN: Final = "own"
"""Instead of an address: a server that the command starts on this machine, and stops."""
NONE: Final = "none"
"""Instead of an address: no server, whatever the default is."""
FILE_NAME: Final = "isthmus.toml"
OTHERS: Final = ("lifecycle", "tracing")
"""Tables of the same file for other purposes."""


def how_named() -> str:
    """Return a hint what to do if no server is named."""
    give = either("--server HOST:PORT", 'server="HOST:PORT"')
    return f'give {give}, set {VARIABLE}, or write server = "HOST:PORT" under [client] in {FILE_NAME}'


class ServerChoice(NamedTuple):
    """A server, and where it was named."""

    address: str | None
    """``HOST:PORT``, a chain as ``A,B``, or `OWN`; None if no server was given, or `NONE` was."""
    origin: str
    """Such as "ISTHMUS_SERVER"; empty if none was named."""

    def __str__(self) -> str:
        return f"server {self.address} (from {self.origin})" if self.address else "no server"


def server_of(
    given: str | None = None, config: str | Path | None = None, option: str = "--server", *, chain: bool = False
) -> ServerChoice:
    """Return the server named first. ``given``: the value of ``option``, ``config``: a settings file instead of the
    found one. ``chain``: it may be several, separated by commas.

    Raises SpecError, which begins with what named a wrong address, or with the file that cannot be read.
    """
    if given is not None and not isinstance(given, str):
        raise SpecError(f'{option}: expected a text such as "cloud.example:50051", found {given!r:.80}')
    if given is not None:
        return _checked(given, option, chain)
    if named := os.environ.get(VARIABLE):
        return _checked(named, VARIABLE, chain)
    path = settings_file() if config is None else config
    if path is not None and (named := _read(path)) is not None:
        return _checked(named, f"{path}", chain)
    return ServerChoice(None, "")


def address_of(server: str) -> str:
    """Return a ``HOST:PORT`` as an `EdgeClient` takes it. SpecError for words that only commands and functions
    accept.
    """
    from edge_client.dial import check_address

    if not isinstance(server, str):
        raise SpecError(f'server: expected a text such as "cloud.example:50051", found {server!r:.80}')
    if server == OWN:
        raise SpecError(
            'server "own" is for tasks and commands: with edge_client.local_server(MODEL) as server, '
            "EdgeClient(server, MODEL) as client: ..."
        )
    if server == NONE:
        raise SpecError('server "none": give None, and split="edge-only"')
    return check_address(server)


def chain_of(server: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the servers of a chain, in order: one for one, none for None. Raises SpecError."""
    if server is None:
        return ()
    if isinstance(server, str):
        return (address_of(server),)
    if not isinstance(server, (list, tuple)) or not server or not all(isinstance(one, str) and one for one in server):
        raise SpecError(f'server: expected "HOST:PORT", or a list of such for a chain, found {server!r:.80}')
    # the server before them has names for those after the first
    return (address_of(server[0]), *server[1:])


def settings_file() -> Path | None:
    """Return the first settings file that exists."""
    from pathlib import Path

    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # as it is without a home
    places = (Path(FILE_NAME), Path(home) / "isthmus" / "config.toml")
    return next((place for place in places if place.is_file()), None)


def _read(path: str | Path) -> str | None:
    from pathlib import Path

    from shared_hooks.config import Table

    file = Table.read(Path(path))
    if "server" in file:
        file.fail("server", 'belongs under [client]: a line "[client]" above it')
    client = file.table("client")
    for name in OTHERS:
        file.table(name)
    file.done()
    if client is None:
        return None
    server = client.take("server", str, 'a server, such as "192.168.1.20:50051"')
    client.done()
    return server


def _checked(named: str, origin: str, chain: bool) -> ServerChoice:
    if named == OWN:
        return ServerChoice(OWN, origin)
    if named == NONE:
        return ServerChoice(None, origin)
    from edge_client.dial import check_address

    try:
        first, comma, _ = named.partition(",") if chain else (named, "", "")
        if comma:
            chain_of(named.split(","))
        return ServerChoice(check_address(first) if not comma else named, origin)
    except SpecError as error:
        raise SpecError(f"{origin}: {error}") from error
