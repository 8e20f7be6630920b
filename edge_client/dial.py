"""The one place that opens a channel to a server. What is to hold for every channel belongs here: credentials, too.

Loads no torch, so that a health check (``deploy/health.py``) may begin every few seconds.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import grpc

from edge_client.credentials import Credentials, read

RECEIVED_BYTES: Final = 64 << 20
"""One message at most; what is larger comes in chunks."""


class ChannelArguments(Protocol):
    """What a channel is to be opened with besides (`KeepAlive`)."""

    def options(self) -> list[tuple[str, int]]:
        """gRPC's own names and values."""


def dial(
    server: str, keep_alive: ChannelArguments | None = None, credentials: Credentials | None = None
) -> grpc.Channel:
    """A channel of its own to ``HOST:PORT``; nothing is sent yet. Without ``keep_alive`` no silent peer is noticed.

    ``credentials``: None = in the clear, with the environment's token if there is one. Raises SpecError for files that
    cannot be read, and for a token that would go to another machine in the clear.
    """
    credentials = credentials or Credentials()
    loopback = is_loopback(server)
    options: list[tuple[str, int | str]] = [
        # Its own sub-channel: the shared pool would bring back the back-off of an earlier attempt.
        ("grpc.use_local_subchannel_pool", 1),
        # gRPC's retries end silently at 256 KiB and know nothing of ids; requests are sent again by us.
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0 if loopback else 1),
        ("grpc.max_receive_message_length", RECEIVED_BYTES),
        ("grpc.max_send_message_length", -1),
        *([] if keep_alive is None else keep_alive.options()),
    ]
    if credentials.encrypted:
        if credentials.server_name is not None:
            options.append(("grpc.ssl_target_name_override", credentials.server_name))
        channel = grpc.secure_channel(server, _certificates(credentials), options)
    else:
        if not loopback:
            credentials.check_clear(server)
        channel = grpc.insecure_channel(server, options)
    token = credentials.read_token()
    return channel if token is None else grpc.intercept_channel(channel, _Bearer(token))


def _certificates(credentials: Credentials) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        *(None if path is None else read(path) for path in (credentials.ca, credentials.key, credentials.certificate))
    )


class _Details(NamedTuple):
    """What gRPC asks of the details of a call."""

    method: Any
    timeout: Any
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class _Bearer(  # type: ignore[misc, unused-ignore]
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor
):
    """Puts the token beside every call. gRPC's own call credentials would do so by TLS only, and not on loopback."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def _with_token(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), self._header]
        more = (details.credentials, details.wait_for_ready, details.compression)
        return continuation(_Details(details.method, details.timeout, metadata, *more), request)

    intercept_unary_unary: Any = _with_token
    intercept_unary_stream: Any = _with_token
    intercept_stream_stream: Any = _with_token


def check_address(server: str) -> str:
    """``HOST:PORT`` (``[::1]:PORT`` for IPv6), or SpecError."""
    host, colon, port = server.rpartition(":")
    if "/" in host:
        colon = ""  # as http://host:port
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        from shared_hooks.errors import SpecError  # loads torch

        raise SpecError(f'server "{server}": expected HOST:PORT, such as 192.168.1.20:50051')
    return server


def is_loopback(server: str) -> bool:
    """Whether ``HOST:PORT`` is this machine, where an HTTP proxy has no business."""
    host = server.rpartition(":")[0].strip("[]")
    if host in ("unix", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
