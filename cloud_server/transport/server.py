"""A core on a port, and shutting down."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from cloud_server.access import Register, Tls
from cloud_server.core import Core
from cloud_server.inference import Inference
from cloud_server.transport.authentication import INFERENCE, MAX_WAITING, SERVICE, AuthInterceptor, server_credentials
from cloud_server.transport.rest import RestServer
from cloud_server.transport.servicer import InferenceServicer, SplitServicer
from shared_hooks.errors import SpecError
from shared_hooks.lifecycle import Stage

log = logging.getLogger(__name__)


# The standard health service (https://grpc.io/docs/guides/health-checking/).
#
# grpcio-health-checking's own keeps every name that a stranger watches, and serves the messages of all watchers in
# one thread.


HealthState = health_pb2.HealthCheckResponse

NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc, unused-ignore]
    """The gRPC health service for ``services``. Thread-safe."""

    def __init__(self, services: Iterable[str]) -> None:
        self._changed = threading.Condition()
        self._services = frozenset(services)
        self._state: int = HealthState.SERVING
        self._over = False

    def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> HealthState:
        if request.service not in self._services:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            return HealthState()
        return HealthState(status=self._state)

    def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> Iterator[HealthState]:
        """Yield the current state and each change of it, until the client leaves."""
        known = request.service in self._services
        if not context.add_callback(self._wake):
            return
        reported = None
        while context.is_active():
            now = self._state if known else HealthState.SERVICE_UNKNOWN
            if now != reported:
                reported = now
                yield HealthState(status=now)
            with self._changed:
                self._changed.wait_for(lambda: not context.is_active() or (known and self._state != reported))  # noqa: B023

    @property
    def serving(self) -> bool:
        """Whether the state is SERVING."""
        return self._state == HealthState.SERVING

    def set(self, state: int) -> None:
        """Set the state of every service; no effect after `end`."""
        with self._changed:
            if not self._over:
                self._state = state
                self._changed.notify_all()

    def end(self) -> None:
        """Set NOT_SERVING for good."""
        self.set(HealthState.NOT_SERVING)
        self._over = True

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


# Whether the server can listen on its addresses: checked before models are loaded, which takes seconds or minutes.

REASONS = {
    errno.EADDRINUSE: "is in use: another process listens there",
    errno.EADDRNOTAVAIL: "is no address of this machine",
    errno.EACCES: "may not be used: ports below 1024 need the right to it",
}


def check_free(address: str, reuse_port: bool = False) -> None:
    """Raise SpecError, with the reason, if it is impossible to listen at ``HOST:PORT``. Listens only for a moment.

    ``reuse_port``: other servers may share the port; then it does not listen, because it would receive their clients.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SpecError(f"listen: {address}: no host is called {host} ({error.strerror})") from error
    refused = None
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As gRPC does: sockets left behind by a server that has just ended are not in use.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if reuse_port:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                probe.bind(where)
                if not reuse_port:
                    probe.listen(1)
                return
        except OSError as error:
            refused = refused or error
    assert refused is not None
    why = REASONS.get(refused.errno or 0, f"cannot be used: {os.strerror(refused.errno or 0)}")
    raise SpecError(f"listen: {address} {why}") from refused


# A gRPC server with authentication: bound to an address, with health, and reflection on request.

CALLS_PER_THREAD = 4
"""Calls per thread before gRPC refuses more. Long-lived calls are limited to fewer than the threads, so the others get
a thread within a moment.
"""


def options(max_message_bytes: int, streams: int) -> list[tuple[str, int]]:
    """Channel arguments (https://grpc.github.io/grpc/core/group__grpc__arg__keys.html), explained in
    docs/decisions/0013-floods.md. ``streams``: the maximum on one connection.
    """
    return [
        # otherwise streams that are opened and reset pile up: gigabytes in seconds
        ("grpc.max_concurrent_streams", streams),
        # no compression: messages are refused before they are inflated
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # A stream may idle for hours: clients ping to keep it, and are not disconnected (GOAWAY) for that ...
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 10),
        # ... and the server pings, so that a client whose machine vanished frees its place.
        ("grpc.keepalive_time_ms", 20_000),
        # A long timeout, because the answer to a ping waits behind everything that a slow link holds of an upload.
        ("grpc.keepalive_timeout_ms", 60_000),
        ("grpc.http2.ping_timeout_ms", 60_000),
    ]


class CallThreads(futures.ThreadPoolExecutor):
    """The threads of a gRPC server's calls. Where the system has none to give, a call waits for one that is free.

    gRPC takes calls in one thread, which would end at the error, and with it the server: neither another call nor its
    own stop would come to an end.
    """

    def _adjust_thread_count(self) -> None:  # CPython's `submit` calls it with the call in the queue
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            log.error("%s: a call waits until another has ended", error)


