"""Where the time of one request went, in nanoseconds, in rows that add up to the measured end-to-end time.

All stamps are readings of one clock, this process's; the server contributes durations only. What is measured how:

* The edge's own rows lie between two stamps.
* The server rows are the server's own measurements; of a chain they are the first server's, and ``onward`` has the
  servers behind it, with the links to them (`Answer.parts` says more).
* The network has the round trip (frontier packed -> last byte of the answer here) less the server's rows. ``upload``
  is from the first byte sent here to the last one received there, ``download`` the reverse: latency and whatever lay in
  socket buffers included. Two clocks are needed for that: `ServerClock` says where the server's stands, and how far off
  that may be (``clock_error``): as much may lie in the one row and belong into the other.
* Without such a clock each row holds only what was *seen*: ``download`` runs from the answer's header to its last byte;
  ``upload`` is the longer of two views of the same transfer, the edge's (first frame taken by the transport -> last
  chunk taken) and the server's (first byte received -> last byte received).
* What is left of the round trip has its own row, ``in_transit``, and is never spread over the others. It is a
  remainder, so the sum is exact by construction; were it ever negative, the server would claim more time than has
  passed here, and it is shown as such.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Final, cast

import xxhash
from google.protobuf.message import DecodeError

from protos.isthmus.v1 import split_pb2
from shared_hooks import ForwardMetrics, TensorShape
from shared_hooks.errors import BadFrame
from shared_hooks.metrics import (
    FORWARD_READINGS,
    LAYER_READINGS,
    NOT_SAMPLED,
    LayerColumns,
    LayerReadings,
    LayerTable,
    Reading,
    Status,
)
from shared_hooks.tensors import dtype_named

now_ns: Callable[[], int] = time.perf_counter_ns


DRIFT = 1e-4
"""The relative drift of two computers' clocks: 100 ppm, twice the tolerance of usual crystals."""
PING_SECONDS = 1.0
"""The interval of pings while requests are sent."""
FIRST_PINGS = 4
"""The number of consecutive pings on a new stream, because the first are slow."""
LOST_SECONDS = 10.0
"""How long to wait for the answer to a ping."""


class ServerClock:
    """The offset of a server's monotonic clock from this process's, estimated by round trips of single small frames: it
    was read between sending and receiving (F. Cristian, Probabilistic clock synchronization, 1989).

    Called with the lock of its stream's outbox held.
    """

    def __init__(self) -> None:
        self._number = 0
        self._sent: int | None = None
        """When the last unanswered ping was sent."""
        self._began = 0
        self._offset, self._error, self._at = 0, math.inf, 0

    @property
    def is_new(self) -> bool:
        """Whether more pings should follow at once, even without requests."""
        return self._number < FIRST_PINGS

    def wants(self, now: int) -> bool:
        """Return whether to send a ping now."""
        if self._sent is not None:
            return now - self._sent > 1e9 * LOST_SECONDS
        return self._number < FIRST_PINGS or now - self._began > 1e9 * PING_SECONDS

    def ping(self, now: int) -> int:
        """Begin a ping; returns its number."""
        self._number, self._sent, self._began = self._number + 1, now, now
        return self._number

    def pong(self, number: int, clock: int, now: int) -> None:
        """Process its answer. Kept if it is more accurate than the drifted previous estimate."""
        if number != self._number or self._sent is None:
            return
        error = (now - self._sent) / 2
        if error <= self._error + DRIFT * (now - self._at):
            self._offset, self._error, self._at = self._sent + int(error) - clock, error, now
        self._sent = None

    def offset(self, now: int) -> tuple[int, int] | None:
        """(the offset to add to a reading of the server's clock, its maximum error) in ns; None if unknown."""
        if math.isinf(self._error):
            return None
        return self._offset, int(self._error + DRIFT * (now - self._at))


