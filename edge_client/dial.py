"""The one place that opens a channel to a server. What is to hold for every channel belongs here: credentials, too.

Loads no torch, so that a health check (``deploy/health.py``) may begin every few seconds.
"""

from __future__ import annotations

import ipaddress
from typing import Final, Protocol

import grpc

RECEIVED_BYTES: Final = 64 << 20
"""One message at most; what is larger comes in chunks."""


class ChannelArguments(Protocol):
    """What a channel is to be opened with besides (`KeepAlive`)."""

    def options(self) -> list[tuple[str, int]]:
        """gRPC's own names and values."""


def dial(server: str, keep_alive: ChannelArguments | None = None) -> grpc.Channel:
    """A channel of its own to ``HOST:PORT``; nothing is sent yet. Without ``keep_alive`` no silent peer is noticed."""
    return grpc.insecure_channel(
        server,
        options=[
            # Its own sub-channel: the shared pool would bring back the back-off of an earlier attempt.
            ("grpc.use_local_subchannel_pool", 1),
            # gRPC's retries end silently at 256 KiB and know nothing of ids; requests are sent again by us.
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0 if is_loopback(server) else 1),
            ("grpc.max_receive_message_length", RECEIVED_BYTES),
            ("grpc.max_send_message_length", -1),
            *([] if keep_alive is None else keep_alive.options()),
        ],
    )


def check_address(server: str) -> str:
    """``HOST:PORT`` (``[::1]:PORT`` for IPv6), or SpecError."""
    host, colon, port = server.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        from shared_hooks.errors import SpecError  # loads torch

        raise SpecError(f'server "{server}": expected HOST:PORT, such as 192.168.1.20:50051')
    return server


def is_loopback(server: str) -> bool:
    """Whether ``HOST:PORT`` is this machine, where an HTTP proxy has no business."""
    host = server.rpartition(":")[0].strip("[]")
    if host.startswith(("unix", "localhost")):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
