"""Spans made from durations, when a request has ended: while it runs nothing is measured for them."""

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
"""For one batch, unless ``OTEL_EXPORTER_OTLP_TIMEOUT`` says otherwise."""
LAST_SECONDS: Final = 3.0
"""For what is left at the end; without a collector it is dropped."""


class Export:
    """Spans of one process on their way to a collector; ``provider`` makes them. Threads of the SDK send them."""

    def __init__(self, service: str, endpoint: str | None) -> None:
        """``endpoint``: None = what the environment says. Raises ImportError without the extra."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # The exporter tells with every batch that there is no collector.
        logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").addFilter(_Once())
        named = os.environ.get("OTEL_SERVICE_NAME")
        timeout = None if os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT") else EXPORT_SECONDS
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=timeout)
        resource = Resource.create({} if named else {"service.name": service})
        self.provider: SdkProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._ending, self._ended = threading.Event(), threading.Event()
        # Begun now: at the end of a process no thread begins any more.
        threading.Thread(target=self._hurry, name="isthmus-traces", daemon=True).start()
        atexit.register(self.close)

    def close(self) -> None:
        """Sends what is left, `LAST_SECONDS` at most. May be called again."""
        if not self._ending.is_set():
            self._ending.set()
            atexit.unregister(self.close)
            self.provider.shutdown()
            self._ended.set()

    def _hurry(self) -> None:
        """The SDK would wait half a minute for a collector that is not there."""
        self._ending.wait()
        if not self._ended.wait(LAST_SECONDS):
            self._exporter.shutdown()


class _Once(logging.Filter):
    """Lets one line through."""

    def __init__(self) -> None:
        super().__init__()
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        said, self._said = self._said, True
        return not said


def endpoint_of(table: Table) -> str:
    """The endpoint of a ``[tracing]`` table. Raises SpecError."""
    endpoint = table.need("endpoint", str)
    table.done()
    parts = urllib.parse.urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        table.fail("endpoint", f'expected "http://HOST:PORT" or "https://HOST:PORT", found "{endpoint}"')
    return endpoint


def exporting(service: str, endpoint: str = "") -> Export | None:
    """To ``endpoint``, else to where the environment says; None if neither says anything. Raises SpecError for an
    endpoint without the extra.

    A variable may be meant for other programs of the machine: without the extra it is a line in the log, no error.
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
"""The field of W3C's Trace Context that goes with a request (https://www.w3.org/TR/trace-context/)."""


class Tracing:
    """Makes one side's spans. ``provider``: None = the process's own (`opentelemetry.trace.get_tracer_provider`)."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._tracer = trace.get_tracer("isthmus", tracer_provider=provider)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, kind: str, began_ns: int, about: About, parent: Context | None) -> Span:
        """A span since ``began_ns`` (perf_counter). ``kind``: "CLIENT" or "SERVER". ``parent``: None = what this
        thread is about, if it is about anything.
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
        """Writes to ``carrier`` what the other side needs to go on with the trace of ``span``."""
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))

    def taken(self, carrier: Mapping[str, str]) -> Context:
        """What `put` wrote on the other side; no trace where it is not well formed."""
        from opentelemetry.context import Context

        return self._propagator.extract(carrier, Context())

    def end(self, span: Span, rows: Iterable[tuple[str, int]], began_ns: int, **facts: Any) -> None:
        """Ends ``span`` now, with a span within it for each of ``rows``: (name, ns), one after the other since
        ``began_ns`` (perf_counter).
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
        """Ends ``span`` with an error. What was cancelled did not fail."""
        if span.is_recording():
            span.set_attribute("error.type", type(error).__name__)
            if not isinstance(error, Cancelled):
                span.set_status(self._trace.StatusCode.ERROR, str(error)[:500])
        self.end(span, (), 0, **facts)


def _wall(perf_ns: int) -> int:
    """A reading of perf_counter_ns as nanoseconds since 1970."""
    return time.time_ns() - (time.perf_counter_ns() - perf_ns)