@dataclass(slots=True)
class Stamps:
    """Clock readings of one request on the edge, in order (ns; None: not reached)."""

    called: int = field(default_factory=time.perf_counter_ns)
    prepared: int | None = None  # the input is read and preprocessed
    admitted: int | None = None  # a place among those in flight is free
    computed: int | None = None  # the head has run
    packed: int | None = None  # the frontier is bytes
    first_sent: int | None = None  # the transport took the request's first frame (of the sending that was answered)
    last_sent: int | None = None  # the transport asked for the frame after the last chunk
    replied: int | None = None  # the answer's header arrived
    received: int | None = None  # the answer's last byte arrived
    taken: int | None = None  # the caller took the answer
    unpacked: int | None = None  # the answer has been decoded
    clock: tuple[int, int] | None = None  # `ServerClock.offset` when the answer arrived
    head_ns: int = 0  # the head's own time within admitted -> computed
    ahead_ns: int = 0  # within admitted -> computed, beside the head's: encoding while it ran
    retry_ns: int = 0  # an earlier attempt at the same input and the planning after it, before `admitted`
    kept_ns: int = 0  # within prepared -> admitted: copies for a witness of this request; in no row
    witness_ns: int = 0  # within received -> taken: this thread ran witnesses of other requests; in no row

    @property
    def aside_ns(self) -> int:
        """The time of witnesses between the call and the decoded answer, which does not count as the request's."""
        return self.kept_ns + self.witness_ns


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """The server's own durations of one request (ns)."""

    queue: int = 0
    decode: int = 0
    inject: int = 0
    compute: int = 0
    encode: int = 0
    receive: int = 0  # first byte received -> last byte received; overlaps the upload, so it is not a row of its own
    complete: int = 0  # the server's clock when the last byte was received; 0 = unknown
    onward: int = 0  # of a chain: from passing the rest on to the next server until its answer

    @property
    def total(self) -> int:
        """Nanoseconds between the request's last byte and the answer's first that the server accounts for."""
        return self.queue + self.decode + self.inject + self.compute + self.encode + self.onward


