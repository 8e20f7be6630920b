"""Spans made from durations, when a request has ended: while it runs nothing is measured for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from shared_hooks.errors import Cancelled
from shared_hooks.lifecycle import About

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanKind, TracerProvider

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
