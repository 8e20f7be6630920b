"""What is seen of one server, switched on for as long as it serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from cloud_server.core import Core
from cloud_server.decoding import REASONS
from cloud_server.requests import State
from cloud_server.telemetry.counts import RequestCounts
from cloud_server.telemetry.page import MetricsPage
from cloud_server.telemetry.traces import Traces
from protos import PROTOCOL_VERSION
from shared_hooks.compiling import Standing
from shared_hooks.lifecycle import Lifecycle
from shared_hooks.tracing import exporting
from shared_hooks.version import __version__

# How the server stands: read when somebody asks, so that requests pay nothing for it.

LIVE = (State.RECEIVING, State.QUEUED, State.RUNNING)
TOTALS = {
    "worker_restarts": "Worker processes that ended without being told to, and were replaced.",
    "log_lines_left_out": "Lines that clients would have caused in the log, beyond what they may.",
}


class ServerState(Collector):
    """Of one core."""

    def __init__(self, core: Core, totals: Mapping[str, Callable[[], int]] | None = None) -> None:
        """``totals``: counts that others keep, some of `TOTALS`."""
        self._core = core
        self._totals = totals or {}

    def describe(self) -> list[Metric]:
        """None: what is collected depends on nothing but the core, and the registry needs no names before."""
        return []

    def collect(self) -> Iterator[Metric]:
        core = self._core
        states, (answers, answer_bytes), load = core.requests.states(), core.requests.kept(), core.load()
        flight = GaugeMetricFamily("isthmus_requests_in_flight", "Requests on their way, by state.", labels=["state"])
        for state in LIVE:
            flight.add_metric([state.value], states[state])
        yield flight
        for name, text, value in (
            ("queue_depth", "Requests that wait for a worker.", states[State.QUEUED]),
            ("queue_recent_seconds", "Recent mean wait for a worker, as clients are told.", load.queue_ns / 1e9),
            ("requests_held_bytes", "Payloads and headers of requests on their way.", core.requests.held_bytes),
            ("answers_kept", "Answers that clients have not acknowledged.", answers),
            ("answers_kept_bytes", "Their payload bytes.", answer_bytes),
            ("sessions", "Standing streams.", core.clients),
            ("decoding_sessions", "Decoding sessions that are open.", len(core.decoding)),
            ("decoding_held_bytes", "Memory that they hold.", core.decoding.nbytes),
            ("workers", "Tails computed at a time, at most.", load.workers),
            ("draining", "1 while the server takes nothing new.", core.draining),
        ):
            yield GaugeMetricFamily(f"isthmus_{name}", text, value=float(value))
        steps = "Steps of decoding sessions that were computed."
        yield CounterMetricFamily("isthmus_decoding_steps", steps, value=core.decoding.steps)
        text = "Decoding sessions that had to go: for room, idle, or lost where they were."
        dropped = CounterMetricFamily("isthmus_decoding_dropped", text, labels=["reason"])
        for reason in REASONS:
            dropped.add_metric([reason], core.decoding.dropped[reason])
        yield dropped
        for name, total in self._totals.items():
            yield CounterMetricFamily(f"isthmus_{name}", TOTALS[name], value=total())
        models = GaugeMetricFamily("isthmus_model_info", "The served models.", labels=["model", "weights_hash"])
        for one in core.identities:
            models.add_metric([one.model_id, one.weights_hash], 1)
        yield models
        yield from self._fleet()
        about = {"version": __version__, "torch": torch.__version__, "protocol": str(PROTOCOL_VERSION)}
        yield InfoMetricFamily("isthmus_server", "Versions.", value=about)

    def _fleet(self) -> Iterator[Metric]:
        """Models that come and go."""
        fleet = self._core.fleet
        text = "Weights of models in memory."
        held = GaugeMetricFamily("isthmus_model_resident_bytes", text, labels=["model", "device"])
        for name, version in {} if fleet is None else dict(fleet.items()).items():
            for device, nbytes in version.nbytes.items():
                held.add_metric([name, device], nbytes if version.is_resident else 0)
        yield held
        text = "Tails that are compiled, by how they stand: compiling, checking, used, refused."
        tails = GaugeMetricFamily("isthmus_compiled_tails", text, labels=["model", "standing"])
        for name, version in {} if fleet is None else dict(fleet.items()).items():
            found = Counter(version.compiled)
            for standing in Standing:  # zeros, too: a series that appears with its first event has no increase
                tails.add_metric([name, standing.value], found[standing.value])
        yield tails
        text = "Batches of which one part was computed alone, too, since the weights came."
        checks = GaugeMetricFamily("isthmus_batch_spot_checks", text, labels=["model"])
        text = "Copies of a model that make no batches any more: a part was other than alone."
        ended = GaugeMetricFamily("isthmus_batching_ended", text, labels=["model"])
        for name, version in {} if fleet is None else dict(fleet.items()).items():
            for family, count in zip((checks, ended), version.spot_checks, strict=True):
                family.add_metric([name], count)
        yield checks
        yield ended
        loads = CounterMetricFamily("isthmus_model_loads", "How often models were loaded.", labels=["model"])
        text = "How often models gave way to others (max_model_bytes)."
        gone = CounterMetricFamily("isthmus_model_evictions", text, labels=["model"])
        if fleet is not None:
            for name in dict.fromkeys([*fleet, *fleet.loads]):
                loads.add_metric([name], fleet.loads[name])
                gone.add_metric([name], fleet.evictions[name])
        yield loads
        yield gone


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
