"""The one place that opens a channel to a server. What applies to every channel belongs here, including credentials.

It does not load torch, so that a health check (``deploy/health.py``) can start every few seconds.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import grpc

from edge_client.credentials import Credentials, read
from edge_client.user_text import either
from shared_hooks.errors import Disagreement, IsthmusError, NotAuthenticated, SpecError

# Why a connection fails, where TLS is the reason: a second handshake, made only for the diagnosis.
#
# gRPC reports every failed handshake as UNAVAILABLE, with a text that changes with its version; and its servers close
# a connection whose certificate they refuse without an alert. Python's ssl is more specific.


SECONDS: Final = 3.0
"""The time limit of each step."""

_NOT_YET, _EXPIRED = 9, 10
_UNKNOWN: Final = "its certificate is signed by an authority that this side does not know (ca: a file of those it does)"
_THEIRS: Final = {
    _NOT_YET: "its certificate is not valid yet, or this machine's clock is wrong",
    _EXPIRED: "its certificate has expired, or this machine's clock is wrong",
    18: _UNKNOWN,
    19: _UNKNOWN,
    20: _UNKNOWN,
    21: _UNKNOWN,
}
"""Texts by OpenSSL's X509_V_ERR_* (openssl/x509_vfy.h)."""

_FILES: Final = {
    "NO_CERTIFICATE_OR_CRL_FOUND": "ca: certificates in PEM are wanted, and there is none",
    "KEY_VALUES_MISMATCH": "the key is not that of the certificate",
}
_WANTED: Final = "it wants a certificate of this side, and none was given (certificate and key)"
_STRANGE: Final = "it does not know the authority that signed this side's certificate"
_OURS_EXPIRED: Final = "this side's certificate has expired"
_ALERTS: Final = {
    "CERTIFICATE_REQUIRED": _WANTED,
    "UNKNOWN_CA": _STRANGE,
    "CERTIFICATE_EXPIRED": _OURS_EXPIRED,
    "CERTIFICATE_REVOKED": "this side's certificate was revoked",
    "BAD_CERTIFICATE": "it takes this side's certificate for a bad one",
}
"""TLS alerts (RFC 8446, 6.2) by the end of OpenSSL's names for them."""


def why_not(server: str, credentials: Credentials) -> IsthmusError | None:
    """Return why a connection fails, as an error to raise: NotAuthenticated if either side refuses a certificate;
    Disagreement if only one side uses TLS; SpecError for unusable files. None if TLS is not the reason, or without a
    server.
    """
    # Twice: a server that is shutting down closes connections, too, and is gone the second time.
    return _look(server, credentials) and _look(server, credentials)


@contextmanager
def encrypted_to(address: tuple[str, int], context: ssl.SSLContext, name: str | None = None) -> Iterator[ssl.SSLSocket]:
    """A connection whose handshake is done; OSError if it fails.

    The socket is wrapped before it connects: for a connection that has ended by then, Python's ssl makes no handshake
    and does not report it, or raises and leaves the socket open.
    """
    with socket.create_connection(address, timeout=SECONDS) as found:
        family, peer = found.family, found.getpeername()
    with socket.socket(family) as plain, context.wrap_socket(plain, server_hostname=name) as connection:
        connection.settimeout(SECONDS)
        connection.connect(peer)
        yield connection


def _look(server: str, credentials: Credentials) -> IsthmusError | None:
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    try:
        if credentials.encrypted:
            return _encrypted((host, int(port)), server, credentials.server_name or host, credentials)
        return _clear((host, int(port)), server)
    except (OSError, ValueError):
        return None


