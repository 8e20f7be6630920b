"""What is seen of one server, switched on for as long as it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from cloud_server.core import Core
from cloud_server.telemetry.counts import RequestCounts
from cloud_server.telemetry.page import MetricsPage
from cloud_server.telemetry.state import ServerState
from cloud_server.telemetry.traces import Traces
from shared_hooks.lifecycle import Lifecycle
from shared_hooks.tracing import exporting


@contextmanager
def traced(lifecycle: Lifecycle, endpoint: str) -> Iterator[None]:
    """Requests' traces to a collector during the block, if there is one (`exporting`)."""
    export = exporting("isthmus-cloud", endpoint)
    if export is None:
        yield
        return
    traces = Traces(export.provider)
    lifecycle.register(traces)
    try:
        yield
    finally:
        lifecycle.remove(traces)
        export.close()


@contextmanager
def counted(core: Core, totals: Mapping[str, Callable[[], int]]) -> Iterator[CollectorRegistry]:
    """The core's metrics during the block, and of what is beside it (`state.TOTALS`)."""
    registry = CollectorRegistry()  # of its own: what else the process counts is nobody's business here
    counts = RequestCounts(core.engines)
    registry.register(counts)
    registry.register(ServerState(core, totals))
    ProcessCollector(registry=registry)
    core.lifecycle.register(counts)
    try:
        yield registry
    finally:
        core.lifecycle.remove(counts)


@contextmanager
def measured(core: Core, page: MetricsPage | None, totals: Mapping[str, Callable[[], int]]) -> Iterator[None]:
    """What `counted` counts, on ``page``; nothing for None."""
    if page is None:
        yield
        return
    with counted(core, totals) as registry:
        page.serve(registry)
        yield
