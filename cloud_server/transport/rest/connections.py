"""Connections of HTTP, each bounded while it waits for its client.

Who has a complete request under way holds one of the server's places (`inference.asking`). All others wait: for the
first byte, for the rest of a header or body, for the next request. Of those there are `MAX_WAITING_CONNECTIONS`; where
there are more, the address that has most of them loses the one that waits longest (`transport.waiting`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from cloud_server.access import Caller, names_in
from cloud_server.transport.waiting import Place, WaitingCalls

MAX_WAITING_CONNECTIONS = 128
IDLE_SECONDS = 60.0
"""For a request, and between two."""
SWEEP_SECONDS = 1.0
PEER = "isthmus_peer"
"""In the state of a request's scope."""


class Peer:
    """The other end of one connection. Made, and touched, by the event loop's thread alone, but for `leave`."""

    def __init__(self, transport: asyncio.Transport, waiting: WaitingCalls) -> None:
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]  # none where it is gone already
        self.name = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        """As gRPC says it."""
        self.names = names_in(certificate(transport.get_extra_info("ssl_object")))
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._waiting = waiting
        self._place: Place | None = None
        self.is_closed = False

    def waits(self) -> None:
        """Its client has to do something from now on: to send a request."""
        self.works()
        if not self.is_closed:
            self._place = self._waiting.enter(Caller(self.name).address, self.leave)

    def closed(self) -> None:
        self.is_closed = True
        self.works()

    def works(self) -> None:
        """A request is complete."""
        if self._place is not None:
            self._waiting.leave(self._place)
            self._place = None

    def leave(self) -> None:
        """Ends the connection at once; from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._transport.abort)
        except RuntimeError:  # the loop is closed, and with it the connection
            pass


class Connection(H11Protocol):
    """uvicorn's, which knows its `Peer`, and hands it to the application with each request (``scope["state"]``)."""

    def __init__(self, waiting: WaitingCalls, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._waiting = waiting

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer = Peer(transport, self._waiting)
        self._peer.waits()
        self.app_state = {**self.app_state, PEER: self._peer}

    def connection_lost(self, exc: Exception | None) -> None:
        self._peer.closed()
        super().connection_lost(exc)


def certificate(connection: Any) -> dict[str, list[bytes]]:
    """The names in a client's certificate, as gRPC gives them; none without TLS or a certificate."""
    found = None if connection is None else connection.getpeercert()
    if not found:
        return {}
    common = [value for part in found.get("subject", ()) for key, value in part if key == "commonName"]
    names = [value for kind, value in found.get("subjectAltName", ()) if kind in ("DNS", "URI", "IP Address", "email")]
    kinds = {"x509_subject_alternative_name": names, "x509_common_name": common}
    return {kind: [value.encode() for value in values] for kind, values in kinds.items()}
