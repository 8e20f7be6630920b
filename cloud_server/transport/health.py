"""The standard health service (https://grpc.io/docs/guides/health-checking/).

grpcio-health-checking's own keeps every name that a stranger watches, and waits for the messages of all who watch in
one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

State = health_pb2.HealthCheckResponse

NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc, unused-ignore]
    """The health of ``services``, which are all that there are. Any thread may call."""

    def __init__(self, services: Iterable[str]) -> None:
        self._changed = threading.Condition()
        self._services = frozenset(services)
        self._state: int = State.SERVING
        self._over = False

    def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> State:
        if request.service not in self._services:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            return State()
        return State(status=self._state)

    def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext) -> Iterator[State]:
        """What it is, and whatever it becomes, until the client leaves."""
        known = request.service in self._services
        if not context.add_callback(self._wake):
            return
        said = None
        while context.is_active():
            now = self._state if known else State.SERVICE_UNKNOWN
            if now != said:
                said = now
                yield State(status=now)
            with self._changed:
                self._changed.wait_for(lambda: not context.is_active() or (known and self._state != said))  # noqa: B023

    @property
    def serving(self) -> bool:
        """Whether that is what is said."""
        return self._state == State.SERVING

    def set(self, state: int) -> None:
        """What is said of every service from now on; after `end`, nothing is changed."""
        with self._changed:
            if not self._over:
                self._state = state
                self._changed.notify_all()

    def end(self) -> None:
        """NOT_SERVING, for good."""
        self.set(State.NOT_SERVING)
        self._over = True

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
