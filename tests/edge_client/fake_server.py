"""A server that speaks the wire and computes nothing: it echoes payloads, or misbehaves as its script says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
from torch import nn

from cloud_server.models.engine import put
from protos import FACTS_WANTED
from protos.frames import cut
from protos.isthmus.v1 import split_pb2, split_pb2_grpc
from shared_hooks import Crossing, EarlyOutput, Parcel, WrappedModel
from shared_hooks.codecs import CODECS
from shared_hooks.crossing.format import decode
from shared_hooks.errors import IsthmusError, ModelFailed

Frames = Iterator[Any]
Script = Callable[["FakeServer", Frames, Any], Iterator[split_pb2.ServerFrame]]


@dataclass
class Seen:
    """What clients have sent so far."""

    hellos: list[split_pb2.Hello] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    in_area: list[int] = field(default_factory=list)  # offsets of payloads in the client's area
    headed: list[int] = field(default_factory=list)  # bytes of payload in each request's header
    cancelled: list[int] = field(default_factory=list)
    most_in_flight: int = 0


class FakeServer:
    """Serves ``scripts`` one after the other, a stream each, then the last one again and again."""

    def __init__(self, *scripts: Script, port: int = 0, welcome: dict[str, Any] | None = None) -> None:
        self.seen = Seen()
        self.welcome_fields = welcome or {}
        self.answers: dict[int, bytes] = {}
        self._scripts = list(scripts) or [echo]
        self._lock = threading.Lock()
        self._server = grpc.server(
            ThreadPoolExecutor(max_workers=16),
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
                ("grpc.http2.min_ping_interval_without_data_ms", 100),
                ("grpc.http2.max_ping_strikes", 0),
            ],
        )
        split_pb2_grpc.add_SplitServicer_to_server(_Servicer(self), self._server)
        self.port = self._bind(port)
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def _bind(self, port: int) -> int:
        for _ in range(50):
            try:
                return self._server.add_insecure_port(f"127.0.0.1:{port}")
            except RuntimeError:  # the port of a server that was stopped just now
                time.sleep(0.1)
        raise RuntimeError(f"port {port} does not become free")

    def session(self, frames: Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        with self._lock:
            script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        yield from script(self, frames, context)

    def greet(self, frames: Frames) -> split_pb2.ServerFrame:
        self.seen.hellos.append(next(frames).hello)
        fields = {"protocol_version": 3, "max_in_flight": 8, "codecs": list(CODECS), **self.welcome_fields}
        return split_pb2.ServerFrame(welcome=split_pb2.Welcome(**fields))

    def stop(self, grace: float | None = 0) -> None:
        self._server.stop(grace).wait()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class _Servicer(split_pb2_grpc.SplitServicer):
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def Session(self, request_iterator: Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        frames = (frame for frame in request_iterator if frame.WhichOneof("frame") != "ping")
        yield from self._server.session(frames, context)


def requests(server: FakeServer, frames: Frames) -> Iterator[tuple[split_pb2.RequestHeader, bytes]]:
    """Whole requests from the frames after the greeting; everything else is noted in ``server.seen``."""
    headers: dict[int, split_pb2.RequestHeader] = {}
    payloads: dict[int, bytearray] = {}
    seen = server.seen
    for frame in frames:
        kind = frame.WhichOneof("frame")
        if kind == "cut":
            seen.cuts.append(frame.cut.digest)
        elif kind == "acknowledge":
            seen.acknowledged.extend(frame.acknowledge.ids)
        elif kind == "cancel":
            seen.cancelled.append(frame.cancel.id)
        elif kind == "request":
            seen.requests.append(frame.request.id)
            seen.acknowledged.extend(frame.request.acknowledge)
            seen.headed.append(len(frame.request.payload))
            first = from_area(server, frame.request) or frame.request.payload
            headers[frame.request.id], payloads[frame.request.id] = frame.request, bytearray(first)
            seen.most_in_flight = max(seen.most_in_flight, len(headers))
        elif kind == "chunk":
            seen.chunk_sizes.append(len(frame.chunk.data))
            assert frame.chunk.offset == len(payloads[frame.chunk.id])
            payloads[frame.chunk.id] += frame.chunk.data
        for request_id in [key for key, header in headers.items() if len(payloads[key]) == header.payload_bytes]:
            yield headers.pop(request_id), bytes(payloads.pop(request_id))


def from_area(server: FakeServer, header: split_pb2.RequestHeader) -> bytes:
    """The payload that lies in the client's area; b"" where it does not."""
    if not header.HasField("area_offset"):
        return b""
    server.seen.in_area.append(header.area_offset)
    area = server.seen.hellos[-1].area
    with open(f"/proc/{area.pid}/fd/{area.fd}", "rb") as file:
        assert file.read(len(area.nonce)) == area.nonce
        file.seek(header.area_offset)
        return file.read(header.payload_bytes)