@dataclass(frozen=True, slots=True)
class Times:
    """One request's time by row (ns). The rows add up to ``end_to_end``, exactly."""

    prepare: int = field(default=0, metadata={"label": "edge prepare input"})
    retry: int = field(default=0, metadata={"label": "edge earlier attempt"})
    wait: int = field(default=0, metadata={"label": "edge wait for a place"})
    edge_other: int = field(default=0, metadata={"label": "edge plan, move to device"})
    edge_compute: int = field(default=0, metadata={"label": "edge compute"})
    encode: int = field(default=0, metadata={"label": "edge encode"})
    send_wait: int = field(default=0, metadata={"label": "wait to send"})
    upload: int = field(default=0, metadata={"label": "upload"})
    in_transit: int = field(default=0, metadata={"label": "in transit (both ways)"})
    server_queue: int = field(default=0, metadata={"label": "server queue"})
    server_decode: int = field(default=0, metadata={"label": "server decode"})
    server_inject: int = field(default=0, metadata={"label": "server inject"})
    server_compute: int = field(default=0, metadata={"label": "server compute"})
    server_encode: int = field(default=0, metadata={"label": "server encode"})
    onward: int = field(default=0, metadata={"label": "next servers and their links"})
    download: int = field(default=0, metadata={"label": "download"})
    turn: int = field(default=0, metadata={"label": "edge wait for its turn"})
    edge_decode: int = field(default=0, metadata={"label": "edge decode"})
    postprocess: int = field(default=0, metadata={"label": "edge postprocess"})
    clock_error: int | None = field(default=None)
    """Not a row: at most this much of ``upload`` belongs to ``download``, or vice versa; None if no clock is known."""

    @classmethod
    def from_stamps(cls, stamps: Stamps, server: ServerTimes) -> Times:
        """Return the rows of one answered request.

        If the server had the answer already when the request was sent again, its durations lie before that attempt;
        then ``upload`` and ``send_wait`` are reduced so that no time counts twice.
        """
        prepared = stamps.called if stamps.prepared is None else stamps.prepared
        admitted = prepared + stamps.retry_ns + stamps.kept_ns if stamps.admitted is None else stamps.admitted
        computed = admitted if stamps.computed is None else stamps.computed
        packed = computed if stamps.packed is None else stamps.packed
        replied = packed if stamps.replied is None else stamps.replied
        received = replied if stamps.received is None else stamps.received
        taken = received if stamps.taken is None else max(stamps.taken, received)
        unpacked = taken if stamps.unpacked is None else stamps.unpacked

        head = min(stamps.head_ns, computed - admitted - stamps.ahead_ns)
        budget = received - packed - server.total
        download = _within(received - replied, budget)
        first_sent = min(packed if stamps.first_sent is None else stamps.first_sent, replied)
        last_sent = replied if stamps.last_sent is None else min(stamps.last_sent, replied)
        ahead = max(0, packed - first_sent)  # what was sent while the head ran took no time of its own
        if stamps.clock is not None and server.complete:
            arrived = server.complete + stamps.clock[0]
            send_wait = _within(first_sent - packed, budget)
            upload = _within(arrived - max(first_sent, packed), budget - send_wait)
            download = _within(received - arrived - server.total, budget - send_wait - upload)
        else:
            upload = _within(max(last_sent - first_sent, server.receive) - ahead, budget - download)
            send_wait = _within(first_sent - packed, budget - download - upload)
        return cls(
            prepare=prepared - stamps.called,
            retry=stamps.retry_ns,
            wait=admitted - prepared - stamps.retry_ns - stamps.kept_ns,
            edge_other=computed - admitted - head - stamps.ahead_ns,
            edge_compute=head,
            encode=packed - computed + stamps.ahead_ns,
            send_wait=send_wait,
            upload=upload,
            in_transit=budget - download - upload - send_wait,
            server_queue=server.queue,
            server_decode=server.decode,
            server_inject=server.inject,
            server_compute=server.compute,
            server_encode=server.encode,
            onward=server.onward,
            download=download,
            turn=taken - received - stamps.witness_ns,
            edge_decode=unpacked - taken,
            clock_error=stamps.clock[1] if stamps.clock is not None and server.complete else None,
        )

    @property
    def end_to_end(self) -> int:
        """Nanoseconds from the call to the decoded answer: the sum of the rows, which equals the measured time."""
        return sum(getattr(self, name) for name in TIME_ROWS)

    @property
    def network(self) -> int:
        """Nanoseconds of the round trip that are neither edge nor server: upload, download and in transit."""
        return self.upload + self.download + self.in_transit

    @property
    def server(self) -> int:
        """Nanoseconds the server accounts for."""
        own = self.server_queue + self.server_decode + self.server_inject + self.server_compute + self.server_encode
        return own + self.onward

    @property
    def round_trip(self) -> int:
        """Nanoseconds from the packed frontier to the answer's last byte."""
        return self.send_wait + self.network + self.server

    def rows(self) -> list[tuple[str, int]]:
        """(label, ns) of every row in chronological order; ``retry`` and ``onward`` only if they occurred."""
        found = [(name, label, getattr(self, name)) for name, label in TIME_ROWS.items()]
        return [(label, ns) for name, label, ns in found if ns or name not in ("retry", "onward")]

    def as_dict(self) -> dict[str, int]:
        """Row name -> ns, ``end_to_end``, and ``clock_error`` if the clocks are known."""
        known = {name: getattr(self, name) for name in TIME_ROWS}
        if self.clock_error is not None:
            known["clock_error"] = self.clock_error
        return {**known, "end_to_end": self.end_to_end}

    def __add__(self, other: Times) -> Times:
        errors = [one for one in (self.clock_error, other.clock_error) if one is not None]
        rows = {name: getattr(self, name) + getattr(other, name) for name in TIME_ROWS}
        return Times(**rows, clock_error=sum(errors) if errors else None)

    @classmethod
    def total(cls, times: Iterable[Times]) -> Times:
        """Return the sum, row by row."""
        total = cls()
        for one in times:
            total = total + one
        return total


TIME_ROWS: Final = {row.name: row.metadata["label"] for row in fields(Times) if "label" in row.metadata}
"""The rows of `Times` by name, with their labels."""


def _within(value: int, budget: int) -> int:
    return max(0, min(value, budget))


