"""The process that clients connect to: it handles TLS, access, health and metrics, and passes every call on.

It loads no model. There may be several, on one machine (they share the port) or on many.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from cloud_server.cluster.census import Census, ReplicaFinder
from cloud_server.cluster.passport import Uncounted
from cloud_server.cluster.relay import InferenceRelay, ProxiedCalls, Relay
from cloud_server.config import ServerConfig
from cloud_server.inference import HeldBytes
from cloud_server.telemetry import MetricsPage, RequestCounts
from cloud_server.transport import INFERENCE, MAX_WAITING, SERVICE, AuthInterceptor, GrpcListener
from shared_hooks.errors import ServerUnavailable, SpecError, logged
from shared_hooks.lifecycle import Lifecycle

# The replicas' metrics on one page: each line labelled with its replica, beside the fronts' own.


LABEL = "replica"


class MergedMetrics(Collector):
    """Merges metrics. ``sources``: returns (name, metrics in Prometheus's text format) of each source, now."""

    def __init__(self, sources: Callable[[], Iterable[tuple[str, str]]]) -> None:
        self._sources = sources

    def describe(self) -> list[Metric]:
        """Empty: metrics are not announced in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._sources():
            for family in text_string_to_metric_families(text):
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [_labelled(sample, replica) for sample in family.samples]
        yield from families.values()


def _labelled(sample: Sample, replica: str) -> Sample:
    return sample._replace(labels={**sample.labels, LABEL: replica})


def text(registry: CollectorRegistry) -> str:
    """Return what the registry collects now."""
    return generate_latest(registry).decode()


# Closes a port of Ray Serve's that is not used here: each of its replicas listens on every address for gRPC calls
# between deployments, and unpickles the message before it authenticates it, Ray's token included (seen with 2.60: a
# file opened by a stranger's message). Calls between our deployments use another channel.


NAME = "add_port_to_grpc_server"
"""The function that Ray Serve's replica calls to listen; private, because there is no setting."""


def close() -> None:
    """Close Ray's own port in a replica's process, while it is created. Raises SpecError for an incompatible Ray.

    With RAY_USE_TLS the port requires a certificate of the cluster's, and stays.
    """
    from ray.serve._private import replica

    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    if not callable(getattr(replica, NAME, None)):
        import ray

        raise SpecError(
            f"Ray {ray.__version__}: its replicas accept connections from any client, in a way that is not known here "
            "and cannot be closed: take Ray 2.60, or set RAY_USE_TLS=1 with certificates for the cluster"
        )
    setattr(replica, NAME, _nowhere)


def _nowhere(server: Any, address: str) -> int:
    """As Ray's function, which returns a port number; there is none."""
    return 0


log = logging.getLogger(__name__)

SPARE_THREADS = 16
MOST_PLACES = 4096
CLOSE_SECONDS = 1.0
"""How long remaining calls have at the end."""
SWEEP_SECONDS = 0.5


class Front:
    """The front of one application. Use it as a context manager. Raises SpecError."""

    def __init__(self, config: ServerConfig, finder: ReplicaFinder) -> None:
        self.lifecycle: Lifecycle = config.lifecycle
        self.limits = config.limits
        self._draining = False
        self._closed = threading.Event()
        self._stack = ExitStack()
        page = self._stack.enter_context(MetricsPage(config.metrics, reuse_port=True)) if config.metrics else None
        self.metrics = page.address if page else ""
        """HOST:PORT of the metrics; empty: none."""
        tls = config.tls
        self._auth = AuthInterceptor(
            self, Uncounted(config, certificates=tls is not None and tls.client_ca is not None)
        )
        limits = self.limits
        replicas = config.scale.max_replicas * max(1, len(config.models))
        places = min(MOST_PLACES, replicas * (limits.max_clients + limits.max_probes + limits.max_profiles))
        self._listener = GrpcListener(
            config.listen,
            self._auth,
            (SERVICE, INFERENCE),
            # A client that has a place, greets, or sends a request in one message holds a thread; so do
            # `MAX_WAITING`.
            places + 2 * limits.max_clients + MAX_WAITING + SPARE_THREADS,
            limits.max_message_bytes,
            tls,
            reflection=config.reflection,
            reuse_port=True,
        )
        self.address = f"{config.listen.rpartition(':')[0]}:{self._listener.port}"
        self._census = Census(finder, self._looked)
        self._calls = ProxiedCalls(finder, places, limits.idle_seconds)
        self._relay = Relay(finder, self._census, self._auth, limits, self._calls)
        self._relay.add_to(self._listener.server)
        self._held, health = HeldBytes(limits.max_inference_bytes), self._listener.health
        InferenceRelay(self._relay, self._census, self._auth, self._held, lambda: health.serving).add_to(
            self._listener.server
        )
        if page is not None:
            self._count(page)

    def start(self) -> None:
        """Start serving. Raises the error of the first check of the replicas."""
        self._census.look()
        self._listener.start()
        self._census.start()
        threading.Thread(target=self._sweep, name="isthmus-front-sweeper", daemon=True).start()

    def __enter__(self) -> Front:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Called by the interceptor

    def check_open(self) -> None:
        """Raise ServerUnavailable while draining."""
        if self._draining:
            raise ServerUnavailable("this front is draining: connect again")

    # Shutdown

    def drain(self) -> None:
        """Stop listening, ask every client to leave, and wait until nothing is in progress, at most the drain time."""
        if self._draining:
            return
        self._draining = True
        self._listener.unwell()
        limit = time.monotonic() + self.limits.drain_seconds
        self._listener.server.stop(self.limits.drain_seconds + CLOSE_SECONDS)
        self._calls.notify_all_calls()
        while self._calls.under_way() and time.monotonic() < limit:
            time.sleep(0.05)
            self._calls.notify_all_calls()  # including those about to greet

    def close(self) -> None:
        """End the remaining calls."""
        self._draining = True
        self._closed.set()
        self._census.close()
        self._calls.end_all(ServerUnavailable("the front goes away"))
        self._listener.close(CLOSE_SECONDS)
        self._stack.close()

    # Threads

    def _looked(self, able: bool, moved: bool) -> None:
        self._listener.serving(able)
        if moved:
            log.info("replicas have come or gone")
        self._calls.rebalance(moved=moved)

    def _sweep(self) -> None:
        while not self._closed.wait(SWEEP_SECONDS):
            with logged(log, "ending what is late"):
                self._relay.sweep()

    def _count(self, page: MetricsPage) -> None:
        own = CollectorRegistry()
        counts = RequestCounts(())
        own.register(counts)
        ProcessCollector(registry=own)
        self.lifecycle.register(counts)
        self._stack.callback(self.lifecycle.remove, counts)

        def sources_of_metrics() -> Iterator[tuple[str, str]]:
            yield f"front-{os.getpid()}", text(own)
            yield from self._census.metrics()

        registry = CollectorRegistry()
        registry.register(MergedMetrics(sources_of_metrics))
        page.serve(registry)