class GrpcListener:
    """A gRPC server. ``address`` is HOST:PORT, ``port`` the real one. ``services``: whose health is reported.

    ``threads``: the maximum number of concurrent calls. ``tls``: None for plain text. ``reuse_port``: other servers may
    share the port. Raises SpecError.
    """

    def __init__(
        self,
        address: str,
        auth: AuthInterceptor,
        services: Iterable[str],
        threads: int,
        max_message_bytes: int,
        tls: Tls | None = None,
        *,
        reflection: bool = False,
        reuse_port: bool = False,
    ) -> None:
        self._auth = auth
        self.server = grpc.server(
            CallThreads(threads, thread_name_prefix="isthmus-grpc"),
            options=[
                *options(max_message_bytes, threads),
                # Unless requested, a second server on the same port is a mistake, not a balanced pair.
                ("grpc.so_reuseport", int(reuse_port)),
            ],
            maximum_concurrent_rpcs=CALLS_PER_THREAD * threads,
            interceptors=[auth],
        )
        self.health = Health(("", *services))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        if reflection:
            enable_server_reflection((SERVICE, NAME, REFLECTION), self.server)
        try:
            if tls is None:
                self.port = self.server.add_insecure_port(address)
            else:
                self.port = self.server.add_secure_port(address, server_credentials(tls))
        except RuntimeError as error:
            check_free(address, reuse_port)  # reports the reason, if it can
            raise SpecError(f"listen: {address} cannot be used: {error}") from error
        if self.port == 0:
            raise SpecError(f"listen: {address} cannot be used")

    def start(self) -> None:
        self.server.start()
        self._auth.open()
        self.serving(True)

    def serving(self, able: bool) -> None:
        """Set the health state, until `unwell`."""
        self.health.set(HealthState.SERVING if able else HealthState.NOT_SERVING)

    def unwell(self) -> None:
        """Set the health state to NOT_SERVING for good."""
        self.health.end()

    def close(self, grace: float | None) -> None:
        """Stop the server; calls in progress have ``grace`` seconds."""
        self.server.stop(grace).wait(grace)
        self._auth.close()


SPARE_THREADS = 8
"""Threads for health and model lists, and for refusing streams beyond `Limits.max_clients`."""

CLOSING_SECONDS = 60.0
"""Beyond the drain, until a server that stopped listening ends the remaining streams."""


class CloudServer:
    """A core on a port. ``address`` is HOST:PORT; after `start`, ``port`` is the real one.

    ``tls``: None for plain text; ``identities``: the file of known identities; ``reflection``: whether the server
    describes its services to any client. Raises SpecError.
    """

    def __init__(
        self,
        core: Core,
        address: str,
        tls: Tls | None = None,
        identities: Path | None = None,
        *,
        register: Register | None = None,
        reflection: bool = False,
        reuse_port: bool = False,
        rest: str = "",
        pages: Path | None = None,
    ) -> None:
        """``reuse_port``: other servers may share the port, and a draining one stops listening. ``register``: known
        identities, instead of ``identities`` and certificates. ``rest``: HOST:PORT of the Open Inference Protocol over
        HTTP; empty: none. ``pages``: a folder that is served there under /try.
        """
        self.core = core
        self._reuse_port = reuse_port
        self._ending = threading.Lock()  # acquired by the first caller that stops it, and kept
        # Every stream holds one thread of the pool as long as it lives.
        limits = core.limits
        # So does a request of the Open Inference Protocol, even before its message has arrived.
        threads = 2 * limits.max_clients + limits.max_probes + limits.max_profiles + MAX_WAITING + SPARE_THREADS
        if register is None:
            register = Register(identities, certificates=tls is not None and tls.client_ca is not None)
        self._auth = auth = AuthInterceptor(core, register)
        self._listener = GrpcListener(
            address,
            auth,
            (SERVICE, INFERENCE),
            threads,
            limits.max_message_bytes,
            tls,
            reflection=reflection,
            reuse_port=reuse_port,
        )
        self.inference = Inference(core, lambda: self._listener.health.serving)
        InferenceServicer(self.inference, auth).add_to(self._listener.server)
        SplitServicer(core, auth).add_to(self._listener.server)
        self.port = self._listener.port
        self.rest = RestServer(self.inference, auth.active_calls, rest, tls, reuse_port, pages) if rest else None

    def start(self) -> None:
        self._listener.start()
        if self.rest is not None:
            self.rest.start()

    def serving(self, able: bool) -> None:
        """Set the health state, until the server drains."""
        self._listener.serving(able)

    def drain(self) -> None:
        """Stop accepting requests: open streams are notified, new ones refused, and the health state is NOT_SERVING."""
        self._listener.unwell()
        if self._reuse_port:  # before clients are asked to leave: a reconnecting client must find the other server
            self._listener.server.stop(self.core.limits.drain_seconds + CLOSING_SECONDS)
        if self.rest is not None:
            self.rest.drain()
        self.core.drain()

    def stop(self, grace: float | None = None) -> None:
        """End the streams and the server; calls in progress have ``grace`` seconds. Idempotent."""
        if not self._ending.acquire(blocking=False):
            return
        self.core.drained(self.core.wait_idle(0))
        self.core.lifecycle.emit(Stage.BEFORE_SHUTDOWN)
        self.core.dismiss()
        self.core.wait_gone(grace or 0)
        self._listener.close(grace)
        if self.rest is not None:
            self.rest.stop()
        self.core.close()
        self.core.lifecycle.emit(Stage.AFTER_SHUTDOWN)
