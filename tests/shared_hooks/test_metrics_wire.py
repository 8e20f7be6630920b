"""A tail's metrics over the wire: what comes out is what went in, and a server's nonsense is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_server.models import engine as server
from edge_client.transport import times as edge
from protos.isthmus.v1 import split_pb2
from shared_hooks import ForwardMetrics, LayerMetrics, TensorShape
from shared_hooks.errors import BadFrame
from shared_hooks.metrics.records import NOT_SAMPLED, Reading

Reply = split_pb2.ReplyHeader
Break = Callable[[Reply], None]


def sent(layers: list[LayerMetrics], forward: ForwardMetrics | None) -> Reply:
    reply = Reply(id=1)
    server.put(reply, layers, forward)
    return Reply.FromString(reply.SerializeToString())


notes = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
readings = st.one_of(
    st.just(NOT_SAMPLED),
    st.builds(Reading.unavailable, notes),
    st.builds(Reading, st.floats(0, 1e300), st.sampled_from(["measured", "estimated"]), notes),
)
shapes = st.lists(
    st.builds(
        TensorShape,
        st.sampled_from(["float32", "bfloat16", "bool", "complex64"]),
        st.lists(st.integers(0, 9), max_size=4).map(tuple),
    ),
    max_size=3,
)
SIZES = {"float32": 4, "bfloat16": 2, "bool": 1, "complex64": 8}


def nbytes(outputs: list[TensorShape]) -> int:
    total = 0
    for one in outputs:
        size = SIZES[one.dtype]
        for length in one.shape:
            size *= length
        total += size
    return total


numbers = st.integers(0, 2**63)
layers_metrics = st.tuples(shapes, numbers, st.none() | numbers, st.lists(readings, min_size=7, max_size=7)).map(
    lambda t: LayerMetrics(3, "a.b#2", "Conv2d", t[1], nbytes(t[0]), tuple(t[0]), t[2], *t[3])
)


@given(st.lists(layers_metrics, max_size=4), readings, st.none() | numbers)
def test_what_comes_out_is_what_went_in(layers: list[LayerMetrics], reading: Reading, cpu_ns: int | None) -> None:
    forward = ForwardMetrics(10, 7, cpu_ns, reading, NOT_SAMPLED, reading)
    reply = sent(layers, forward)
    assert edge.layer_metrics(reply) == layers
    assert edge.forward_metrics(reply) == forward


def test_what_layers_share_travels_once() -> None:
    shared = Reading.unavailable("no energy meter: RAPL: no permission to read a file with a long name")
    layers = [LayerMetrics(i, str(i), "ReLU", 1, 4, (), 1, shared, shared, cpu_utilisation=shared) for i in range(50)]
    reply = sent(layers, None)
    assert (len(reply.readings), list(reply.notes)) == (1, [shared.note])
    assert reply.ByteSize() < 50 * 30 + 200
    assert edge.forward_metrics(reply) is None
    assert edge.layer_metrics(reply) == layers


def test_a_server_that_tells_only_times_is_understood() -> None:
    reply = Reply(layers=[split_pb2.LayerMetric(layer_id=1, name="x", inference_ns=5)])
    (layer,) = edge.layer_metrics(reply)
    assert (layer.inference_ns, layer.cpu_ns, layer.energy, layer.outputs) == (5, None, NOT_SAMPLED, ())


def test_a_drivers_endless_error_is_cut() -> None:
    reply = sent([], ForwardMetrics(1, 0, energy=Reading.unavailable("x" * 10_000 + "\ud800")))
    forward = edge.forward_metrics(reply)
    assert forward is not None and len(forward.energy.note) == server.MAX_NOTE


def good() -> Reply:
    reading = Reading(1.0, "measured", "board")
    layer = LayerMetrics(0, "x", "ReLU", 5, 16, (TensorShape("float32", (2, 2)),), 5, reading)
    return sent([layer], ForwardMetrics(10, 5, 5, reading))


def _shape(reply: Reply, dtype: str, *shape: int) -> None:
    reply.layers[0].outputs[0].CopyFrom(split_pb2.TensorShape(dtype=dtype, shape=shape))


def _reading(reply: Reply, **fields: float) -> None:
    reply.readings[0].CopyFrom(split_pb2.Reading(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda reply: _reading(reply, value=1.0), "status 0"),
        (lambda reply: _reading(reply, value=1.0, status=99), "status 99"),
        (lambda reply: _reading(reply, value=float("nan"), status=1), "a reading of nan"),
        (lambda reply: _reading(reply, value=float("inf"), status=2), "a reading of inf"),
        (lambda reply: _reading(reply, value=-1.0, status=2), "a reading of -1.0"),
        (lambda reply: _reading(reply, status=1), "measured, with the value None"),
        (lambda reply: _reading(reply, value=0.0, status=3), "unavailable, with the value 0.0"),
        (lambda reply: _reading(reply, value=1.0, status=1, note=2), "note 2 of 1"),
        (lambda reply: _reading(reply, value=1.0, status=1, note=2**32 - 1), "note 4294967295 of 1"),
        (lambda reply: setattr(reply.layers[0], "energy", 2), "reading 2 of 1"),
        (lambda reply: setattr(reply.layers[0], "gpu_utilisation", 2**32 - 1), "reading 4294967295 of 1"),
        (lambda reply: reply.notes.append("x" * 100_000), "a note of more than 1000"),
        (lambda reply: _shape(reply, "float32", 2, 3), "but other shapes"),
        (lambda reply: _shape(reply, "float33", 2, 2), "unknown dtype"),
        (lambda reply: _shape(reply, "float32", *[1] * 1000), "too large"),
        (lambda reply: _shape(reply, "float32", 2**63, 0), "too large"),
        (lambda reply: _shape(reply, "float32", *[2**62] * 64), "but other shapes"),
    ],
)
def test_nonsense_about_layers_is_refused(broken: Break, text: str) -> None:
    reply = good()
    assert edge.layer_metrics(reply)
    broken(reply)
    with pytest.raises(BadFrame, match=text):
        edge.layer_metrics(reply)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda reply: setattr(reply.forward, "layers_ns", 11), "layers of 11 ns in 10 ns"),
        (lambda reply: setattr(reply.forward, "memory_peak", 9), "reading 9 of 1"),
        (lambda reply: _reading(reply, value=float("nan"), status=1), "a reading of nan"),
    ],
)
def test_nonsense_about_the_forward_is_refused(broken: Break, text: str) -> None:
    reply = good()
    assert edge.forward_metrics(reply)
    broken(reply)
    with pytest.raises(BadFrame, match=text):
        edge.forward_metrics(reply)
