"""Trace an edge client's requests with OpenTelemetry: mount `Traces` on its life cycle.

    lifecycle = default("edge")
    lifecycle.register(Traces())        # to the application's own tracer provider
    client = EdgeClient(..., lifecycle=lifecycle)

A request's span is a child of its caller's current span, if any. It ends with the answer; its children are the stages
here and on the way, and the server's own span (docs/telemetry.md).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from edge_client.transport import Times
from shared_hooks.lifecycle import Event
from shared_hooks.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span


class Traces:
    """Hooks that make spans. Thread-safe; several clients may share one."""

    name = "traces"
    built_in = True
    priority = "HIGHEST"  # anything that other hooks do at the beginning belongs to the request

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """``provider``: None: the process's own (`opentelemetry.trace.get_tracer_provider`)."""
        self._tracing = Tracing(provider)
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], tuple[Span, int]] = {}

    def before_request(self, event: Event) -> None:
        """Begin a request's span; the request carries its context to the server."""
        about = event.request
        assert about is not None
        span = self._tracing.begin("infer", "CLIENT", event.began_ns, about, None)
        span.set_attribute("isthmus.cut", str(event.split))
        self._tracing.put(span, about.carrier)
        with self._lock:
            self._open[about.client, about.id] = span, event.began_ns

    def after_request(self, event: Event) -> None:
        """End the span."""
        about, answer = event.request, event.answer
        assert about is not None
        with self._lock:
            found = self._open.pop((about.client, about.id), None)
        if found is None:  # began before this was mounted
            return
        span, began_ns = found
        if answer is None:
            self._tracing.fail(span, event.error)
            return
        facts = {"bytes_up": answer.bytes_up, "bytes_down": answer.bytes_down, "sends": answer.sends}
        self._tracing.end(span, rows(answer.times), began_ns, **facts)


def rows(times: Times) -> list[tuple[str, int]]:
    """Return (name, ns) in sequence. The server reports its own part; seen from here it is a wait."""
    return [
        ("prepare input", times.prepare),
        ("earlier attempt", times.retry),
        ("wait for a place", times.wait),
        ("plan, move to device", times.edge_other),
        ("head", times.edge_compute),
        ("encode", times.encode),
        ("wait to send", times.send_wait),
        ("send", times.upload),
        ("wait for the answer", times.in_transit + times.server),
        ("receive", times.download),
        ("wait for its turn", times.turn),
        ("decode", times.edge_decode),
        ("postprocess", times.postprocess),
    ]
