"""The fields of a reply -> what the server measured of its tail. A server may be broken: nothing is taken on trust."""

from __future__ import annotations

import functools
import math

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
        self._readings = [NOT_SAMPLED, *(_reading(one, notes) for one in reply.readings)]

    def get(self, number: int) -> Reading:
        if number >= len(self._readings):
            raise BadFrame(f"the reply's metrics: reading {number} of {len(self._readings) - 1}")
        return self._readings[number]


def layer_metrics(reply: split_pb2.ReplyHeader) -> list[LayerMetrics]:
    """The tail's layers. Raises BadFrame."""
    get = Readings(reply).get
    return [
        LayerMetrics(
            layer_id=layer.layer_id,
            name=layer.name,
            layer_type=layer.layer_type,
            inference_ns=layer.inference_ns,
            output_bytes=layer.output_bytes,
            outputs=_outputs(layer),
            cpu_ns=layer.cpu_ns if layer.HasField("cpu_ns") else None,
            **{name: get(getattr(layer, name)) for name in LAYER_READINGS},
        )
        for layer in reply.layers
    ]


def forward_metrics(reply: split_pb2.ReplyHeader) -> ForwardMetrics | None:
    """The tail as a whole; None without metrics. Raises BadFrame."""
    if not reply.HasField("forward"):
        return None
    forward = reply.forward
    if forward.layers_ns > forward.total_ns:
        raise BadFrame(f"the reply's metrics: layers of {forward.layers_ns} ns in {forward.total_ns} ns")
    get = Readings(reply).get
    return ForwardMetrics(
        total_ns=forward.total_ns,
        layers_ns=forward.layers_ns,
        cpu_ns=forward.cpu_ns if forward.HasField("cpu_ns") else None,
        **{name: get(getattr(forward, name)) for name in FORWARD_READINGS},
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
    known = [_shape(one.dtype, tuple(one.shape)) for one in layer.outputs]
    if known and sum(nbytes for _, nbytes in known) != layer.output_bytes:
        raise BadFrame(
            f"the reply's metrics: layer {layer.layer_id} with {layer.output_bytes} bytes of output, but other shapes"
        )
    return tuple(shape for shape, _ in known)


@functools.lru_cache(4096)
def _shape(dtype: str, shape: tuple[int, ...]) -> tuple[TensorShape, int]:
    """And its bytes; a model's are the same every time."""
    if len(shape) > MAX_RANK or max(shape, default=0) >= MAX_BYTES:
        raise BadFrame(f"the reply's metrics: a shape of rank {len(shape)}: too large")
    return TensorShape(dtype, shape), math.prod(shape) * dtype_named(dtype).itemsize