def reply(request_id: int, payload: bytes, pieces: int = 2) -> Iterator[split_pb2.ServerFrame]:
    """The frames of an answer."""
    yield split_pb2.ServerFrame(
        reply=split_pb2.ReplyHeader(
            id=request_id,
            header=b"H",
            payload_bytes=len(payload),
            durations=split_pb2.Durations(queue_ns=1, decode_ns=2, inject_ns=3, compute_ns=4, encode_ns=5),
        )
    )
    size = max(1, -(-len(payload) // pieces))
    for offset in range(0, len(payload), size):
        data = payload[offset : offset + size]
        yield split_pb2.ServerFrame(chunk=split_pb2.Chunk(id=request_id, offset=offset, data=data))


def echo(server: FakeServer, frames: Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
    """Answer every request with its own payload; a repeated id from memory."""
    yield server.greet(frames)
    for header, payload in requests(server, frames):
        yield from reply(header.id, server.answers.setdefault(header.id, payload))


def refuse(code: grpc.StatusCode, details: str, wants_facts: bool = False) -> Script:
    """End the stream at the greeting."""

    def script(server: FakeServer, frames: Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        server.seen.hellos.append(next(frames).hello)
        if wants_facts:
            context.set_trailing_metadata(((FACTS_WANTED, "1"),))
        context.abort(code, details)
        yield split_pb2.ServerFrame()

    return script


def silent(server: FakeServer, frames: Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
    """Hear the greeting, say nothing."""
    server.seen.hellos.append(next(frames).hello)
    while context.is_active():
        time.sleep(0.02)
    yield split_pb2.ServerFrame()


def deaf(server: FakeServer, frames: Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
    """Welcome, then take every request and answer none."""
    yield server.greet(frames)
    for _ in requests(server, frames):
        pass


def unread(server: FakeServer, frames: Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
    """Welcome, then read nothing more."""
    yield server.greet(frames)
    while context.is_active():
        time.sleep(0.02)


def break_after(frame_count: int, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> Script:
    """Welcome, read so many frames, then break the stream."""

    def script(server: FakeServer, frames: Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        for _ in range(frame_count):
            frame = next(frames)
            if frame.WhichOneof("frame") == "request":
                server.seen.requests.append(frame.request.id)
        context.abort(code, "broken on purpose")

    return script


def break_in_answer(server: FakeServer, frames: Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
    """Welcome, answer the first request but for its last chunk, then break the stream."""
    yield server.greet(frames)
    header, payload = next(requests(server, frames))
    yield from list(reply(header.id, payload))[:-1]
    context.abort(grpc.StatusCode.INTERNAL, "broken on purpose")


def fail(error: str, message: str, *, retry: bool = False, times: int = 1000) -> Script:
    """Fail the first ``times`` requests by name, echo the others."""

    def script(server: FakeServer, frames: Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        yield server.greet(frames)
        for number, (header, payload) in enumerate(requests(server, frames)):
            if number < times:
                failed = split_pb2.RequestFailed(id=header.id, code=3, error=error, message=message, retry=retry)
                yield split_pb2.ServerFrame(failed=failed)
            else:
                yield from reply(header.id, payload)

    return script


def tails(model: nn.Module, *, delay: Callable[[int], float] = lambda request_id: 0.0) -> Script:
    """A server that computes: frontier in, the rest of ``model``, output out; errors by name."""
    wrapped = WrappedModel(model)

    def compute(crossing: Crossing, header: split_pb2.RequestHeader, payload: bytes) -> Iterator[split_pb2.ServerFrame]:
        try:
            early = EarlyOutput.unpack(crossing, header.header, bytearray(payload))
            output = wrapped.forward(early, start=crossing.layer_id)
            layers, _ = wrapped.last_records()()
        except Exception as error:
            known = error if isinstance(error, IsthmusError) else ModelFailed(repr(error))
            failed = split_pb2.RequestFailed(id=header.id, error=type(known).__name__, message=str(known))
            yield split_pb2.ServerFrame(failed=failed)
            return
        parcel = Parcel.of_value(output)
        spent = wrapped.durations()
        answer = split_pb2.ReplyHeader(
            id=header.id,
            header=parcel.header,
            payload_bytes=parcel.nbytes,
            durations=split_pb2.Durations(inject_ns=spent["inject"], compute_ns=spent["compute"]),
        )
        if header.want_metrics:
            put(answer, layers, None)
        yield split_pb2.ServerFrame(reply=answer)
        yield from (
            split_pb2.ServerFrame(chunk=split_pb2.Chunk(id=header.id, offset=piece.offset, data=b"".join(piece.pieces)))
            for piece in cut(header.id, parcel.buffers, 1 << 18)
        )

    def script(server: FakeServer, frames: Frames, context: Any) -> Iterator[split_pb2.ServerFrame]:
        crossings: dict[str, Crossing] = {}

        def noting() -> Frames:
            for frame in frames:
                if frame.WhichOneof("frame") == "cut":
                    crossings[frame.cut.digest] = decode(frame.cut.data)
                yield frame

        yield server.greet(frames)
        for header, payload in requests(server, noting()):
            time.sleep(delay(header.id))
            yield from compute(crossings[header.cut_digest], header, payload)

    return script