def _clear(address: tuple[str, int], server: str) -> IsthmusError | None:
    """Detect a server that speaks TLS, which answers a ClientHello in any case."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with encrypted_to(address, context):
            pass
    except ssl.SSLError as error:
        if _alert(error, server) is None:
            return None
    give = either("--ca FILE, or --tls", "Credentials(ca=FILE), or Credentials(tls=True)")
    return Disagreement(f"{server} speaks TLS, and this side was given none: give {give}")


def _encrypted(address: tuple[str, int], server: str, name: str, credentials: Credentials) -> IsthmusError | None:
    try:
        context = context_of(credentials)
    except (ssl.SSLError, OSError) as error:
        files = [str(one) for one in (credentials.ca, credentials.certificate, credentials.key) if one is not None]
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        reason = reason or "a file is not PEM, or has a password"
        reason = _FILES.get(str(reason), reason)
        return SpecError(f"credentials: {', '.join(files)} cannot be used: {reason}")
    try:
        with encrypted_to(address, context, name) as connection:
            if connection.selected_alpn_protocol() != "h2":
                return Disagreement(f"{server} speaks TLS, but no HTTP/2: it is no Isthmus server")
            return _after_ours(connection, server, credentials)
    except ssl.SSLCertVerificationError as error:
        text = _THEIRS.get(error.verify_code) or f"its certificate does not hold: {error.verify_message}"
        return NotAuthenticated(f"{server} did not authenticate itself: {text}")
    except ssl.SSLEOFError:
        return _closed(server, credentials)
    except ssl.SSLError as error:
        return _alert(error, server) or Disagreement(f"{server} does not speak TLS, which this side requires")


def _after_ours(connection: ssl.SSLSocket, server: str, credentials: Credentials) -> NotAuthenticated | None:
    """Return the error if a server refuses a certificate, which comes after its part of the handshake."""
    try:
        return None if connection.recv(1) else _closed(server, credentials)
    except ssl.SSLError as error:
        return _alert(error, server) or _closed(server, credentials)
    except ConnectionResetError:
        return _closed(server, credentials)


def context_of(credentials: Credentials) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if credentials.ca is None else str(credentials.ca))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # gRPC does not require it either
    context.set_alpn_protocols(["h2"])
    if credentials.certificate is not None and credentials.key is not None:
        context.load_cert_chain(credentials.certificate, credentials.key, password=lambda: "")
    return context


def _alert(error: ssl.SSLError, server: str) -> NotAuthenticated | None:
    reason = error.reason or ""
    if "ALERT" not in reason:
        return None
    found = (text for end, text in _ALERTS.items() if reason.endswith(end))
    return NotAuthenticated(f"{server} refused the connection: {next(found, f'TLS says {reason}')}")


def _closed(server: str, credentials: Credentials) -> NotAuthenticated:
    """Return the reason, which only this side can tell."""
    if credentials.certificate is None or credentials.key is None:
        text = _WANTED
    else:
        ours = {_EXPIRED: _OURS_EXPIRED, _NOT_YET: "this side's certificate is not valid yet"}
        # gRPC's servers check nothing else
        text = ours.get(_verdict_on(credentials.certificate, credentials.key)) or _STRANGE
    return NotAuthenticated(f"{server} refused the connection: {text}")


def _verdict_on(certificate: str | Path, key: str | Path) -> int:
    """OpenSSL's verdict on a certificate's dates: 0, or one of X509_V_ERR_*.

    Python's ssl exposes only a peer's dates. So the certificate is shown, in memory, to a peer that trusts exactly it.
    """
    shown, requested = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shown.check_hostname, shown.verify_mode = False, ssl.CERT_NONE
    requested.verify_mode, requested.verify_flags = ssl.CERT_REQUIRED, ssl.VERIFY_X509_PARTIAL_CHAIN
    requested.load_verify_locations(certificate)
    for context in (shown, requested):
        context.load_cert_chain(certificate, key, password=lambda: "")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = shown.wrap_bio(back, there), requested.wrap_bio(there, back, server_side=True)
    for side in (*sides, *sides):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_code
    return 0


PASSPORT: Final = "isthmus-caller"
"""What a server that passes a request on says of its caller."""
RECEIVED_BYTES: Final = 64 << 20
"""The largest message; larger data come in chunks."""


_open: weakref.WeakSet[grpc.Channel] = weakref.WeakSet()
is_forked = False
"""Whether this process was forked from one with an open channel. None works then: gRPC's threads are missing, and what
is written to an inherited connection arrives in the middle of what its owner sends.
"""


def _in_child() -> None:
    global is_forked
    is_forked = is_forked or bool(_open)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def check_process() -> None:
    """Raise SpecError if this process was forked from one with an open channel."""
    if is_forked:
        raise SpecError(
            "this process was forked from one with an open client, and cannot be a client itself: start processes by "
            '"spawn" or "forkserver" (multiprocessing.get_context, multiprocessing_context of a DataLoader) and make a '
            "client in each, or close the client before"
        )


def hang_up(channel: grpc.Channel) -> None:
    """Close a channel of this process; one that was inherited by a fork is its owner's."""
    _open.discard(channel)
    if not is_forked:
        channel.close()


