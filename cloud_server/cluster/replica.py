"""One replica of a model: a core behind a private port, for fronts only; and how many replicas there should be.

Can be imported without Ray; `cluster.application` passes it to Ray Serve.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from cloud_server.arguments import is_loopback
from cloud_server.cluster import front, passport
from cloud_server.cluster.passport import Passports
from cloud_server.config import ServerConfig
from cloud_server.core import Core
from cloud_server.models import Engine
from cloud_server.telemetry import counted, traced
from cloud_server.transport import CloudServer
from shared_hooks.lifecycle import Stage

log = logging.getLogger(__name__)

GRACE_SECONDS = 2.0
"""How long clients may take to fetch the last answers and leave."""
PENDING = "pending"
"""The figure that replicas report: the number of requests in progress."""


def by_pending(context: Any) -> tuple[int, dict[str, Any]]:
    """Return a scaling policy for Ray Serve (``ray.serve.config.AutoscalingContext``), which applies its own delays and
    limits.

    Its ``target_ongoing_requests`` is `Scale.target_pending`. Nothing changes until a replica has reported.
    """
    figures = (context.aggregated_metrics or {}).get(PENDING) or {}
    if not figures:
        return context.target_num_replicas, {}
    return max(1, math.ceil(sum(figures.values()) / context.config.target_ongoing_requests)), {}


class Replica:
    """Serves ``engines`` at a free port of ``host``. ``name``: unique for all time."""

    def __init__(self, name: str, engines: Iterable[Engine], config: ServerConfig, host: str) -> None:
        self._name = name
        self._drain_seconds = config.limits.drain_seconds
        self._secret = secrets.token_urlsafe(32)
        self._stack = ExitStack()
        stack, lifecycle = self._stack, config.lifecycle
        stack.enter_context(traced(lifecycle, config.tracing))
        self.core = stack.enter_context(Core(engines, config.limits, config.workers, config.observers, lifecycle))
        self._registry = stack.enter_context(counted(self.core, {}))
        self._certificate, tls = "", None
        if not is_loopback(host):
            folder = stack.enter_context(passport.private_folder())
            tls = passport.make(folder)
            self._certificate = tls.certificate.read_text()
        self._server = CloudServer(self.core, f"{host}:0", tls, register=Passports(self._secret))
        self._address = f"{host}:{self._server.port}"
        lifecycle.emit(Stage.BEFORE_RUN, address=self._address)
        self._server.start()

    def place(self, with_metrics: bool = False) -> Mapping[str, Any]:
        """`census.ReplicaPlace` as plain values, with the secret by which a front may call here for any account."""
        return {
            "replica": self._name,
            "address": self._address,
            "secret": self._secret,
            "certificate": self._certificate,
            "models": [(one.model_id, one.weights_hash) for one in self.core.identities],
            "metrics": front.text(self._registry) if with_metrics else "",
        }

    def pending(self) -> int:
        """Return the number of requests in progress."""
        return self.core.load().pending

    def drain(self) -> bool:
        """Ask every client to leave, answer what is in progress, and close the port. Idempotent.

        Returns False if requests were left after the drain time.
        """
        self._server.drain()
        drained = self.core.wait_idle(self._drain_seconds)
        # Clients leave when they have fetched their answers; an idle client leaves when its stream ends.
        if drained:
            self.core.wait_gone(GRACE_SECONDS)
        self.core.drained(drained)
        began = time.monotonic()
        self._server.stop(GRACE_SECONDS if drained else 0)
        self._stack.close()
        log.info("%s drained, closed in %.1f s", self._name, time.monotonic() - began)
        return drained
