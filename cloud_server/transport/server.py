"""The gRPC server: our service, the standard health service (and reflection on request), and shutting down."""

from __future__ import annotations

import logging
import threading
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from cloud_server.access import Register, Tls
from cloud_server.core import Core
from cloud_server.inference import Inference
from cloud_server.transport import health
from cloud_server.transport.credentials import server_credentials
from cloud_server.transport.door import INFERENCE, MAX_WAITING, SERVICE, Door
from cloud_server.transport.inference_servicer import InferenceServicer
from cloud_server.transport.port import check_free
from cloud_server.transport.servicer import SplitServicer
from shared_hooks.errors import SpecError
from shared_hooks.lifecycle import Stage

log = logging.getLogger(__name__)

SPARE_THREADS = 8
"""For answering health and model lists, and for refusing streams beyond `Limits.max_clients`."""
CALLS_PER_THREAD = 4
"""At a time, before gRPC refuses calls: whatever stays is bounded below the number of threads, so the rest has its turn
in a moment.
"""

CLOSING_SECONDS = 60.0
"""Beyond the drain, until a server that listens no more ends the streams that are left."""


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


class CloudServer:
    """A core on a port. ``address`` is HOST:PORT; after `start`, ``port`` is the real one.

    ``tls``: None = in the clear; ``identities``: the file that says who may; ``reflection``: whether the server
    describes its services to who asks. Raises SpecError.
    """

    def __init__(
        self,
        core: Core,
        address: str,
        tls: Tls | None = None,
        identities: Path | None = None,
        *,
        reflection: bool = False,
        reuse_port: bool = False,
    ) -> None:
        """``reuse_port``: other servers may listen there, too, and a draining one does so no more."""
        self.core = core
        self._reuse_port = reuse_port
        self._ending = threading.Lock()  # taken by the first who stops it, and kept
        # Every stream holds one thread of the pool for as long as it lives.
        limits = core.limits
        # A request of the Open Inference Protocol does so, too, and before its message is there.
        threads = 2 * limits.max_clients + limits.max_probes + limits.max_profiles + MAX_WAITING + SPARE_THREADS
        register = Register(identities, certificates=tls is not None and tls.client_ca is not None)
        self._door = door = Door(core, register)
        self._server = grpc.server(
            futures.ThreadPoolExecutor(threads, thread_name_prefix="isthmus-grpc"),
            options=[
                *options(core.limits.max_message_bytes, threads),
                # Unless it is said, a second server on the same port is a mistake, not a balanced pair.
                ("grpc.so_reuseport", int(reuse_port)),
            ],
            maximum_concurrent_rpcs=CALLS_PER_THREAD * threads,
            interceptors=[door],
        )
        self._health = health.Health(("", SERVICE, INFERENCE))
        self.inference = Inference(core, lambda: self._health.serving)
        InferenceServicer(self.inference, door).add_to(self._server)
        SplitServicer(core, door).add_to(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if reflection:
            enable_server_reflection((SERVICE, health.NAME, REFLECTION), self._server)
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, server_credentials(tls))
        except RuntimeError as error:
            check_free(address, reuse_port)  # says why, if it can
            raise SpecError(f"listen: {address} cannot be used: {error}") from error
        if self.port == 0:
            raise SpecError(f"listen: {address} cannot be used")

    def start(self) -> None:
        self._server.start()
        self._door.open()
        self.serving(True)

    def serving(self, able: bool) -> None:
        """What health says, until the server drains."""
        self._health.set(health.State.SERVING if able else health.State.NOT_SERVING)

    def drain(self) -> None:
        """Accepts nothing new: open streams are notified, new ones are refused, health says NOT_SERVING."""
        self._health.end()
        if self._reuse_port:  # before clients are told: whoever comes back is to find the other server
            self._server.stop(self.core.limits.drain_seconds + CLOSING_SECONDS)
        self.core.drain()

    def stop(self, grace: float | None = None) -> None:
        """Ends the streams and the server; frames under way have ``grace`` seconds. A second call does nothing."""
        if not self._ending.acquire(blocking=False):
            return
        self.core.drained(self.core.wait_idle(0))
        self.core.lifecycle.emit(Stage.BEFORE_SHUTDOWN)
        self.core.dismiss()
        self.core.wait_gone(grace or 0)
        self._server.stop(grace).wait(grace)
        self._door.close()
        self.core.close()
        self.core.lifecycle.emit(Stage.AFTER_SHUTDOWN)
