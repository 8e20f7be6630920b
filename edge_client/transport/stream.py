"""One gRPC stream to one server: channel, call, greeting watchdog. It lives once; the next attempt makes another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final, cast

from edge_client.credentials import Credentials
from edge_client.dial import dial
from edge_client.transport import wire
from edge_client.transport.options import KeepAlive
from edge_client.transport.outbox import Outbox
from protos.chunks import parse_server_frame, serialize_client_frame

METHOD: Final = "/isthmus.v1.Split/Session"


class Stream:
    """Frames in, frames out. Iterating raises `grpc.RpcError` when the stream breaks."""

    def __init__(
        self,
        address: str,
        outbox: Outbox,
        keep_alive: KeepAlive,
        welcome_within: float,
        credentials: Credentials | None = None,
    ) -> None:
        """Raises SpecError for credentials that cannot be used."""
        self.greeting_timed_out = False
        self._outbox = outbox
        self._channel = dial(address, keep_alive, credentials)
        session = self._channel.stream_stream(
            METHOD, request_serializer=serialize_client_frame, response_deserializer=parse_server_frame
        )
        self._call: Any = session(cast("Iterator[Any]", outbox))
        self._watchdog = threading.Timer(welcome_within, self._no_welcome)
        self._watchdog.daemon = True
        self._watchdog.start()

    def __iter__(self) -> Iterator[wire.ServerFrame]:
        return cast("Iterator[wire.ServerFrame]", iter(self._call))

    def welcomed(self) -> None:
        """The greeting was answered: from here on keep-alive watches."""
        self._watchdog.cancel()

    def cancel(self) -> None:
        """Break the stream off; the iteration ends with CANCELLED."""
        self._call.cancel()

    def close(self) -> None:
        """Let everything go; the thread that pulls from the outbox ends, too."""
        self._watchdog.cancel()
        self._outbox.abort()
        self._call.cancel()
        self._channel.close()

    def _no_welcome(self) -> None:
        self.greeting_timed_out = True
        self._call.cancel()
