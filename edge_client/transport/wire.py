"""Protobuf messages <-> frontiers and answers: the only module of the edge that knows both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from edge_client import dial
from edge_client.call import Load
from edge_client.transport.exchange import Exchange, Outgoing
from edge_client.transport.times import Report, ServerTimes
from protos import PROTOCOL_VERSION
from protos.isthmus.v1 import split_pb2
from shared_hooks import EarlyOutput, ForwardMetrics, LayerMetrics, Parcel
from shared_hooks.errors import BadFrame, TooLarge
from shared_hooks.lifecycle import About
from shared_hooks.metrics import LayerColumns
from shared_hooks.tensors import ClassFinder

CHUNK_BYTES: Final = 1 << 20
INLINE_BYTES: Final = 4 << 10  # about the size of a reply's header with the metrics of some layers
MIN_CHUNK_BYTES: Final = 256 << 10
MAX_CHUNK_BYTES: Final = 1 << 20
FIRST_CODECS: Final = ("raw", "lz4")
"""The codecs of servers that do not list theirs."""


def hello_frame(
    *,
    client_id: str,
    model_id: str,
    weights_hash: str,
    structure_digest: str,
    plan_digest: str,
    environment: Mapping[str, str],
    about: Mapping[str, str],
) -> split_pb2.ClientFrame:
    """Return the first frame of a stream: what both sides must agree on."""
    return split_pb2.ClientFrame(
        hello=split_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            client_id=client_id,
            model_id=model_id,
            weights_hash=weights_hash,
            structure_digest=structure_digest,
            plan_digest=plan_digest,
            environment=environment,
            about=about,
            inline_bytes=INLINE_BYTES,
            message_bytes=dial.RECEIVED_BYTES,
        )
    )


def cut_frame(digest: str, data: bytes) -> split_pb2.ClientFrame:
    """Return the description of a cut, sent once per stream."""
    return split_pb2.ClientFrame(cut=split_pb2.CutUpload(digest=digest, data=data))


def codecs_of(welcome: split_pb2.Welcome) -> tuple[str, ...]:
    """Return the codecs that a server supports."""
    return tuple(welcome.codecs) or FIRST_CODECS


def request_header(
    exchange: Exchange, outgoing: Outgoing, acknowledge: Sequence[int] = (), sent_ns: int = 0
) -> split_pb2.RequestHeader:
    """Return the header of a request, made when it is sent, because it contains the time left.

    ``acknowledge``: ids of received answers. ``sent_ns``: the current time by the server's clock; 0: unknown.
    """
    return split_pb2.RequestHeader(
        id=exchange.id,
        cut_digest=outgoing.cut_digest,
        header=outgoing.header,
        payload_bytes=outgoing.nbytes,
        deadline_ms=_milliseconds(exchange.remaining()),
        want_metrics=exchange.want_metrics,
        known_tables=exchange.known_tables,
        together=exchange.together,
        file=outgoing.file,
        hooks=exchange.observers,
        traceparent=exchange.about.carrier.get("traceparent"),
        session_id=outgoing.session,
        step=outgoing.step,
        decoding=outgoing.decoding,
        acknowledge=acknowledge,
        sent_ns=sent_ns,
        route=outgoing.route,
    )


def open_header(
    about: About, cut_digest: str, most_bytes: int, remaining: float, **more: Any
) -> split_pb2.RequestHeader:
    """Return the announcement of a request whose head is running: of at most so many bytes, with so many seconds left.

    ``more``: further fields by name.
    """
    return split_pb2.RequestHeader(
        id=about.id,
        cut_digest=cut_digest,
        payload_bytes=most_bytes,
        deadline_ms=_milliseconds(remaining),
        traceparent=about.carrier.get("traceparent"),
        open=True,
        **more,
    )


def _milliseconds(seconds: float) -> int:
    return min(2**32 - 1, max(1, int(seconds * 1000)))


def outgoing(early: EarlyOutput, parcel: Parcel, route: Sequence[split_pb2.Hop] = ()) -> Outgoing:
    """Return a packed frontier (`shared_hooks.EarlyOutput.pack`); its buffers are views, and not joined. ``route``: the
    parts after the server's.
    """
    crossing = early.crossing
    sent = crossing.digest, crossing.to_bytes(), parcel.header, parcel.buffers, parcel.nbytes
    return Outgoing(*sent, codecs=parcel.codecs[: len(early.pieces)], route=tuple(route))


def outgoing_file(data: torch.Tensor, suffix: str, preprocess_digest: str) -> Outgoing:
    """Return an input file's bytes (uint8), unchanged."""
    parcel = Parcel.of_tensors(None, [data])
    file = split_pb2.FileInput(suffix=suffix, preprocess_digest=preprocess_digest)
    return Outgoing("", b"", parcel.header, parcel.buffers, parcel.nbytes, file)


