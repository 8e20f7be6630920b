"""An answer as a sink's values: its times, bytes, both sides' forwards and layers, what observers found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from edge_client.answer import Answer
from shared_hooks.metrics import FORWARD_READINGS, ForwardMetrics
from shared_hooks.sinks import Value, of_records


def of_answer(answer: Answer) -> dict[str, Value]:
    """``time_ms/...`` (the rows that add up, and their sum), ``bytes/...``, ``server/...``, ``edge/...``, ``cloud/...``

    A reading is there when it has a value. ``cut`` is the layer's id: -1 before the first, NaN without a cut.
    """
    return dict(_of_answer(answer))


def _of_answer(answer: Answer) -> Iterator[tuple[str, Value]]:
    for row in fields(answer.times):
        yield f"time_ms/{row.name}", getattr(answer.times, row.name) / 1e6
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
