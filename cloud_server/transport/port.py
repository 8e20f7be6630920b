"""Whether the server may listen where it is to: asked before the models are loaded, which takes seconds or minutes."""

from __future__ import annotations

import errno
import os
import socket

from shared_hooks.errors import SpecError

REASONS = {
    errno.EADDRINUSE: "is in use: another process listens there",
    errno.EADDRNOTAVAIL: "is no address of this machine",
    errno.EACCES: "may not be used: ports below 1024 need the right to it",
}


def check_free(address: str, reuse_port: bool = False) -> None:
    """Raises SpecError, saying why, where nothing can listen at ``HOST:PORT``. Listens only for a moment.

    ``reuse_port``: servers that say so, too, may be there; then it does not listen, for it would get their clients.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SpecError(f"listen: {address}: no host is called {host} ({error.strerror})") from error
    refused = None
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As gRPC does it: what a server that has just ended left behind is not in use.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if reuse_port:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                probe.bind(where)
                if not reuse_port:
                    probe.listen(1)
                return
        except OSError as error:
            refused = refused or error
    assert refused is not None
    why = REASONS.get(refused.errno or 0, f"cannot be used: {os.strerror(refused.errno or 0)}")
    raise SpecError(f"listen: {address} {why}") from refused