# The fields of a reply -> what the server measured of its tail. A server may be broken: every field is checked.


STATUS: dict[int, Status] = {
    split_pb2.Reading.MEASURED: "measured",
    split_pb2.Reading.ESTIMATED: "estimated",
    split_pb2.Reading.UNAVAILABLE: "unavailable",
}
MAX_NOTE = 1000
MAX_RANK = 64
MAX_BYTES = 1 << 63
MAX_CUTS: Final = 64
"""The number of cuts whose tables of layers are remembered."""
MAX_TABLES: Final = 16
"""... and of tables at one cut: an answer has one for each server of a chain; data may decide which layers run."""
MAX_TABLE_BYTES: Final = 16 << 20
"""The bytes, about, of all tables that are remembered."""


Report = split_pb2.ReplyHeader | split_pb2.Part
"""The report of the first server of a chain, or of a later one."""


Tables = Mapping[int, LayerTable]
"""Tables of layers by digest."""
NO_TABLES: Final[Tables] = MappingProxyType({})


class ReplyReadings:
    """The readings of one reply by number. Raises BadFrame for an unknown number."""

    def __init__(self, reply: Report) -> None:
        notes = ["", *reply.notes]
        if max(map(len, notes)) > MAX_NOTE:
            raise BadFrame(f"the reply's metrics: a note of more than {MAX_NOTE} characters")
        self.each = [NOT_SAMPLED]
        for one in reply.readings:
            if one.note >= len(notes):
                raise BadFrame(f"the reply's metrics: note {one.note} of {len(notes) - 1}")
            value = one.value if one.HasField("value") else None
            self.each.append(_reading(value, one.status, notes[one.note]))

    def named(self, numbers: Sequence[int]) -> tuple[Reading, ...]:
        """Return the readings with these numbers."""
        if (most := max(numbers)) >= len(self.each):
            raise BadFrame(f"the reply's metrics: reading {most} of {len(self.each) - 1}")
        return tuple([self.each[number] for number in numbers])


class LayerTables:
    """The tables of layers in answers at each cut, which a server need not describe again. Thread-safe."""

    def __init__(self) -> None:
        self._by_cut: OrderedDict[str, Tables] = OrderedDict()
        self._nbytes: dict[str, int] = {}
        self._lock = threading.Lock()

    def of(self, cut_digest: str) -> Tables:
        """Return those to name in a request."""
        return self._by_cut.get(cut_digest, NO_TABLES)

    def learn(self, cut_digest: str, tables: Tables) -> None:
        """Keep the tables of an answer."""
        if tables.keys() <= self.of(cut_digest).keys():
            return
        with self._lock:
            known = dict(list({**self.of(cut_digest), **tables}.items())[-MAX_TABLES:])
            self._by_cut[cut_digest], self._nbytes[cut_digest] = known, sum(map(_nbytes_of, known.values()))
            self._by_cut.move_to_end(cut_digest)
            while len(self._by_cut) > MAX_CUTS or sum(self._nbytes.values()) > MAX_TABLE_BYTES:
                oldest, _ = self._by_cut.popitem(last=False)
                del self._nbytes[oldest]


def _nbytes_of(table: LayerTable) -> int:
    """Return about how many bytes a table holds."""
    texts = sum(map(len, (*table.names, *table.types)))
    return texts + 200 * (len(table.ids) + sum(map(len, table.outputs)))


def tail_metrics(
    reply: Report, known: Tables, found: dict[int, LayerTable]
) -> tuple[LayerColumns, ForwardMetrics | None]:
    """Return the tail's layers, and the tail as a whole; without metrics none, and None.

    ``known``: the tables named in the request; the reply's own is added to ``found``. Raises BadFrame.
    """
    has_layers, has_forward = reply.HasField("layers"), reply.HasField("forward")
    if not (has_layers or has_forward):
        return LayerColumns(), None
    readings = ReplyReadings(reply)
    layers = _layers(reply, readings, known, found) if has_layers else LayerColumns()
    return layers, _forward(reply.forward, readings) if has_forward else None


