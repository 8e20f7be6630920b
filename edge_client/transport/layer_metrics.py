"""The fields of a reply -> what the server measured of its tail. A server may be broken: nothing is taken on trust."""

from __future__ import annotations

import functools
import math
from typing import Any

from protos.isthmus.v1 import split_pb2
from shared_hooks import ForwardMetrics, LayerMetrics, TensorShape
from shared_hooks.errors import BadFrame
from shared_hooks.metrics import FORWARD_READINGS, LAYER_READINGS, NOT_SAMPLED, Reading, Status
from shared_hooks.tensors import dtype_named

STATUS: dict[int, Status] = {
    split_pb2.Reading.MEASURED: "measured",
    split_pb2.Reading.ESTIMATED: "estimated",
    split_pb2.Reading.UNAVAILABLE: "unavailable",
}
MAX_NOTE = 1000
MAX_RANK = 64
MAX_BYTES = 1 << 63


class Readings:
    """The readings of one reply, by number. Raises BadFrame for what is none."""

    def __init__(self, reply: split_pb2.ReplyHeader) -> None:
        notes = ["", *reply.notes]
        if any(len(note) > MAX_NOTE for note in notes):
            raise BadFrame(f"the reply's metrics: a note of more than {MAX_NOTE} characters")
        self.each = [NOT_SAMPLED, *[_reading(one, notes) for one in reply.readings]]

    def named(self, names: tuple[str, ...], message: Any) -> list[Reading]:
        """Those that a message numbers in the fields of these names."""
        numbers = [getattr(message, name) for name in names]
        if (most := max(numbers)) >= len(self.each):
            raise BadFrame(f"the reply's metrics: reading {most} of {len(self.each) - 1}")
        return [self.each[number] for number in numbers]


def layer_metrics(reply: split_pb2.ReplyHeader) -> list[LayerMetrics]:
    """The tail's layers. Raises BadFrame."""
    readings = Readings(reply)
    found = []
    for layer in reply.layers:
        times = layer.inference_ns, layer.output_bytes, _outputs(layer)
        cpu_ns = layer.cpu_ns if layer.HasField("cpu_ns") else None
        known = readings.named(LAYER_READINGS, layer)
        found.append(LayerMetrics(layer.layer_id, layer.name, layer.layer_type, *times, cpu_ns, *known))
    return found


def forward_metrics(reply: split_pb2.ReplyHeader) -> ForwardMetrics | None:
    """The tail as a whole; None without metrics. Raises BadFrame."""
    if not reply.HasField("forward"):
        return None
    forward = reply.forward
    if forward.layers_ns > forward.total_ns:
        raise BadFrame(f"the reply's metrics: layers of {forward.layers_ns} ns in {forward.total_ns} ns")
    readings = Readings(reply).named(FORWARD_READINGS, forward)
    return ForwardMetrics(
        total_ns=forward.total_ns,
        layers_ns=forward.layers_ns,
        cpu_ns=forward.cpu_ns if forward.HasField("cpu_ns") else None,
        **dict(zip(FORWARD_READINGS, readings, strict=True)),
    )


def _reading(message: split_pb2.Reading, notes: list[str]) -> Reading:
    status = STATUS.get(message.status)
    if status is None:
        raise BadFrame(f"the reply's metrics: a reading of status {message.status}")
    if message.note >= len(notes):
        raise BadFrame(f"the reply's metrics: note {message.note} of {len(notes) - 1}")
    value = message.value if message.HasField("value") else None
    if (value is None) != (status == "unavailable"):
        raise BadFrame(f"the reply's metrics: a reading that is {status}, with the value {value}")
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise BadFrame(f"the reply's metrics: a reading of {value}")
    return Reading(value, status, notes[message.note])


def _outputs(layer: split_pb2.LayerMetric) -> tuple[TensorShape, ...]:
    """Shapes that make up the bytes that are reported."""
    shapes, nbytes = [], 0
    for one in layer.outputs:
        shape, its_bytes = _shape(one.dtype, tuple(one.shape))
        shapes.append(shape)
        nbytes += its_bytes
    if shapes and nbytes != layer.output_bytes:
        raise BadFrame(
            f"the reply's metrics: layer {layer.layer_id} with {layer.output_bytes} bytes of output, but other shapes"
        )
    return tuple(shapes)


@functools.lru_cache(4096)
def _shape(dtype: str, shape: tuple[int, ...]) -> tuple[TensorShape, int]:
    """And its bytes; a model's are the same every time."""
    if len(shape) > MAX_RANK or max(shape, default=0) >= MAX_BYTES:
        raise BadFrame(f"the reply's metrics: a shape of rank {len(shape)}: too large")
    return TensorShape(dtype, shape), math.prod(shape) * dtype_named(dtype).itemsize
