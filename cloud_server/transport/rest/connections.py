"""Connections of HTTP, each bounded while it waits for its client, and what may be read of it.

Who has a request under way holds one of the server's places (`inference.asking`). All others wait: for the first byte,
for the rest of a header or body, for who does not fetch what it is sent, for the next request. Of those there are
`MAX_WAITING_CONNECTIONS`; where there are more, the address that has most of them loses the one that waits longest
(`transport.waiting`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from cloud_server.access import Caller, names_in
from cloud_server.streams import Pace
from cloud_server.transport.active_calls import Place, WaitingCalls

MAX_WAITING_CONNECTIONS = 128
IDLE_SECONDS = 60.0
"""For a request, for each piece of its body, for fetching a refusal, and between two requests."""
SWEEP_SECONDS = 1.0
LINGER_SECONDS = 2.0
"""For a client to go whose body is not read: one that was cut at once would not hear why."""
LEAST_BYTES, MOST_BYTES = 1 << 10, 32 << 10
"""To parse in one go: the more, the faster the last was. As chunks of one byte they take Python some 2 and 70 ms."""
TURN_SECONDS = 0.002
"""To parse of one connection, then the others have their turn: whoever has not been read yet cannot pay either."""
PEER = "isthmus_peer"
"""In the state of a request's scope."""


class Peer:
    """The other end of one connection. Touched by the event loop's thread alone, but for `leave` and `works`."""

    def __init__(self, connection: H11Protocol, waiting: WaitingCalls) -> None:
        transport = connection.transport
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]  # none where it is gone already
        self.name = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        """As gRPC says it."""
        self.names = names_in(certificate(transport.get_extra_info("ssl_object")))
        self.account = Caller(self.name).account
        """On whom it counts what is read: the address, until credentials were shown."""
        self.is_ignored = False
        """What comes is thrown away."""
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._waiting = waiting
        self._place: Place | None = None
        self._request = object()
        self._closed = asyncio.Event()
        self.waits(self._request)

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    @property
    def is_sending(self) -> bool:
        """Whether the body of the request is not complete."""
        return bool(self._connection.cycle.more_body)

    def begins(self) -> object:
        """A request's header is there: what stands for this request."""
        self._request = object()
        self.waits(self._request)
        return self._request

    def waits(self, request: object) -> None:
        """Its client has to do something from now on. Not said of a request after which the next one has begun."""
        if request is self._request and not self.is_closed:
            self._leave_place()
            self._place = self._waiting.enter(Caller(self.name).address, self.leave)

    def heard(self) -> None:
        """The client did something."""
        if self._place is not None:
            self._place.since = time.monotonic()

    def works(self) -> None:
        """The request has one of the server's places. From any thread."""
        self._soon(self._leave_place)

    def closed(self) -> None:
        self._closed.set()
        self._leave_place()

    async def ignored(self) -> None:
        """Nothing is read any more; returns when the client has gone, after `LINGER_SECONDS` at the latest."""
        self.is_ignored = True
        self._connection.flow.resume_reading()
        try:
            await asyncio.wait_for(self._closed.wait(), LINGER_SECONDS)
        except asyncio.TimeoutError:
            pass

    def leave(self) -> None:
        """Ends the connection at once; from any thread."""
        self._soon(self._connection.transport.abort)

    def _leave_place(self) -> None:
        if self._place is not None:
            self._waiting.leave(self._place)
            self._place = None

    def _soon(self, callback: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed, and with it the connection
            pass


class Connection(H11Protocol):
    """uvicorn's, which knows its `Peer`, and hands it to the application with each request (``scope["state"]``).

    What it reads is paid for (`streams.pace`): HTTP in chunks of one byte is cheap to send and dear to parse.
    """

    def __init__(self, waiting: WaitingCalls, pace: Pace, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._waiting, self._pace = waiting, pace
        self._unread = memoryview(b"")
        self._step = LEAST_BYTES
        self._pause: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer = Peer(self, self._waiting)
        self.app_state = {**self.app_state, PEER: self._peer}

    def connection_lost(self, exc: Exception | None) -> None:
        self._peer.closed()
        if self._pause is not None:
            self._pause.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread = memoryview(bytes(self._unread) + data if self._unread else data)
        if self._pause is None:
            self._read()
        else:  # uvicorn resumed it
            self.transport.pause_reading()

    def _read(self) -> None:
        """As much of it as its account may now; nothing more is taken from the network until the rest is read."""
        was_paused, self._pause, spent = self._pause is not None, None, 0.0
        while self._unread and not self._peer.is_ignored and not self.transport.is_closing():
            wait = self._pace.wait(self._peer.account)
            if wait > 0 or spent > TURN_SECONDS:
                self.transport.pause_reading()
                self._pause = self.loop.call_later(wait, self._read)
                return
            piece, self._unread = self._unread[: self._step], self._unread[self._step :]
            began = time.thread_time()
            super().data_received(piece)  # type: ignore[arg-type, unused-ignore]
            took = time.thread_time() - began
            self._pace.spent(self._peer.account, took)
            self._step = min(2 * self._step, MOST_BYTES) if took < TURN_SECONDS / 2 else LEAST_BYTES
            spent += took
        if self._peer.is_ignored:
            self._unread = memoryview(b"")
        if was_paused and not self.flow.read_paused:
            self.transport.resume_reading()


def certificate(connection: Any) -> dict[str, list[bytes]]:
    """The names in a client's certificate, as gRPC gives them; none without TLS or a certificate."""
    found = None if connection is None else connection.getpeercert()
    if not found:
        return {}
    common = [value for part in found.get("subject", ()) for key, value in part if key == "commonName"]
    names = [value for kind, value in found.get("subjectAltName", ()) if kind in ("DNS", "URI", "IP Address", "email")]
    kinds = {"x509_subject_alternative_name": names, "x509_common_name": common}
    return {kind: [value.encode() for value in values] for kind, values in kinds.items()}
