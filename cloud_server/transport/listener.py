"""A gRPC server with a door: bound to an address, with health, and reflection on request."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent import futures

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from cloud_server.access import Tls
from cloud_server.transport import health
from cloud_server.transport.credentials import server_credentials
from cloud_server.transport.door import SERVICE, Door
from cloud_server.transport.port import check_free
from shared_hooks.errors import SpecError

CALLS_PER_THREAD = 4
"""At a time, before gRPC refuses calls: whatever stays is bounded below the number of threads, so the rest has its turn
in a moment.
"""


def options(max_message_bytes: int, streams: int) -> list[tuple[str, int]]:
    """Channel arguments (https://grpc.github.io/grpc/core/group__grpc__arg__keys.html). What each of them holds off:
    docs/decisions/0013-floods.md. ``streams``: as many as are served at a time, on one connection.
    """
    return [
        ("grpc.max_concurrent_streams", streams),  # else streams opened and reset pile up: gigabytes in seconds
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none: messages are refused before they are inflated
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # A stream may idle for hours: clients ping to keep it, and are not sent away (GOAWAY) for that ...
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 10),
        # ... and the server pings, so that a client whose machine vanished frees its place.
        ("grpc.keepalive_time_ms", 20_000),
        # Patient, for an answer to a ping waits behind all that a slow link holds of an upload.
        ("grpc.keepalive_timeout_ms", 60_000),
        ("grpc.http2.ping_timeout_ms", 60_000),
    ]


class Listener:
    """``address`` is HOST:PORT, ``port`` the real one. ``services``: of which health is told.

    ``threads``: as many calls as are served at a time. ``tls``: None = in the clear. ``reuse_port``: other servers may
    listen there, too. Raises SpecError.
    """

    def __init__(
        self,
        address: str,
        door: Door,
        services: Iterable[str],
        threads: int,
        max_message_bytes: int,
        tls: Tls | None = None,
        *,
        reflection: bool = False,
        reuse_port: bool = False,
    ) -> None:
        self._door = door
        self.server = grpc.server(
            futures.ThreadPoolExecutor(threads, thread_name_prefix="isthmus-grpc"),
            options=[
                *options(max_message_bytes, threads),
                # Unless it is said, a second server on the same port is a mistake, not a balanced pair.
                ("grpc.so_reuseport", int(reuse_port)),
            ],
            maximum_concurrent_rpcs=CALLS_PER_THREAD * threads,
            interceptors=[door],
        )
        self.health = health.Health(("", *services))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        if reflection:
            enable_server_reflection((SERVICE, health.NAME, REFLECTION), self.server)
        try:
            if tls is None:
                self.port = self.server.add_insecure_port(address)
            else:
                self.port = self.server.add_secure_port(address, server_credentials(tls))
        except RuntimeError as error:
            check_free(address, reuse_port)  # says why, if it can
            raise SpecError(f"listen: {address} cannot be used: {error}") from error
        if self.port == 0:
            raise SpecError(f"listen: {address} cannot be used")

    def start(self) -> None:
        self.server.start()
        self._door.open()
        self.serving(True)

    def serving(self, able: bool) -> None:
        """What health says, until `unwell`."""
        self.health.set(health.State.SERVING if able else health.State.NOT_SERVING)

    def unwell(self) -> None:
        """Health says NOT_SERVING for good."""
        self.health.end()

    def close(self, grace: float | None) -> None:
        """Ends what is left; frames under way have ``grace`` seconds."""
        self.server.stop(grace).wait(grace)
        self._door.close()
