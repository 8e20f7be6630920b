"""Metrics and traces of the server.

May import core, access, limits. Nothing of it runs unless configured.
"""

from __future__ import annotations

import logging
import re
import socket
import socketserver
import threading
import time
import urllib.parse
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import torch
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from cloud_server.access import Policy
from cloud_server.core import Core
from cloud_server.decoding import REASONS
from cloud_server.limits import Limits
from cloud_server.requests import RequestState
from protos import PROTOCOL_VERSION
from protos.isthmus.v1 import split_pb2
from shared_hooks.compiling import Standing
from shared_hooks.config import why_not
from shared_hooks.errors import IsthmusError, QuotaExceeded, SpecError
from shared_hooks.lifecycle import About, Event, Lifecycle
from shared_hooks.tracing import Tracing, exporting
from shared_hooks.version import __version__

__all__ = [
    "MetricsPage",
    "RequestCounts",
    "counted",
    "measured",
    "traced",
]


# Metrics in Prometheus's text format over HTTP/1.1, on a port of their own. The page is not authenticated, so it is
# on loopback unless another address is given. Its cost is bounded: `MAX_READERS` connections at a time, each with one
# request of at most 64 KiB a line and `SECONDS` for all it sends; further connections are closed.

log = logging.getLogger(__name__)

MAX_READERS: Final = 8
SECONDS: Final = 5.0
PATH: Final = "/metrics"


