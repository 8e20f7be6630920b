"""One gRPC stream to one server: channel and call. It lives once; the next attempt makes another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

from edge_client.credentials import Credentials
from edge_client.dial import dial
from edge_client.transport.options import KeepAlive
from edge_client.transport.outbox import Outbox
from protos.frames import ServerFrame, parse_server_frame, serialize_client_frame

METHOD: Final = "/isthmus.v1.Split/Session"


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The channel's arguments: keep-alive, and how long the connection may take until the other side speaks HTTP/2."""

    keep_alive: KeepAlive
    connect_within: float

    def options(self) -> list[tuple[str, int]]:
        return [*self.keep_alive.options(), ("grpc.min_reconnect_backoff_ms", int(1000 * self.connect_within))]


class Stream:
    """Frames in, frames out. Iterating raises `grpc.RpcError` when the stream breaks."""

    def __init__(
        self,
        address: str,
        outbox: Outbox,
        keep_alive: KeepAlive,
        connect_within: float,
        credentials: Credentials | None = None,
    ) -> None:
        """Raises SpecError for credentials that cannot be used."""
        self.welcomed = threading.Event()
        """Set when the greeting was answered, and at the end."""
        self.ended = threading.Event()
        self.broken_for = ""
        """Why this side broke it off."""
        self._outbox = outbox
        self._channel = dial(address, _Arguments(keep_alive, connect_within), credentials)
        session = self._channel.stream_stream(
            METHOD, request_serializer=serialize_client_frame, response_deserializer=parse_server_frame
        )
        self._call: Any = session(cast("Iterator[Any]", outbox))

    def __iter__(self) -> Iterator[ServerFrame]:
        return cast("Iterator[ServerFrame]", iter(self._call))

    def cancel(self, why: str = "") -> None:
        """Break the stream off; the iteration ends with CANCELLED."""
        self.broken_for = self.broken_for or why
        self._call.cancel()

    def close(self) -> None:
        """Let everything go; the threads that pull from the outbox and that watch end, too."""
        self.ended.set()
        self.welcomed.set()
        self._outbox.abort()
        self._call.cancel()
        self._channel.close()
