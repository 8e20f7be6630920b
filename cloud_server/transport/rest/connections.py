"""HTTP connections, each with a time limit while it waits for its client, and limits on how fast they are read.

A connection with a request in progress holds one of the server's places (`inference.asking`). All others wait: for the
first byte, for the rest of a header or body, for a client that does not fetch its answer, for the next request. At most
`MAX_WAITING_CONNECTIONS` may; beyond that, the address with the most of them loses the one that has waited longest
(`transport.active_calls`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from cloud_server.access import Caller, names_in
from cloud_server.streams import AccountPace
from cloud_server.transport.active_calls import WaitingCall, WaitingCalls

MAX_WAITING_CONNECTIONS = 128
IDLE_SECONDS = 60.0
"""How long a client may take for a request, each piece of its body, fetching a refusal, and between requests."""
SWEEP_SECONDS = 1.0
LINGER_SECONDS = 2.0
"""How long a client whose body is not read may take to leave; if the connection was cut at once, it would not receive
the reason.
"""
LEAST_BYTES, MOST_BYTES = 1 << 10, 32 << 10
"""Bytes that are parsed at once: the more, the faster the last ones were. As chunks of one byte they take Python some 2
and 70 ms.
"""
TURN_SECONDS = 0.002
"""How long one connection is parsed before others have their turn."""
PEER = "isthmus_peer"
"""The key of the `Peer` in the state of a request's scope."""


class Peer:
    """The client of one connection. Used by the event loop's thread only, except for `leave` and `works`."""

    def __init__(self, connection: H11Protocol, waiting: WaitingCalls) -> None:
        transport = connection.transport
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]  # None if the peer has gone already
        self.name = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        """In gRPC's form."""
        self.names = names_in(certificate(transport.get_extra_info("ssl_object")))
        self.account = Caller(self.name).account
        """The account that parsing is charged to: the address, until the request is authenticated."""
        self.is_ignored = False
        """Whether what it sends is discarded."""
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._waiting = waiting
        self._place: WaitingCall | None = None
        self._request = object()
        self._closed = asyncio.Event()
        self.waits(self._request)

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    @property
    def is_sending(self) -> bool:
        """Whether the body of the request is incomplete."""
        return bool(self._connection.cycle.more_body)

    def begins(self) -> object:
        """Record that a request's header has arrived; returns an object that identifies the request."""
        self._request = object()
        self.waits(self._request)
        return self._request

    def waits(self, request: object) -> None:
        """Record that the client must act now; no effect if the next request has begun."""
        if request is self._request and not self.is_closed:
            self._leave_place()
            self._place = self._waiting.enter(Caller(self.name).address, self.leave)

    def record_activity(self) -> None:
        """Record that the client has acted."""
        if self._place is not None:
            self._place.since = time.monotonic()

    def works(self) -> None:
        """Record that the request has one of the server's places. Thread-safe."""
        self._soon(self._leave_place)

    def closed(self) -> None:
        self._closed.set()
        self._leave_place()

    async def ignored(self) -> None:
        """Discard what the client sends, until it leaves, at most `LINGER_SECONDS`."""
        self.is_ignored = True
        self._connection.flow.resume_reading()
        try:
            await asyncio.wait_for(self._closed.wait(), LINGER_SECONDS)
        except asyncio.TimeoutError:
            pass

    def leave(self) -> None:
        """End the connection at once. Thread-safe."""
        self._soon(self._connection.transport.abort)

    def _leave_place(self) -> None:
        if self._place is not None:
            self._waiting.leave(self._place)
            self._place = None

    def _soon(self, callback: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed, and its connection with it
            pass


class RestConnection(H11Protocol):
    """uvicorn's connection, which passes its `Peer` to the application with each request (``scope["state"]``).

    Parsing is charged to the account (`streams.probe.Pace`): HTTP in chunks of one byte is cheap to send and costly to
    parse.
    """

    def __init__(self, waiting: WaitingCalls, pace: AccountPace, **uvicorns: Any) -> None:
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
        else:  # resumed by uvicorn
            self.transport.pause_reading()

    def _read(self) -> None:
        """Parse as much as the account may now; nothing more is read from the network until then."""
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
    """Return the names in a client's certificate, as gRPC has them; empty without TLS or a certificate."""
    found = None if connection is None else connection.getpeercert()
    if not found:
        return {}
    common = [value for part in found.get("subject", ()) for key, value in part if key == "commonName"]
    names = [value for kind, value in found.get("subjectAltName", ()) if kind in ("DNS", "URI", "IP Address", "email")]
    kinds = {"x509_subject_alternative_name": names, "x509_common_name": common}
    return {kind: [value.encode() for value in values] for kind, values in kinds.items()}
