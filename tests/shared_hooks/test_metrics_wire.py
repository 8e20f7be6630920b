"""A tail's metrics over the wire: what comes out is what went in, and a server's nonsense is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cloud_server.models import engine as server
from edge_client.transport import times as edge
from edge_client.transport.times import NO_TABLES
from protos.isthmus.v1 import split_pb2
from shared_hooks import ForwardMetrics, LayerMetrics, TensorShape
from shared_hooks.errors import BadFrame
from shared_hooks.metrics import LAYER_READINGS, LayerColumns, LayerTable
from shared_hooks.metrics.records import NOT_SAMPLED, Reading

Reply = split_pb2.ReplyHeader
Break = Callable[[Reply], None]
FLOATS = (TensorShape("float32", (2, 2)),)


def sent(layers: Sequence[LayerMetrics], forward: ForwardMetrics | None) -> Reply:
    reply = Reply(id=1)
    server.put(reply, columns(layers), forward)
    return Reply.FromString(reply.SerializeToString())


def columns(layers: Sequence[LayerMetrics]) -> LayerColumns:
    """The same as a forward has them: processor time of all layers, or of none."""
    table = LayerTable(
        tuple(one.layer_id for one in layers),
        tuple(one.name for one in layers),
        tuple(one.layer_type for one in layers),
        tuple(one.outputs for one in layers),
        tuple(one.output_bytes for one in layers),
    )
    cpu_ns = [one.cpu_ns for one in layers if one.cpu_ns is not None]
    rows: list[Any] = [tuple(getattr(one, name) for name in LAYER_READINGS) for one in layers]
    return LayerColumns(table, [one.inference_ns for one in layers], cpu_ns or None, rows)


def read(reply: Reply, known: Mapping[int, LayerTable] = NO_TABLES) -> list[LayerMetrics]:
    return list(edge.tail_metrics(reply, known, {})[0])


def whole(reply: Reply) -> ForwardMetrics | None:
    return edge.tail_metrics(reply, NO_TABLES, {})[1]


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
layers_metrics = st.tuples(shapes, numbers, numbers, st.lists(readings, min_size=7, max_size=7)).map(
    lambda t: LayerMetrics(3, "a.b#2", "Conv2d", t[1], nbytes(t[0]), tuple(t[0]), t[2], *t[3])
)


@given(st.lists(layers_metrics, max_size=4), readings, st.none() | numbers)
def test_records_survive_the_wire(layers: list[LayerMetrics], reading: Reading, cpu_ns: int | None) -> None:
    if cpu_ns is None:
        layers = [replace(one, cpu_ns=None) for one in layers]
    forward = ForwardMetrics(10, 7, cpu_ns, reading, NOT_SAMPLED, reading)
    reply = sent(layers, forward)
    assert read(reply) == layers
    assert whole(reply) == forward


def test_shared_values_are_sent_once() -> None:
    shared = Reading.unavailable("no energy meter: RAPL: no permission to read a file with a long name")
    layers = [LayerMetrics(i, str(i), "ReLU", 1, 0, (), 1, shared, shared, cpu_utilisation=shared) for i in range(50)]
    reply = sent(layers, None)
    assert (len(reply.readings), list(reply.notes)) == (1, [shared.note])
    assert reply.ByteSize() < 50 * 30 + 200
    assert whole(reply) is None
    assert read(reply) == layers


def test_a_server_that_reports_only_times_is_understood() -> None:
    reply = sent([LayerMetrics(1, "x", "ReLU", 5, 0)], None)
    assert not reply.layers.cpu_ns and not reply.layers.energy
    (layer,) = read(reply)
    assert (layer.inference_ns, layer.cpu_ns, layer.energy, layer.outputs) == (5, None, NOT_SAMPLED, ())


def test_a_table_of_layers_is_described_once() -> None:
    layers = [LayerMetrics(i, f"block.{i}.attention", "Attention", i + 1, 16, FLOATS, 1) for i in range(40)]
    first, again = sent(layers, None), sent(layers, None)
    found: dict[int, LayerTable] = {}
    assert list(edge.tail_metrics(first, NO_TABLES, found)[0]) == layers and len(found) == 1
    server.leave_out(again, found.keys())
    assert again.ByteSize() < 200 < 1000 < first.ByteSize()
    assert read(again, found) == layers
    server.leave_out(first, {1, 2, 3})
    assert read(first) == layers, "another table"
    with pytest.raises(BadFrame, match="a table of layers that was not sent"):
        read(again)


def test_tables_of_a_cut_are_kept_up_to_a_number() -> None:
    tables = edge.LayerTables()
    one = LayerTable((), (), (), (), ())
    for number in range(100):
        tables.learn("cut", {number: one})
        assert number in tables.of("cut") and len(tables.of("cut")) <= edge.MAX_TABLES
    for number in range(100):
        tables.learn(f"cut {number}", {1: one})
    assert not tables.of("cut") and not tables.of("cut 1") and tables.of("cut 99") == {1: one}
    many = LayerTable((1,), ("x" * (edge.MAX_TABLE_BYTES // 3),), ("Linear",), ((),), (0,))
    for number in range(5):
        tables.learn("long", {number: many})
        tables.learn(f"long {number}", {number: many})
    held = sum(len(each) for each in tables._by_cut.values())
    assert held <= 2 and tables.of("long 4")


def test_a_reply_without_layers_stays_without() -> None:
    reply = Reply(id=1)
    server.leave_out(reply, {0})
    assert not reply.HasField("layers") and read(reply) == []


def test_a_drivers_endless_error_is_cut() -> None:
    reply = sent([], ForwardMetrics(1, 0, energy=Reading.unavailable("x" * 10_000 + "\ud800")))
    forward = whole(reply)
    assert forward is not None and len(forward.energy.note) == server.MAX_NOTE


def good() -> Reply:
    reading = Reading(1.0, "measured", "board")
    layer = LayerMetrics(0, "x", "ReLU", 5, 16, (TensorShape("float32", (2, 2)),), 5, reading)
    return sent([layer], ForwardMetrics(10, 5, 5, reading))


def _describe(reply: Reply, described: bytes) -> None:
    reply.layers.described, reply.layers.table = described, xxhash.xxh3_64_intdigest(described)


def _shape(reply: Reply, dtype: str, *shape: int) -> None:
    table = split_pb2.LayerTable.FromString(reply.layers.described)
    table.outputs[0].tensors[0].CopyFrom(split_pb2.TensorShape(dtype=dtype, shape=shape))
    _describe(reply, table.SerializeToString())


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
        (lambda reply: reply.layers.energy.__setitem__(0, 2), "reading 2 of 1"),
        (lambda reply: reply.layers.gpu_utilisation.append(2**32 - 1), "reading 4294967295 of 1"),
        (lambda reply: reply.notes.append("x" * 100_000), "a note of more than 1000"),
        (lambda reply: _shape(reply, "float33", 2, 2), "unknown dtype"),
        (lambda reply: _shape(reply, "float32", *[1] * 1000), "too large"),
        (lambda reply: _shape(reply, "float32", 2**63, 0), "too large"),
        (lambda reply: _shape(reply, "float32", *[2**62] * 64), "too large"),
        (lambda reply: reply.layers.inference_ns.append(1), "inference_ns of 2 layers; there are 1"),
        (lambda reply: reply.layers.ClearField("inference_ns"), "inference_ns of 0 layers"),
        (lambda reply: reply.layers.cpu_ns.extend([1, 2]), "cpu_ns of 3 layers"),
        (lambda reply: _describe(reply, b"\xff"), "the reply's metrics: "),
        (lambda reply: _describe(reply, b"\x0a\x02\x01\x02"), "columns of several lengths"),
        (lambda reply: reply.layers.ClearField("described"), "a table of layers that was not sent"),
        (lambda reply: setattr(reply.layers, "table", 1), "with another's digest"),
    ],
)
def test_nonsense_about_layers_is_refused(broken: Break, text: str) -> None:
    reply = good()
    assert read(reply)
    broken(reply)
    with pytest.raises(BadFrame, match=text):
        read(reply)


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
    assert whole(reply)
    broken(reply)
    with pytest.raises(BadFrame, match=text):
        whole(reply)