class ChannelArguments(Protocol):
    """Further channel arguments (`KeepAlive`)."""

    def options(self) -> list[tuple[str, int]]:
        """gRPC's own names and values."""


def dial(
    server: str, keep_alive: ChannelArguments | None = None, credentials: Credentials | None = None
) -> grpc.Channel:
    """Return a new channel to ``HOST:PORT``; nothing is sent yet. Without ``keep_alive`` silent peers are not detected.

    ``credentials``: None for plain text, with the environment's token if there is one. Raises SpecError for files that
    cannot be read, for a token that would be sent unencrypted to another machine, and as `check_process`.
    """
    check_process()
    credentials = credentials or Credentials()
    loopback = is_loopback(server)
    options: list[tuple[str, int | str]] = [
        # Its own sub-channel: the shared pool would inherit the back-off of an earlier attempt.
        ("grpc.use_local_subchannel_pool", 1),
        # gRPC's retries end silently at 256 KiB and know nothing of ids; requests are retried by us.
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
    token, headers = credentials.read_token(), []
    if token is not None:
        headers.append(("authorization", f"Bearer {token}"))
    if credentials.passport is not None:
        headers.append((PASSPORT, credentials.passport()))
    channel = grpc.intercept_channel(channel, _Headers(headers)) if headers else channel
    _open.add(channel)
    return channel


def _certificates(credentials: Credentials) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        *(None if path is None else read(path) for path in (credentials.ca, credentials.key, credentials.certificate))
    )


class _Details(NamedTuple):
    """The details of a call that gRPC reads."""

    method: Any
    timeout: Any
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class _Headers(  # type: ignore[misc, unused-ignore]
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor
):
    """Adds headers to every call. gRPC's own call credentials require TLS, and do not work on loopback."""

    def __init__(self, headers: list[tuple[str, str]]) -> None:
        self._headers = headers

    def _with_headers(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), *self._headers]
        more = (details.credentials, details.wait_for_ready, details.compression)
        return continuation(_Details(details.method, details.timeout, metadata, *more), request)

    intercept_unary_unary: Any = _with_headers
    intercept_unary_stream: Any = _with_headers
    intercept_stream_stream: Any = _with_headers


def check_address(server: str) -> str:
    """Check ``HOST:PORT`` (``[::1]:PORT`` for IPv6). Raises SpecError."""
    host, colon, port = server.rpartition(":")
    if "/" in host or "," in host:
        colon = ""  # such as http://host:port; several are a chain, where a chain is possible
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        from shared_hooks.errors import SpecError  # imports torch

        raise SpecError(f'server "{server}": expected HOST:PORT, such as 192.168.1.20:50051')
    return server


def is_loopback(server: str) -> bool:
    """Return whether ``HOST:PORT`` is this machine, for which an HTTP proxy must not be used."""
    host = server.rpartition(":")[0].strip("[]")
    if host in ("unix", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
