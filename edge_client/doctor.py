"""Diagnose a server: what it serves, whether this side has the same, and whether a request returns the model's
answer.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge_client.call import Call
from edge_client.client import EdgeClient
from edge_client.credentials import TOKEN, Credentials
from edge_client.dial import context_of, dial, encrypted_to, is_loopback, why_not
from edge_client.model_choice import ModelChoice
from edge_client.transport import ConnectionOptions, options
from edge_client.user_text import EDGE_ONLY
from protos.isthmus.v1 import split_pb2
from protos.isthmus.v1.split_pb2_grpc import SplitStub
from shared_hooks import doctor
from shared_hooks.doctor import CheckLevel, Finding, ok, warning, wrong
from shared_hooks.errors import (
    AccessRefused,
    CutRefused,
    Disagreement,
    IsthmusError,
    NotAuthenticated,
    SpecError,
    UnknownModel,
)
from shared_hooks.tensors import identical

# The way to a server, step by step: its name, TCP, TLS, HTTP/2, gRPC's health. The first failure ends it.


SECONDS: Final = 5.0
"""Timeout of each step in seconds."""
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""Start of every HTTP/2 connection, with empty SETTINGS (RFC 9113, 3.4)."""
_SETTINGS: Final = 4


def own(credentials: Credentials) -> Iterator[Finding]:
    """Check this side's certificates, and its trusted authorities."""
    if credentials.certificate is not None and credentials.key is not None:
        yield from doctor.pair("own cert", Path(credentials.certificate), Path(credentials.key), server=False)
    if credentials.ca is not None:
        yield from doctor.authorities("ca", Path(credentials.ca))
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
    """Check the way to the server. Ends with the first failing step."""
    for step in (_name, _tcp, _tls if credentials.encrypted else _clear, _health):
        for finding in step(server, credentials):
            yield finding
            if finding.level is CheckLevel.WRONG:
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
        yield wrong("tcp", f"{server}: no process listens there", "start cloud-server, or give its port")
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
        yield warning(
            "tls", "none: any machine on the path reads and may change what crosses", "--ca FILE, or a tunnel"
        )
    try:
        with socket.create_connection(_host(server), timeout=SECONDS) as connection:
            connection.sendall(_PREFACE)
            head = connection.recv(9, socket.MSG_WAITALL)
    except OSError as error:
        head = str(error).encode()
    if len(head) == 9 and head[3] == _SETTINGS:
        yield ok("http/2", "user_text")
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
    except OSError as error:  # it may have left since
        yield wrong("tls", f"{server}: {error}", "look again")
        return
    left = (ssl.cert_time_to_seconds(shown["notAfter"]) - time.time()) / 86400
    names = ", ".join(value for _, value in shown.get("subjectAltName", ()))
    says = f"{version}, the server's certificate is for {names}"
    if left < doctor.SOON_DAYS:
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
    """Compare the server's clock, in seconds since 1970, with this one."""
    apart = there - datetime.now(timezone.utc).timestamp()
    says = f"the server's is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} this one"
    if abs(apart) > 60:
        mend = "set both by the network (chrony): certificates and tokens begin and end by them"
        return warning("clocks", says, mend)
    return ok("clocks", says if abs(apart) >= 1.5 else "both agree")


AGREE_SECONDS: Final = 15.0
MEND: Final = {
    ": the tensor ": "the same weights (--weights FILE), of the same model, on both sides",
    ": class: ": "the same code and spec of the model on both sides",
    "code of ": "the same version of the model's code (or of the library it comes from) on both sides",
    "operation ": "the same code of the model, and versions of torch that do the same operations",
    "weights": "give both sides the same weights (--weights FILE)",
    "structure": "the same code, spec and --selection on both sides",
    "plan": "the same code of the model, and versions of torch that do the same operations",
    "setting": "the same setting on both sides: it changes kernels",
    "protocol": "the same version of Isthmus on both sides",
}
_DIFFERENCES: Final = re.compile(r"client and server differ in (.*?)(?: \(client: |$)", re.DOTALL)


def served(server: str, credentials: Credentials) -> Iterator[Finding]:
    """Check what `ListModels` returns: models, versions, clock."""
    with dial(server, credentials=credentials) as channel:
        stub: Any = SplitStub(channel)
        try:
            reply = stub.ListModels(split_pb2.ListModelsRequest(), timeout=AGREE_SECONDS)
        except grpc.RpcError as error:
            found = options.refusal(error, server, credentials)
            yield wrong("models", f"{found}", _mend(found))
            return
    if reply.unix_seconds:
        yield clock(reply.unix_seconds)
    if not reply.models:
        yield wrong("models", "none is served for this identity", "the server's [models], or `models` of the identity")
    for one in reply.models:
        yield ok("models", f"{one.model_id}: {one.layers} layers, weights {one.weights_hash}")
    about = _machine(reply)
    if about:
        names = ("isthmus", "torch", "python", "device", "threads", "cpu")
        yield ok("server", ", ".join(f"{name} {about[name]}" for name in names if about.get(name) is not None))


