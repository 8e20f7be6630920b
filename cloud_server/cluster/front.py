"""The process that clients connect to: TLS, who may, health and metrics are here, and every call is handed on.

It loads no model. There may be several of them, on one machine (they share the port) or on many.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from cloud_server.access import Register
from cloud_server.cluster import metrics
from cloud_server.cluster.census import Census, Finder
from cloud_server.cluster.inference_relay import InferenceRelay
from cloud_server.cluster.relay import Relay
from cloud_server.config import ServerConfig
from cloud_server.telemetry import MetricsPage, RequestCounts
from cloud_server.transport import INFERENCE, MAX_WAITING, SERVICE, Door, Listener
from shared_hooks.errors import ServerUnavailable
from shared_hooks.lifecycle import Lifecycle

log = logging.getLogger(__name__)

SPARE_THREADS = 16
MOST_THREADS = 4096
TELL_SECONDS = 3.0
"""For a client to hear, with the next frame it gets, that it is to go: heartbeats come every second."""
SWEEP_SECONDS = 0.5


class Front:
    """Of one application. Use as a context manager. Raises SpecError."""

    def __init__(self, config: ServerConfig, finder: Finder) -> None:
        self.lifecycle: Lifecycle = config.lifecycle
        self.limits = config.limits
        self._draining = False
        self._closed = threading.Event()
        self._stack = ExitStack()
        page = self._stack.enter_context(MetricsPage(config.metrics, reuse_port=True)) if config.metrics else None
        self.metrics = page.address if page else ""
        """HOST:PORT of the metrics; empty = none."""
        tls = config.tls
        self._door = Door(self, Register(config.identities, certificates=tls is not None and tls.client_ca is not None))
        limits = self.limits
        replicas = config.scale.max_replicas * max(1, len(config.models))
        each = limits.max_clients + limits.max_probes + limits.max_profiles
        self._listener = Listener(
            config.listen,
            self._door,
            (SERVICE, INFERENCE),
            min(MOST_THREADS, each * replicas + MAX_WAITING + SPARE_THREADS),
            limits.max_message_bytes,
            tls,
            reflection=config.reflection,
            reuse_port=True,
        )
        self.address = f"{config.listen.rpartition(':')[0]}:{self._listener.port}"
        self._census = Census(finder, self._moved, self._able)
        self._relay = Relay(finder, self._census, self._door, limits)
        self._relay.add_to(self._listener.server)
        health = self._listener.health
        InferenceRelay(self._relay, finder, self._census, self._door, lambda: health.serving).add_to(
            self._listener.server
        )
        if page is not None:
            self._count(page)

    def start(self) -> None:
        """Serves. Raises what the first look at the replicas raises."""
        self._census.look()
        self._listener.start()
        self._census.start()
        threading.Thread(target=self._sweep, name="isthmus-front-sweeper", daemon=True).start()

    def __enter__(self) -> Front:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the door asks

    def check_open(self) -> None:
        """Raises ServerUnavailable while draining."""
        if self._draining:
            raise ServerUnavailable("this front is draining: connect again")

    # The end

    def drain(self) -> None:
        """Listens no more, tells every client to go and waits until all are gone, at most the drain's seconds."""
        if self._draining:
            return
        self._draining = True
        self._listener.unwell()
        limit = time.monotonic() + self.limits.drain_seconds
        self._listener.server.stop(self.limits.drain_seconds + TELL_SECONDS)
        told = time.monotonic() + TELL_SECONDS
        while self._relay.tell_all() and time.monotonic() < min(limit, told):
            time.sleep(0.05)
        # Who is left has nothing under way, or waits for an answer: that comes first.
        while self._relay.under_way() and time.monotonic() < limit:
            time.sleep(0.05)

    def close(self) -> None:
        """Ends what is left."""
        self._draining = True
        self._closed.set()
        self._census.close()
        self._relay.end_all(ServerUnavailable("the front goes away"))
        self._listener.close(1.0)
        self._stack.close()

    # Threads

    def _moved(self) -> None:
        log.info("replicas have come or gone")
        self._relay.rebalance()

    def _able(self, able: bool) -> None:
        self._listener.serving(able)

    def _sweep(self) -> None:
        while not self._closed.wait(SWEEP_SECONDS):
            self._relay.sweep()

    def _count(self, page: MetricsPage) -> None:
        own = CollectorRegistry()
        counts = RequestCounts(())
        own.register(counts)
        ProcessCollector(registry=own)
        self.lifecycle.register(counts)
        self._stack.callback(self.lifecycle.remove, counts)

        def everybody() -> Iterator[tuple[str, str]]:
            yield f"front-{os.getpid()}", metrics.text(own)
            yield from self._census.metrics()

        registry = CollectorRegistry()
        registry.register(metrics.Together(everybody))
        page.serve(registry)