class MetricsPage:
    """A metrics page on ``address``, HOST:PORT, which is bound at once (or SpecError) and answers from `serve` on. Use
    it as a context manager.
    """

    def __init__(self, address: str, *, reuse_port: bool = False) -> None:
        """``reuse_port``: other processes may share the port."""
        host, _, port = address.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port), reuse_port)
        except OSError as error:
            raise SpecError(f"metrics: {address} cannot be used: {error.strerror or error}") from error
        self.address = f"{host}:{self._server.server_port}"

    def serve(self, registry: CollectorRegistry) -> None:
        """Answer with what ``registry`` collects, in threads, until the end of the block."""
        self._server.registry = registry
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="isthmus-metrics", daemon=True).start()
        log.info("metrics on http://%s%s", self.address, PATH)

    def __enter__(self) -> MetricsPage:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the port."""
        if self._server.registry is not None:
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    registry: CollectorRegistry | None = None

    def __init__(self, host: str, port: int, reuse_port: bool) -> None:
        self._reuse_port = reuse_port
        self._places = threading.BoundedSemaphore(MAX_READERS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """As the base class, without resolving the host's name, which may block."""
        if self._reuse_port:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.socket.getsockname()[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # the thread could not be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A socket's own timeout starts again with every byte; a client that sends a byte a second is closed by this
        # timer.
        clock = threading.Timer(SECONDS, _close, [request])
        clock.daemon = True
        clock.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            clock.cancel()
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a reader of the metrics", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.0"  # one request per connection
    server_version, sys_version = "isthmus", ""

    def do_GET(self) -> None:
        if why := why_not(self.headers.get("Host"), self.connection.getsockname()[0], self.headers.get("Origin"), ""):
            self.send_error(HTTPStatus.FORBIDDEN, explain=why)
            return
        if urllib.parse.urlsplit(self.path).path != PATH:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        assert self.server.registry is not None
        encode, kind = choose_encoder(self.headers.get("Accept", ""))
        body = encode(self.server.registry)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Does nothing: scrapes are not logged."""


def _close(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


# OpenTelemetry traces of a server's requests: spans that continue the client's trace. The trace context of a client
# is accepted if well-formed; otherwise the request begins a trace of its own. As with every service that propagates
# traces, a client can join its requests to any trace whose id it knows and decide whether it is sampled; it sees
# nothing of what is exported.

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span


class ServerTraces:
    """Hooks of a server's `Lifecycle` that record traces. Thread-safe."""

    name = "traces"
    built_in = True
    priority = "LOWEST"

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracing = Tracing(provider)
        self._open: dict[int, Span] = {}
        """By the request's number in this process."""

    def before_request(self, event: Event) -> None:
        """Begin a span, which is the parent of those at a next server."""
        about = event.request
        assert about is not None
        span = self._open[about.index] = self._begin(event)
        self._tracing.put(span, about.carrier)

    def after_request(self, event: Event) -> None:
        """End the span of a request that was answered, failed or cancelled."""
        about, reply = event.request, event.reply
        assert about is not None
        span = self._open.pop(about.index, None) or self._begin(event)  # another hook has refused it
        if event.error is None and reply is not None:
            self._tracing.end(span, rows(reply.durations), event.began_ns, bytes_down=reply.payload_bytes)
        else:
            self._tracing.fail(span, event.error)

    def _begin(self, event: Event) -> Span:
        about = event.request
        assert about is not None
        span = self._tracing.begin("serve", "SERVER", event.began_ns, about, self._tracing.taken(about.carrier))
        span.set_attribute("isthmus.cut", event.split)
        return span

    def on_error(self, event: Event) -> None:
        """Record a request that was not accepted, which has no end."""
        about = event.request
        if about is not None and about.index < 0:
            now = time.perf_counter_ns()
            span = self._tracing.begin("serve", "SERVER", now, about, self._tracing.taken(about.carrier))
            self._tracing.fail(span, event.error)


def rows(took: split_pb2.Durations) -> list[tuple[str, int]]:
    """(name, ns) of the durations in order."""
    return [
        ("receive", took.receive_ns),
        ("queue", took.queue_ns),
        ("decode", took.decode_ns),
        ("inject", took.inject_ns),
        ("compute", took.compute_ns),
        ("encode", took.encode_ns),
        ("wait for the next server", took.onward_ns),
    ]


# The telemetry of one server, enabled for as long as it serves.

# Counts requests and their times: a lifecycle hook called where they end.
#
# Names follow Triton's inference server (``nv_inference_request_success``), units and suffixes Prometheus's rules
# (https://prometheus.io/docs/practices/naming/). No label has a value that a client chose: models are those that are
# served, errors those of our own tree, bounds those of `cloud_server.limits` and of policies, identities those
# authenticated by credentials, and of these the first `MAX_IDENTITIES`.

# Histograms of durations and sizes: prometheus_client's own takes ten times as long per observation.

BUCKETS: Final = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
"""Seconds: three per decade, from 0.1 ms to 100 s."""
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of requests that were computed together."""


class ScaledHistogram:
    """A histogram of integers, ``scale`` of which are one unit of ``bounds``. Not thread-safe."""

    __slots__ = ("_bounds", "_counts", "_names", "_scale", "_sum")

    def __init__(self, bounds: Sequence[float] = BUCKETS, scale: float = 1e9) -> None:
        """The defaults are for nanoseconds, in buckets of seconds."""
        self._bounds = tuple(round(bound * scale) for bound in bounds)
        self._names = (*map(str, bounds), "+Inf")
        self._counts = [0] * len(self._names)
        self._scale = scale
        self._sum = 0

    def add(self, units: int) -> None:
        self._counts[bisect_left(self._bounds, units)] += 1
        self._sum += units

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, cumulative count), as in Prometheus."""
        return list(zip(self._names, accumulate(self._counts), strict=True))

    @property
    def total(self) -> float:
        """The sum of all values."""
        return self._sum / self._scale


MAX_IDENTITIES: Final = 64
"""Identities with lines of their own; the others share one."""
OTHERS: Final = "others"
UNKNOWN: Final = "unknown"

DURATIONS: Final = {
    "request": "First byte of a request to its answer.",
    "receive": "First byte of a request received to the last.",
    "queue": "Last byte received to the start of work: the wait for a worker.",
    "decode": "Bytes to tensors, or reading an input file.",
    "inject": "Placing the frontier: the model's own code, replayed up to the cut.",
    "compute": "The tail of the model.",
    "encode": "The output to bytes.",
}
_STATUS: Final = {number: name.lower() for name, number in split_pb2.Reading.Status.items()}
_LIMITS: Final = sorted({one.name for of in (Limits, Policy) for one in fields(of)})
_BOUND: Final = re.compile(rf"\b(?:{'|'.join(_LIMITS)})\b")


def bound(error: BaseException) -> str:
    """Return the limit that a refusal names; empty if none."""
    if isinstance(error, QuotaExceeded):
        return "per_minute"
    found = _BOUND.search(str(error)) if isinstance(error, IsthmusError) else None
    return found[0] if found else ""


@dataclass(eq=False, slots=True)
class _Account:
    """What one identity did with one model."""

    model: str
    identity: str
    success: int = 0
    received: int = 0
    sent: int = 0
    work_ns: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class RequestCounts(Collector):
    """Counts requests; mounted on a server's `Lifecycle`, and registered for collection. Thread-safe."""

    name = "metrics"
    built_in = True
    priority = "LOWEST"

    def __init__(self, models: Collection[str]) -> None:
        """``models``: the served models, a live collection."""
        self._lock = threading.Lock()
        self._models = models
        self._times = {model: [ScaledHistogram() for _ in DURATIONS] for model in (*models, UNKNOWN)}
        self._sizes = {model: ScaledHistogram(SIZES, 1) for model in self._times}
        self._accounts: dict[tuple[str, str], _Account] = {}
        self._identities: set[str] = set()
        self._refusals: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self._joules: defaultdict[tuple[str, str], float] = defaultdict(float)
        for model in models:  # a series of zeros is more informative than none
            self._account(About(0, 0, model_id=model))

    # Stages

    def after_request(self, event: Event) -> None:
        """Count a request that was answered, failed or cancelled."""
        reply: split_pb2.ReplyHeader | None = event.reply
        with self._lock:
            account = self._account(event.request)
            account.received += event.nbytes
            if event.error is not None or reply is None:
                account.failures[type(event.error).__name__] += 1
                return
            account.success += 1
            took = reply.durations
            work = took.decode_ns, took.inject_ns, took.compute_ns, took.encode_ns
            account.work_ns += sum(work)
            durations = time.perf_counter_ns() - event.began_ns, took.receive_ns, took.queue_ns, *work
            for histogram, ns in zip(self._times[account.model], durations, strict=True):
                histogram.add(ns)
            self._sizes[account.model].add(max(1, reply.batch_size))
            if reply.forward.energy:
                joules = reply.readings[reply.forward.energy - 1]
                if joules.HasField("value"):
                    self._joules[account.model, _STATUS[joules.status]] += max(0.0, joules.value)

    def after_send(self, event: Event) -> None:
        """Count an answer that gRPC has taken completely."""
        with self._lock:
            self._account(event.request).sent += event.nbytes

    def on_error(self, event: Event) -> None:
        """Count a failed request, stream or call."""
        met = bound(event.error)
        with self._lock:
            if met:
                self._refusals[met] += 1
            if event.request is None:
                self._streams[type(event.error).__name__] += 1
            elif event.request.index < 0:  # it was not admitted, so it does not end either
                self._account(event.request).failures[type(event.error).__name__] += 1

    def _account(self, about: About | None) -> _Account:
        """Return the counts of a caller. The caller of this holds the lock."""
        model, identity = ("", "") if about is None else (about.model_id, about.identity)
        known = self._accounts.get((model, identity))
        if known is not None:
            return known
        if identity and identity not in self._identities:
            if len(self._identities) < MAX_IDENTITIES:
                self._identities.add(identity)
            else:
                identity = OTHERS
        if model not in self._times and model in self._models:  # loaded since
            self._times[model] = [ScaledHistogram() for _ in DURATIONS]
            self._sizes[model] = ScaledHistogram(SIZES, 1)
        key = (model if model in self._times else UNKNOWN, identity)
        return self._accounts.setdefault(key, _Account(*key))

    # Collectors

    def describe(self) -> list[Metric]:
        """Empty: metrics are not announced in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            return iter([*self._of_accounts(), *self._of_errors(), *self._of_times()])

    def _of_accounts(self) -> Iterator[Metric]:
        figures: tuple[tuple[str, str, Callable[[_Account], float]], ...] = (
            ("success", "Requests answered with a result.", lambda one: one.success),
            ("received_bytes", "Payload bytes received.", lambda one: one.received),
            ("sent_bytes", "Payload bytes of answers sent.", lambda one: one.sent),
            ("work_seconds", "Decode, inject, compute and encode together.", lambda one: one.work_ns / 1e9),
        )
        for name, text, value in figures:
            family = CounterMetricFamily(f"isthmus_request_{name}", text, labels=("model", "identity"))
            for one in self._accounts.values():
                family.add_metric((one.model, one.identity), value(one))
            yield family
        failure = CounterMetricFamily(
            "isthmus_request_failure", "Requests that ended otherwise.", labels=("model", "identity", "reason")
        )
        for one in self._accounts.values():
            for reason, count in one.failures.items():
                failure.add_metric((one.model, one.identity, reason), count)
        yield failure

    def _of_errors(self) -> Iterator[Metric]:
        figures: tuple[tuple[str, str, tuple[str, ...], Mapping[Any, float]], ...] = (
            ("refusals", "Requests, streams and calls refused, by the limit they met.", ("bound",), self._refusals),
            ("stream_failure", "Streams and calls that ended with an error.", ("reason",), self._streams),
            ("energy_joules", "Energy of tails, by how it was read.", ("model", "status"), self._joules),
        )
        for name, text, labels, counts in figures:
            family = CounterMetricFamily(f"isthmus_{name}", text, labels=labels)
            for key, count in counts.items():
                family.add_metric(key if isinstance(key, tuple) else (key,), count)
            yield family

    def _of_times(self) -> Iterator[Metric]:
        for number, (name, text) in enumerate(DURATIONS.items()):
            family = HistogramMetricFamily(f"isthmus_{name}_duration_seconds", text, labels=("model",))
            for model, times in self._times.items():
                if model != UNKNOWN:
                    family.add_metric((model,), times[number].buckets(), times[number].total)
            yield family
        family = HistogramMetricFamily(
            "isthmus_batch_size", "Requests or steps that were computed as one with an answered one.", labels=("model",)
        )
        for model, sizes in self._sizes.items():
            if model != UNKNOWN:
                family.add_metric((model,), sizes.buckets(), sizes.total)
        yield family


# The state of the server: read when the page is fetched, so that requests pay nothing for it.

LIVE = (RequestState.RECEIVING, RequestState.QUEUED, RequestState.RUNNING)
TOTALS = {
    "worker_restarts": "Worker processes that ended unexpectedly, and were replaced.",
    "log_lines_left_out": "Lines that clients would have caused in the log, beyond what they may.",
}


class ServerState(Collector):
    """The metrics of one core."""

    def __init__(self, core: Core, totals: Mapping[str, Callable[[], int]] | None = None) -> None:
        """``totals``: counts kept elsewhere, among `TOTALS`."""
        self._core = core
        self._totals = totals or {}

    def describe(self) -> list[Metric]:
        """Empty: metrics are not announced in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        core = self._core
        states, (answers, answer_bytes), load = core.requests.states(), core.requests.kept(), core.load()
        flight = GaugeMetricFamily("isthmus_requests_in_flight", "Requests on their way, by state.", labels=["state"])
        for state in LIVE:
            flight.add_metric([state.value], states[state])
        yield flight
        for name, text, value in (
            ("queue_depth", "Requests that wait for a worker.", states[RequestState.QUEUED]),
            ("queue_recent_seconds", "Recent mean wait for a worker, as reported to clients.", load.queue_ns / 1e9),
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
        """Metrics of models that come and go."""
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
    """Send requests' traces to a collector during the block, if one is configured (`exporting`)."""
    export = exporting("isthmus-cloud", endpoint)
    if export is None:
        yield
        return
    traces = ServerTraces(export.provider)
    lifecycle.register(traces)
    try:
        yield
    finally:
        lifecycle.remove(traces)
        export.close()


@contextmanager
def counted(core: Core, totals: Mapping[str, Callable[[], int]]) -> Iterator[CollectorRegistry]:
    """Collect the core's metrics, and ``totals``, during the block."""
    registry = CollectorRegistry()  # a registry of its own: it does not publish what else the process counts
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
    """Serve the metrics of `counted` on ``page``; does nothing for None."""
    if page is None:
        yield
        return
    with counted(core, totals) as registry:
        page.serve(registry)
        yield
