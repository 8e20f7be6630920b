"""The way to a server, step by step: its name, TCP, TLS, HTTP/2, gRPC's health. A step that fails ends it."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge_client.credentials import TOKEN, Credentials
from edge_client.dial import dial, is_loopback
from edge_client.handshake import context_of, encrypted_to, why_not
from shared_hooks.doctor import Finding, Level, certificates, ok, warning, wrong
from shared_hooks.errors import SpecError

SECONDS: Final = 5.0
"""For each step."""
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How every HTTP/2 connection begins, with empty SETTINGS (RFC 9113, 3.4)."""
_SETTINGS: Final = 4


def own(credentials: Credentials) -> Iterator[Finding]:
    """What this side shows, and whom it trusts."""
    if credentials.certificate is not None and credentials.key is not None:
        yield from certificates.pair("own cert", Path(credentials.certificate), Path(credentials.key), server=False)
    if credentials.ca is not None:
        yield from certificates.authorities("ca", Path(credentials.ca))
    try:
        token = credentials.read_token()
    except SpecError as error:
        yield wrong("token", f"{error}", "cloud-server token NAME makes one")
        return
    if token is None:
        return
    where = credentials.token_file or ("the call" if credentials.token is not None else TOKEN)
    if credentials.token_file is not None and Path(credentials.token_file).stat().st_mode & 0o007:
        yield wrong("token", f"{where}: every user may read it", f"chmod 600 {where}")
    else:
        yield ok("token", f"from {where}")


def way(server: str, credentials: Credentials) -> Iterator[Finding]:
    """Ends with the first step that is wrong."""
    for step in (_name, _tcp, _tls if credentials.encrypted else _clear, _health):
        for finding in step(server, credentials):
            yield finding
            if finding.level is Level.WRONG:
                return


def _host(server: str) -> tuple[str, int]:
    host, _, port = server.rpartition(":")
    return host.strip("[]"), int(port)


def _name(server: str, _: Credentials) -> Iterator[Finding]:
    host, port = _host(server)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        yield wrong("name", f"{host}: {error.strerror or error}", "its spelling, or this machine's name server")
        return
    yield ok("name", f"{host}: {', '.join(sorted({str(one[4][0]) for one in found}))}")


def _tcp(server: str, _: Credentials) -> Iterator[Finding]:
    began = time.perf_counter()
    try:
        with socket.create_connection(_host(server), timeout=SECONDS):
            yield ok("tcp", f"connected in {1e3 * (time.perf_counter() - began):.1f} ms")
    except ConnectionRefusedError:
        yield wrong("tcp", f"{server}: nobody listens there", "start cloud-server, or give its port")
    except TimeoutError:
        yield wrong("tcp", f"{server}: no answer in {SECONDS:g} s", "a firewall, or a machine that is off")
    except OSError as error:
        yield wrong("tcp", f"{server}: {error.strerror or error}", "the network between the two")


def _clear(server: str, credentials: Credentials) -> Iterator[Finding]:
    if (error := why_not(server, credentials)) is not None:
        yield wrong("tls", f"{error}", "with --tls only for a certificate that the whole world trusts")
        return
    if is_loopback(server):
        yield ok("tls", "none: in the clear, within this machine")
    else:
        yield warning("tls", "none: whoever is on the way reads and may change what crosses", "--ca FILE, or a tunnel")
    try:
        with socket.create_connection(_host(server), timeout=SECONDS) as connection:
            connection.sendall(_PREFACE)
            head = connection.recv(9, socket.MSG_WAITALL)
    except OSError as error:
        head = str(error).encode()
    if len(head) == 9 and head[3] == _SETTINGS:
        yield ok("http/2", "spoken")
    else:
        yield wrong("http/2", f"{server} does not speak it", "is that the port of a cloud-server?")


def _tls(server: str, credentials: Credentials) -> Iterator[Finding]:
    if (error := why_not(server, credentials)) is not None:
        yield wrong("tls", f"{error}", "--ca, --cert, --key or --server-name; on the server: cloud-server doctor")
        return
    context = context_of(credentials)
    name = credentials.server_name or _host(server)[0]
    try:
        with encrypted_to(_host(server), context, name) as encrypted:
            shown: Any = encrypted.getpeercert() or {}
            version, protocol = encrypted.version(), encrypted.selected_alpn_protocol()
    except OSError as error:  # it may have gone since
        yield wrong("tls", f"{server}: {error}", "look again")
        return
    left = (ssl.cert_time_to_seconds(shown["notAfter"]) - time.time()) / 86400
    names = ", ".join(value for _, value in shown.get("subjectAltName", ()))
    says = f"{version}, the server's certificate is for {names}"
    if left < certificates.SOON_DAYS:
        yield warning("tls", f"{says}, and expires in {left:.1f} days", "sign it again, on the server")
    else:
        yield ok("tls", f"{says}, {left:.0f} days left")
    yield ok("http/2", f"agreed on by TLS ({protocol})")


def _health(server: str, credentials: Credentials) -> Iterator[Finding]:
    with dial(server, credentials=credentials) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        except grpc.RpcError as error:
            call: Any = error
            says = f"{call.code().name}: {call.details()}"
            yield wrong("health", says, "is that the port of a cloud-server?")
            return
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        yield ok("health", "SERVING")
    else:
        yield wrong("health", f"{name}: it drains, or has no worker that is ready", "wait, or read its log")


def clock(there: int) -> Finding:
    """``there``: the server's, in seconds since 1970."""
    apart = there - datetime.now(timezone.utc).timestamp()
    says = f"the server's is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} this one"
    if abs(apart) > 60:
        mend = "set both by the network (chrony): certificates and tokens begin and end by them"
        return warning("clocks", says, mend)
    return ok("clocks", says if abs(apart) >= 1.5 else "both agree")
