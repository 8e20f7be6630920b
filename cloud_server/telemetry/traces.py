"""OpenTelemetry traces of a server's requests: spans that go on with the trace of the client's.

What a client says of its trace is taken as far as its form goes: garbage is no trace, and the request begins one of its
own. A client can join its requests to any trace whose number it knows, its own or not, and say whether it is to be
sampled, as with every service that propagates traces; it sees nothing of what is exported.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from protos.isthmus.v1 import split_pb2
from shared_hooks.lifecycle import Event
from shared_hooks.tracing import Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


class Traces:
    """Hooks of a server's `Lifecycle`. Any thread may call."""

    name = "traces"
    built_in = True
    priority = "LOWEST"

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracing = Tracing(provider)

    def after_request(self, event: Event) -> None:
        """It is answered, failed or cancelled."""
        about, reply = event.request, event.reply
        assert about is not None
        span = self._tracing.begin("serve", "SERVER", event.began_ns, about, self._tracing.taken(about.carrier))
        span.set_attribute("isthmus.cut", event.split)
        if event.error is None and reply is not None:
            self._tracing.end(span, rows(reply.durations), event.began_ns, bytes_down=reply.payload_bytes)
        else:
            self._tracing.fail(span, event.error)

    def on_error(self, event: Event) -> None:
        """A request that was not taken in has no end."""
        about = event.request
        if about is not None and about.index < 0:
            now = time.perf_counter_ns()
            span = self._tracing.begin("serve", "SERVER", now, about, self._tracing.taken(about.carrier))
            self._tracing.fail(span, event.error)


def rows(took: split_pb2.Durations) -> list[tuple[str, int]]:
    """(name, ns), one after the other."""
    return [
        ("receive", took.receive_ns),
        ("queue", took.queue_ns),
        ("decode", took.decode_ns),
        ("inject", took.inject_ns),
        ("compute", took.compute_ns),
        ("encode", took.encode_ns),
    ]