def outgoing_step(
    session: int,
    step: int,
    decoding: split_pb2.Decoding,
    requested: dict[str, Any],
    tensors: list[torch.Tensor],
    route: Sequence[split_pb2.Hop] = (),
) -> Outgoing:
    """Return a step of a decoding session, or its end."""
    parcel = Parcel(b"", (), 0) if decoding.close else Parcel.of_tensors(requested, tensors)
    sent = "", b"", parcel.header, parcel.buffers, parcel.nbytes
    return Outgoing(*sent, decoding=decoding, session=session, step=step, route=tuple(route))


def step_answer(exchange: Exchange) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return the reply to a settled step. Raises BadFrame."""
    assert exchange.reply is not None
    reported, tensors = Parcel.tensors(exchange.reply.header, exchange.payload)
    if not isinstance(reported, dict):
        raise BadFrame(f"the answer to a step says {type(reported).__name__}, not what was done")
    return reported, tensors


@dataclass(frozen=True, slots=True)
class PartReport:
    """The report of a server after the first one of a chain."""

    server: str  # its name in the chain
    split: str  # name of the layer or block after which its part begins
    bytes_up: int  # header and payload, as sent by the server before it
    sends: int  # 1, and one more for each retry: the part may then have been computed again
    times: ServerTimes
    layers: Sequence[LayerMetrics]
    forward: ForwardMetrics | None
    load: Load | None


def part_of(
    part: split_pb2.Part, metrics: Callable[[Report], tuple[LayerColumns, ForwardMetrics | None]]
) -> PartReport:
    """Return the report of one server, with its ``metrics``. Raises BadFrame."""
    times = server_times(part.durations)
    layers, forward = metrics(part)
    return PartReport(
        part.server,
        part.cut,
        part.bytes_up,
        max(1, part.sends),
        times,
        layers,
        forward,
        load(part),
    )


def load(reply: split_pb2.ReplyHeader | split_pb2.Part) -> Load | None:
    """Return the server's load; None if it did not report it."""
    if not reply.HasField("load"):
        return None
    return Load(reply.load.pending, reply.load.workers, reply.load.queue_ns)


def check_answer(header: bytes, announced: int, max_bytes: int) -> None:
    """Check that the answer's header is valid, within ``max_bytes``, and announces ``announced`` payload bytes."""
    size = Parcel.check_header(header, max_bytes)
    if announced > max_bytes:
        raise TooLarge(f"an answer of {announced} bytes is announced; the limit is {max_bytes}")
    if size != announced:
        raise BadFrame(f"the answer's header describes {size} bytes, {announced} are announced")


def answer_value(exchange: Exchange, find: ClassFinder) -> Any:
    """Return the model's output from a settled exchange; ``find`` finds its dataclasses and named tuples."""
    assert exchange.reply is not None
    return Parcel.to_value(exchange.reply.header, exchange.payload, find)


def server_times(durations: split_pb2.Durations) -> ServerTimes:
    """Return the server's own durations (ns)."""
    return ServerTimes(
        queue=durations.queue_ns,
        decode=durations.decode_ns,
        inject=durations.inject_ns,
        compute=durations.compute_ns,
        encode=durations.encode_ns,
        receive=durations.receive_ns,
        complete=durations.complete_ns,
        onward=durations.onward_ns,
    )
