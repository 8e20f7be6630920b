"""What was measured of a tail -> the fields of its reply; each distinct reading and each text travels once."""

from __future__ import annotations

from collections.abc import Iterable

from protos.isthmus.v1 import split_pb2
from shared_hooks import ForwardMetrics, LayerMetrics
from shared_hooks.metrics import FORWARD_READINGS, LAYER_READINGS, NOT_SAMPLED, Reading

STATUS = {
    "measured": split_pb2.Reading.MEASURED,
    "estimated": split_pb2.Reading.ESTIMATED,
    "unavailable": split_pb2.Reading.UNAVAILABLE,
}
MAX_NOTE = 500
"""Characters of a note: a driver's error may be longer."""


class Readings:
    """Readings by number, from 1, as a reply holds them; `NOT_SAMPLED` is 0."""

    def __init__(self, reply: split_pb2.ReplyHeader) -> None:
        self._reply = reply
        self._notes: dict[str, int] = {"": 0}
        self._numbers: dict[Reading, int] = {NOT_SAMPLED: 0}

    def number(self, reading: Reading) -> int:
        known = self._numbers.get(reading)
        if known is None:
            note = self._notes.get(reading.note)
            if note is None:
                text = reading.note.encode("utf-8", "replace").decode("utf-8")  # protobuf takes no lone surrogates
                self._reply.notes.append(text if len(text) <= MAX_NOTE else text[: MAX_NOTE - 4] + " ...")
                note = self._notes[reading.note] = len(self._notes)
            self._reply.readings.append(
                split_pb2.Reading(value=reading.value, status=STATUS[reading.status], note=note)
            )
            known = self._numbers[reading] = len(self._numbers)
        return known


def put(reply: split_pb2.ReplyHeader, layers: Iterable[LayerMetrics], forward: ForwardMetrics | None) -> None:
    """Write a tail's metrics into its reply."""
    number = Readings(reply).number
    for layer in layers:
        reply.layers.append(
            split_pb2.LayerMetric(
                layer_id=layer.layer_id,
                name=layer.name,
                layer_type=layer.layer_type,
                inference_ns=layer.inference_ns,
                output_bytes=layer.output_bytes,
                outputs=[split_pb2.TensorShape(dtype=one.dtype, shape=one.shape) for one in layer.outputs],
                cpu_ns=layer.cpu_ns,
                **{name: number(getattr(layer, name)) for name in LAYER_READINGS},
            )
        )
    if forward is not None:
        reply.forward.CopyFrom(
            split_pb2.ForwardMetric(
                total_ns=forward.total_ns,
                layers_ns=forward.layers_ns,
                cpu_ns=forward.cpu_ns,
                **{name: number(getattr(forward, name)) for name in FORWARD_READINGS},
            )
        )
