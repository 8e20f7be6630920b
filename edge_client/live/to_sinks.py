"""`ToSinks`: a hook that writes every answer's numbers to sinks.

    client = EdgeClient("127.0.0.1:50051", "digits", split="stage2.0.conv2")
    client.lifecycle.register(ToSinks(TensorBoardSink("runs/first")))

It ends, and its sinks with it, when the client is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from edge_client.answer import Answer
from edge_client.live.board import Aside
from edge_client.transport.times import TIME_ROWS
from shared_hooks.lifecycle import Event
from shared_hooks.metrics import FORWARD_READINGS, ForwardMetrics
from shared_hooks.sinks import Sink, Value, of_records

# An answer as a sink's values: its times, bytes, both sides' forwards and layers, what observers found.


def of_answer(answer: Answer) -> dict[str, Value]:
    """``time_ms/...`` (the rows that add up, and their sum), ``bytes/...``, ``server/...``, ``edge/...``, ``cloud/...``

    A reading is included if it has a value. ``cut`` is the layer's id: -1 before the first, NaN without a cut.
    """
    return dict(_of_answer(answer))


def _of_answer(answer: Answer) -> Iterator[tuple[str, Value]]:
    for name in TIME_ROWS:
        yield f"time_ms/{name}", getattr(answer.times, name) / 1e6
    yield "time_ms/end_to_end", answer.times.end_to_end / 1e6
    yield "bytes/up", float(answer.bytes_up)
    yield "bytes/down", float(answer.bytes_down)
    yield "cut", float("nan") if answer.layer_id is None else float(answer.layer_id)
    yield "sends", float(answer.sends)
    if answer.load is not None:
        yield "server/pending", float(answer.load.pending)
        yield "server/queue_ms", answer.load.queue_ns / 1e6
    for side, forward in (("edge", answer.forward_edge), ("cloud", answer.forward_cloud)):
        if forward is not None:
            yield from ((f"{side}/{name}", value) for name, value in _forward(forward))
    for side, layers in (("edge", answer.layers_edge), ("cloud", answer.layers_cloud)):
        for layer in layers:
            yield f"{side}/layer_ms/{layer.name}", layer.inference_ns / 1e6
    for side, found in answer.observations.items():
        for observer, observed in found.items():
            yield from ((f"{side}/{observer}/{name}", one) for name, one in of_records(observed["records"]).items())


def _forward(forward: ForwardMetrics) -> Iterator[tuple[str, Value]]:
    yield "forward_ms", forward.total_ns / 1e6
    yield "outside_layers_ms", forward.outside_ns / 1e6
    for name in FORWARD_READINGS:
        if (value := getattr(forward, name).value) is not None:
            yield {"energy": "energy_joules", "mean_power": "mean_power_watts"}.get(name, f"{name}_bytes"), value


log = logging.getLogger(__name__)


class ToSinks:
    """Hooks that write to sinks. The step is the answer's number, from 0. Sinks are written in a thread beside the
    requests; if they are slower than these, answers are dropped (`left_out`).
    """

    name = "sinks"
    built_in = True
    priority = "LOWEST"

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks
        self._steps = 0
        self._asides = [Aside(f"sink {type(sink).__name__}", self._writer(sink)) for sink in sinks]

    @property
    def left_out(self) -> int:
        """The number of answers dropped because of a slow sink."""
        return max((one.left_out for one in self._asides), default=0)

    @property
    def failures(self) -> int:
        """The number of failed writes."""
        return sum(one.failures for one in self._asides)

    def after_request(self, event: Event) -> None:
        """Record an answer, if there is one."""
        if event.answer is not None:
            step, self._steps = self._steps, self._steps + 1
            answer = replace(event.answer, output=None)  # it may be large, and is not shown
            for aside in self._asides:
                aside.put((step, answer))

    def after_shutdown(self, event: Event) -> None:
        """Close when the client is closed."""
        self.close()

    def close(self) -> None:
        """Write what waits, and close the sinks. Idempotent."""
        sinks, self._sinks = self._sinks, ()
        for aside in self._asides:
            aside.close()
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:
                log.warning("sink %s did not close: %s: %s", type(sink).__name__, type(error).__name__, error)

    @staticmethod
    def _writer(sink: Sink) -> Callable[[tuple[int, Answer]], None]:
        def write(item: tuple[int, Answer]) -> None:
            step, answer = item
            sink.write(of_answer(answer), step)

        return write
