"""What was measured of a tail -> the fields of its reply; each distinct reading and each text travels once."""

from __future__ import annotations

import functools
from collections.abc import Collection

from protos.isthmus.v1 import split_pb2
from shared_hooks import ForwardMetrics, LayerMetrics, TensorShape
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


def put(reply: split_pb2.ReplyHeader, layers: Collection[LayerMetrics], forward: ForwardMetrics | None) -> None:
    """Write a tail's metrics into its reply."""
    number, add = Readings(reply).number, reply.layers.add
    known: dict[int, int] = {}  # by identity: ``layers`` keep them alive
    for layer in layers:
        metric = add(
            layer_id=layer.layer_id,
            name=layer.name,
            layer_type=layer.layer_type,
            output_bytes=layer.output_bytes,
            outputs=map(_shape, layer.outputs),
        )
        metric.inference_ns = layer.inference_ns
        if layer.cpu_ns is not None:
            metric.cpu_ns = layer.cpu_ns
        for name in LAYER_READINGS:
            reading = getattr(layer, name)
            if (found := known.get(id(reading))) is None:
                found = known[id(reading)] = number(reading)
            setattr(metric, name, found)
    if forward is not None:
        reply.forward.CopyFrom(
            split_pb2.ForwardMetric(
                total_ns=forward.total_ns,
                layers_ns=forward.layers_ns,
                cpu_ns=forward.cpu_ns,
                **{name: number(getattr(forward, name)) for name in FORWARD_READINGS},
            )
        )


@functools.lru_cache(4096)
def _shape(shape: TensorShape) -> split_pb2.TensorShape:
    """Made once, for a model's are the same every time. Not to be written."""
    return split_pb2.TensorShape(dtype=shape.dtype, shape=shape.shape)
