"""One gRPC stream to one server: channel, call, greeting watchdog. It lives once; the next attempt makes another."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator
from typing import Any, Final, cast

import grpc

from edge_client import wire
from edge_client.options import KeepAlive
from edge_client.outbox import Outbox
from protos.chunks import parse_server_frame, serialize_client_frame

METHOD: Final = "/isthmus.v1.Split/Session"


class Stream:
    """Frames in, frames out. Iterating raises `grpc.RpcError` when the stream breaks."""

    def __init__(self, address: str, outbox: Outbox, keep_alive: KeepAlive, welcome_within: float) -> None:
        self.greeting_timed_out = False
        self._outbox = outbox
        self._channel = grpc.insecure_channel(address, options=channel_options(address, keep_alive))
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


def channel_options(address: str, keep_alive: KeepAlive) -> list[tuple[str, int]]:
    """Of every channel to a server."""
    return [
        # Its own sub-channel: the shared pool would bring back the back-off of an earlier attempt.
        ("grpc.use_local_subchannel_pool", 1),
        # gRPC's retries end silently at 256 KiB and know nothing of ids; requests are sent again by us.
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0 if is_loopback(address) else 1),
        ("grpc.max_receive_message_length", 64 << 20),
        ("grpc.max_send_message_length", -1),
        *keep_alive.options(),
    ]


def is_loopback(address: str) -> bool:
    """Whether ``HOST:PORT`` is this machine, where an HTTP proxy has no business."""
    host = address.rpartition(":")[0].strip("[]")
    if host.startswith(("unix", "localhost")):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
