"""Make spans from a request's durations when it has ended; nothing is measured for them while it runs."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from shared_hooks.config import Table
from shared_hooks.errors import Cancelled, SpecError
from shared_hooks.lifecycle import About

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider as SdkProvider
    from opentelemetry.trace import Span, SpanKind, TracerProvider


# Where spans go: to a collector, by OTLP over gRPC.
#
# It is switched on by OpenTelemetry's own variables (https://opentelemetry.io/docs/specs/otel/protocol/exporter/),
# ``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``, or by a TOML table:
#
# [tracing] endpoint = "http://127.0.0.1:4317" # https:// with TLS


log = logging.getLogger(__name__)

VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORT_SECONDS: Final = 5.0
"""Timeout of one batch, unless ``OTEL_EXPORTER_OTLP_TIMEOUT`` is set."""
LAST_SECONDS: Final = 3.0
"""Timeout of the last flush; without a collector the spans are dropped."""


class Export:
    """Exports one process's spans to a collector; ``provider`` makes them. The SDK's threads send them."""

    def __init__(self, service: str, endpoint: str | None) -> None:
        """``endpoint``: None: from the environment. Raises ImportError without the extra."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # The exporter warns with every batch that there is no collector.
        logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").addFilter(_Once())
        named = os.environ.get("OTEL_SERVICE_NAME")
        timeout = None if os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") else EXPORT_SECONDS
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=timeout)
        resource = Resource.create({} if named else {"service.name": service})
        self.provider: SdkProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._ending, self._ended = threading.Event(), threading.Event()
        # Started now: at the end of a process threads cannot be started any more.
        threading.Thread(target=self._hurry, name="isthmus-traces", daemon=True).start()
        atexit.register(self.close)

    def close(self) -> None:
        """Send the remaining spans, for at most `LAST_SECONDS`. May be called again."""
        if not self._ending.is_set():
            self._ending.set()
            atexit.unregister(self.close)
            self.provider.shutdown()
            self._ended.set()

    def _hurry(self) -> None:
        """Shut the exporter down after `LAST_SECONDS`: the SDK would wait half a minute for a missing collector."""
        self._ending.wait()
        if not self._ended.wait(LAST_SECONDS):
            self._exporter.shutdown()


class _Once(logging.Filter):
    """Logs only the first record."""

    def __init__(self) -> None:
        super().__init__()
        self._logged = False

    def filter(self, record: logging.LogRecord) -> bool:
        reported, self._logged = self._logged, True
        return not reported


def endpoint_of(table: Table) -> str:
    """Return the endpoint of a ``[tracing]`` table. Raises SpecError."""
    endpoint = table.need("endpoint", str)
    table.done()
    parts = urllib.parse.urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        table.fail("endpoint", f'expected "http://HOST:PORT" or "https://HOST:PORT", found "{endpoint}"')
    return endpoint


def exporting(service: str, endpoint: str = "") -> Export | None:
    """Export to ``endpoint``, else to the environment's; None if there is neither.

    Raises SpecError for an endpoint without the extra. An environment variable may be meant for other programs of the
    machine: without the extra it causes a line in the log, no error.
    """
    if not endpoint and not any(os.environ.get(name) for name in VARIABLES):
        return None
    try:
        return Export(service, endpoint or None)
    except ImportError as error:
        text = f'{error}; pip install "isthmus[otel]"'
        if endpoint:
            raise SpecError(f"tracing: {text}") from error
        log.warning("no traces: %s", text)
        return None


CARRIED: Final = "traceparent"
"""The field of W3C's Trace Context sent with a request (https://www.w3.org/TR/trace-context/)."""


class Tracing:
    """Makes one side's spans. ``provider``: None: the process's own (`opentelemetry.trace.get_tracer_provider`)."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._tracer = trace.get_tracer("isthmus", tracer_provider=provider)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, kind: str, began_ns: int, about: About, parent: Context | None) -> Span:
        """Begin a span at ``began_ns`` (perf_counter). ``kind``: "CLIENT" or "SERVER". ``parent``: None: the thread's
        context.
        """
        of: SpanKind = self._trace.SpanKind[kind]
        known: dict[str, str | int] = {
            "isthmus.model": about.model_id,
            "isthmus.request": about.id,
            "isthmus.client": about.client,
            "enduser.id": about.identity,
        }
        attributes: dict[str, str | int] = {key: value for key, value in known.items() if value != ""}
        return self._tracer.start_span(name, parent, of, attributes=attributes, start_time=_wall(began_ns))

    def put(self, span: Span, carrier: dict[str, str]) -> None:
        """Write to ``carrier`` what the other side needs to continue the trace of ``span``."""
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))

    def taken(self, carrier: Mapping[str, str]) -> Context:
        """Read what `put` wrote on the other side; an empty context if it is malformed."""
        from opentelemetry.context import Context

        return self._propagator.extract(carrier, Context())

    def end(self, span: Span, rows: Iterable[tuple[str, int]], began_ns: int, **facts: Any) -> None:
        """End ``span`` now, with a child for each of ``rows``: (name, ns), in sequence from ``began_ns``
        (perf_counter).
        """
        if span.is_recording():
            span.set_attributes({f"isthmus.{key}": value for key, value in facts.items() if value is not None})
            within, at = self._trace.set_span_in_context(span), _wall(began_ns)
            for name, ns in rows:
                if ns > 0:
                    self._tracer.start_span(name, within, start_time=at).end(at + ns)
                    at += ns
        span.end()

    def fail(self, span: Span, error: BaseException, **facts: Any) -> None:
        """End ``span`` with an error. A cancellation is not a failure."""
        if span.is_recording():
            span.set_attribute("error.type", type(error).__name__)
            if not isinstance(error, Cancelled):
                span.set_status(self._trace.StatusCode.ERROR, str(error)[:500])
        self.end(span, (), 0, **facts)


def _wall(perf_ns: int) -> int:
    """Convert a reading of perf_counter_ns to nanoseconds since 1970."""
    return time.time_ns() - (time.perf_counter_ns() - perf_ns)