def _layers(reply: Report, readings: ReplyReadings, known: Tables, found: dict[int, LayerTable]) -> LayerColumns:
    """Return the tail's layers; see `tail_metrics`."""
    columns = reply.layers
    if columns.described:
        if xxhash.xxh3_64_intdigest(columns.described) != columns.table:  # another server may name it by that
            raise BadFrame("the reply's metrics: a table of layers with another's digest")
        table = _table(columns.described)
    elif (kept := known.get(columns.table)) is not None:
        table = kept
    else:
        raise BadFrame("the reply's metrics: a table of layers that was not sent")
    found[columns.table] = table
    each = [_column(name, getattr(columns, name) or (0,), table) for name in LAYER_READINGS]
    numbers = list(zip(*each, strict=True))
    rows = {row: cast(LayerReadings, readings.named(row)) for row in set(numbers)}  # mostly one, of all layers
    return LayerColumns(
        table,
        _column("inference_ns", columns.inference_ns, table),
        _column("cpu_ns", columns.cpu_ns, table) if columns.cpu_ns else None,
        [rows[row] for row in numbers],
    )


def _column(name: str, values: Sequence[int], table: LayerTable) -> list[int]:
    """Return one value for each layer."""
    if len(values) == 1:
        return list(values) * len(table.ids)
    if len(values) != len(table.ids):
        raise BadFrame(f"the reply's metrics: {name} of {len(values)} layers; there are {len(table.ids)}")
    return list(values)


def _table(described: bytes) -> LayerTable:
    """Read a description (`split_pb2.LayerTable`). Raises BadFrame."""
    try:
        message = split_pb2.LayerTable.FromString(described)
    except DecodeError as error:
        raise BadFrame(f"the reply's metrics: {error}") from error
    lengths = {len(message.layer_id), len(message.name), len(message.layer_type), len(message.outputs)}
    if len(lengths) != 1:
        raise BadFrame("the reply's metrics: a table of layers with columns of several lengths")
    shapes = [[_shape(one.dtype, tuple(one.shape)) for one in each.tensors] for each in message.outputs]
    return LayerTable(
        tuple(message.layer_id),
        tuple(message.name),
        tuple(message.layer_type),
        tuple(tuple(shape for shape, _ in each) for each in shapes),
        tuple(sum(nbytes for _, nbytes in each) for each in shapes),
    )


def _forward(forward: split_pb2.ForwardMetric, readings: ReplyReadings) -> ForwardMetrics:
    """Return the tail as a whole. Raises BadFrame."""
    if forward.layers_ns > forward.total_ns:
        raise BadFrame(f"the reply's metrics: layers of {forward.layers_ns} ns in {forward.total_ns} ns")
    named = readings.named([getattr(forward, name) for name in FORWARD_READINGS])
    return ForwardMetrics(
        total_ns=forward.total_ns,
        layers_ns=forward.layers_ns,
        cpu_ns=forward.cpu_ns if forward.HasField("cpu_ns") else None,
        **dict(zip(FORWARD_READINGS, named, strict=True)),
    )


@functools.lru_cache(64)
def _reading(value: float | None, status: int, note: str) -> Reading:
    """Return a reading, cached because those of answers between two samples are the same."""
    kind = STATUS.get(status)
    if kind is None:
        raise BadFrame(f"the reply's metrics: a reading of status {status}")
    if (value is None) != (kind == "unavailable"):
        raise BadFrame(f"the reply's metrics: a reading that is {kind}, with the value {value}")
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise BadFrame(f"the reply's metrics: a reading of {value}")
    return Reading(value, kind, note)


@functools.lru_cache(4096)
def _shape(dtype: str, shape: tuple[int, ...]) -> tuple[TensorShape, int]:
    """Return a shape and its bytes, cached because a model's shapes recur."""
    too_large = len(shape) > MAX_RANK or max(shape, default=0) >= MAX_BYTES
    if too_large or (nbytes := math.prod(shape) * dtype_named(dtype).itemsize) >= MAX_BYTES:
        raise BadFrame(f"the reply's metrics: a shape of rank {len(shape)}: too large")
    return TensorShape(dtype, shape), nbytes
