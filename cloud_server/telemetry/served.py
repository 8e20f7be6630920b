"""What is seen of one server, switched on for as long as it serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from cloud_server.core import Core
from cloud_server.telemetry.counts import RequestCounts
from cloud_server.telemetry.page import MetricsPage
from cloud_server.telemetry.state import ServerState


@contextmanager
def measured(core: Core, page: MetricsPage | None) -> Iterator[None]:
    """The core's metrics on ``page`` during the block; nothing for None."""
    if page is None:
        yield
        return
    registry = CollectorRegistry()  # of its own: what else the process counts is nobody's business here
    counts = RequestCounts(core.engines)
    registry.register(counts)
    registry.register(ServerState(core))
    ProcessCollector(registry=registry)
    core.lifecycle.register(counts)
    page.serve(registry)
    try:
        yield
    finally:
        core.lifecycle.remove(counts)