def greeted(server: str, credentials: Credentials, choice: ModelChoice) -> Iterator[Finding]:
    """Check the greeting, as every client begins; then one request, compared with the whole model here."""
    connection = ConnectionOptions(patience=AGREE_SECONDS, credentials=credentials)
    client = EdgeClient(server, choice, "input", connection=connection)
    try:
        yield from _greeting(client)
    finally:
        client.close()


def _greeting(client: EdgeClient) -> Iterator[Finding]:
    try:
        client.open(AGREE_SECONDS)
    except Disagreement as error:
        yield from differences(f"{error}")
        return
    except IsthmusError as error:
        yield wrong("greeting", f"{type(error).__name__}: {error}", _mend(error))
        return
    device = client.device
    yield ok("greeting", f"model, weights, structure and settings agree (here: torch {torch.__version__}, {device})")
    example = None if client.spec is None else client.spec.example(device)
    if example is None:
        yield warning("request", "none was tried: the spec has no example input", "give it one, or try edge-client run")
        return
    call = Call(*example)
    try:
        first = client.infer(*call.args, **call.kwargs)
        answer = client.infer(*call.args, **call.kwargs)  # the first request rehearses its tail
    except IsthmusError as error:
        yield wrong("request", f"{type(error).__name__}: {error}", _mend(error))
        return
    here = client.infer(*call.args, **call.kwargs, split=EDGE_ONLY).output
    took = f"{first.times.end_to_end / 1e6:.1f} ms, then {answer.times.end_to_end / 1e6:.1f} ms"
    if identical(answer.output, here):
        yield ok("request", f"the server's answer is this side's, bit for bit; {took}")
    else:
        says = f"the server's answer differs from this side's by some bits; {took}"
        yield warning("request", says, "right for two kinds of processor; else compare versions of torch and --threads")


def along(servers: Sequence[str], credentials: Credentials, choice: ModelChoice) -> Iterator[Finding]:
    """Make one request through all servers of a chain, with evenly spread cuts: each one's part, and whether it is
    exact.
    """
    connection = ConnectionOptions(patience=AGREE_SECONDS, credentials=credentials)
    with EdgeClient(servers, choice, EDGE_ONLY, connection=connection) as client:
        example = None if client.spec is None else client.spec.example(client.device)
        if example is None:
            yield warning("chain", "none was tried: the spec has no example input", "give it one, or --example")
            return
        call = Call(*example)
        names = [one.name for one in client.wrapped.plan(*call.args, **call.kwargs).layers if one.can_split]
        if len(names) < len(servers):
            yield wrong("chain", f"{len(names)} cuts for {len(servers)} servers", "fewer servers, or another --depth")
            return
        cuts = [names[(number + 1) * len(names) // (len(servers) + 1)] for number in range(len(servers))]
        where = f"cut after {', '.join(cuts)}"
        try:
            client.infer(*call.args, **call.kwargs, split=cuts)
            answer = client.infer(*call.args, **call.kwargs, split=cuts)
        except CutRefused as error:
            yield warning("chain", f"{where}: {error}", "edge-client verify --server A,B lists the possible cuts")
            return
        except IsthmusError as error:
            yield wrong("chain", f"{where}: {type(error).__name__}: {error}", _mend_chain(error))
            return
        here = client.infer(*call.args, **call.kwargs, split=EDGE_ONLY).output
        for before, part in zip(servers, answer.parts, strict=False):
            took = f"{part.times.compute / 1e6:.1f} ms for its part, {part.bytes_up} bytes from {before}"
            yield ok("chain", f"{part.server} from {part.split}: {took}")
        says = f"{where}, {answer.times.end_to_end / 1e6:.1f} ms"
        if identical(answer.output, here):
            yield ok("chain", f"{says}: the answer is this side's, bit for bit")
        else:
            mend = "right where the machines are of several kinds; else compare versions of torch and --threads"
            yield warning("chain", f"{says}: the answer differs from this side's by some bits", mend)


def _mend_chain(error: IsthmusError) -> str:
    if isinstance(error, AccessRefused):
        return "--next NAME=HOST:PORT of the server before it, or [trust] and the identity in the next one's files"
    return "cloud-server doctor on the server before it looks at its next ones"


def differences(text: str) -> Iterator[Finding]:
    """Yield a finding for each difference of the two sides in a refusal's text."""
    found = _DIFFERENCES.search(text)
    for each in found[1].split("; ") if found else [text]:
        mend = next((mend for name, mend in MEND.items() if name in each), "the server's log may say more")
        yield wrong("agreement", each, mend)


def _machine(reply: split_pb2.ListModelsReply) -> dict[str, Any]:
    try:
        found = json.loads(reply.models[0].machine) if reply.models else {}
    except (ValueError, RecursionError):
        found = {}
    return found if isinstance(found, dict) else {}


def _mend(error: IsthmusError) -> str:
    if isinstance(error, NotAuthenticated):
        return "--token-file, or --cert and --key, as the server wants them"
    if isinstance(error, AccessRefused):
        return "the identity's entry in the server's file of identities"
    if isinstance(error, UnknownModel):
        return "--model with one of these names, or serve it there"
    return "the server's log may say more"
