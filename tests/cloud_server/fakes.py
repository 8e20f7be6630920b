"""An engine without torch work, and a client that speaks frames: for claims about streams, not about models."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import grpc
import torch

from cloud_server.access import Caller
from cloud_server.core import Core
from cloud_server.models.engine import Computed, Identity, PartEnd
from cloud_server.streams.session import StreamSession
from protos.frames import ChunkFrame, ClientFrame, cut
from protos.isthmus.v1 import split_pb2
from shared_hooks import Crossing
from shared_hooks.crossing.description import Slot
from shared_hooks.errors import BadFrame
from shared_hooks.modules.manifest import Manifest
from shared_hooks.tensors.views import View
from tests.waiting import PATIENCE


def make_crossing(nbytes: int, name: str = "layer") -> Crossing:
    """A cut whose frontier is one tensor of ``nbytes`` bytes."""
    slots = (Slot(torch.uint8, nbytes, (View((nbytes,), (1,), 0),), False),) if nbytes else ()
    return Crossing(
        layer_id=0,
        layer_name=name,
        depth=None,
        context={},
        input_structure=[],
        inputs=(),
        slots=slots,
        marks=(),
        fills=(),
        given=(),
        reads=(),
        layouts=(),
        path_digest="path",
    )


class FakeEngine:
    """Answers with the payload reversed; ``before`` runs first, on the worker's thread, with the payload."""

    def __init__(self, before: Callable[[memoryview], None] = lambda payload: None, model_id: str = "fake") -> None:
        self.identity = Identity(
            model_id=model_id,
            weights_hash="w1",
            structure_digest="s1",
            plan_digest="p1",
            environment={"mha_fastpath": "off", "default_dtype": "float32"},
            about={"torch": "2.99"},
            layers=3,
        )
        self.before = before
        self.computed = 0

    step_batching = None
    batching = None
    residence = None

    def manifest(self) -> Manifest:
        return {("set", "norm", "eps"): "1e-05"}

    def allocate(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def admit(self, crossing: Crossing, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        if not header.startswith(b"fake"):
            raise BadFrame("the header is not one of a fake frontier")
        if payload_bytes != crossing.payload_bytes:
            raise BadFrame(f"{payload_bytes} bytes are announced, the cut has {crossing.payload_bytes}")

    def compute(
        self, crossing: Crossing, header: bytes, payload: memoryview, want_metrics: bool, end: PartEnd | None = None
    ) -> Computed:
        self.before(payload)
        self.computed += 1
        data = bytes(payload)[::-1]
        half = len(data) // 2
        buffers = (memoryview(data[:half]), memoryview(data[half:]))
        return Computed.of(b"head", buffers, len(data), decode_ns=1, compute_ns=2)


def hello(client_id: str = "alice", **changes: object) -> split_pb2.ClientFrame:
    """A hello that agrees with `FakeEngine`, but for ``changes``."""
    values: dict[str, object] = {
        "protocol_version": 3,
        "client_id": client_id,
        "model_id": "fake",
        "weights_hash": "w1",
        "structure_digest": "s1",
        "plan_digest": "p1",
        "environment": {"mha_fastpath": "off", "default_dtype": "float32"},
        "about": {"torch": "2.98"},
    }
    return split_pb2.ClientFrame(hello=split_pb2.Hello(**{**values, **changes}))  # type: ignore[arg-type]


def upload(crossing: Crossing) -> split_pb2.ClientFrame:
    return split_pb2.ClientFrame(cut=split_pb2.CutUpload(digest=crossing.digest, data=crossing.to_bytes()))


def header(id: int, crossing: Crossing, **changes: object) -> split_pb2.ClientFrame:
    """The announcement of a request on `FakeEngine`."""
    values: dict[str, object] = {
        "id": id,
        "cut_digest": crossing.digest,
        "header": b"fake",
        "payload_bytes": crossing.payload_bytes,
    }
    return split_pb2.ClientFrame(request=split_pb2.RequestHeader(**{**values, **changes}))  # type: ignore[arg-type]


def chunk(id: int, offset: int, data: bytes) -> ChunkFrame:
    return ChunkFrame(id, offset, (memoryview(data),))


def cancel(id: int) -> split_pb2.ClientFrame:
    return split_pb2.ClientFrame(cancel=split_pb2.Cancel(id=id))


def acknowledge(*ids: int) -> split_pb2.ClientFrame:
    return split_pb2.ClientFrame(acknowledge=split_pb2.Acknowledge(ids=ids))


class Result:
    """What came for one request."""

    def __init__(self) -> None:
        self.reply: split_pb2.ReplyHeader | None = None
        self.failed: split_pb2.RequestFailed | None = None
        self.data = bytearray()

    @property
    def complete(self) -> bool:
        if self.reply is not None and self.reply.payload:
            return not self.data
        return self.failed is not None or (self.reply is not None and len(self.data) == self.reply.payload_bytes)


class Client:
    """One stream. ``results`` lists what came for each id, in order of arrival; ``others`` all other frames."""

    def __init__(self) -> None:
        self.others: list[split_pb2.ServerFrame] = []
        self.results: dict[int, list[Result]] = {}
        self.error: Exception | None = None
        self.over = False
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, *frames: ClientFrame) -> bool:
        """False when the stream took one of them no more."""
        raise NotImplementedError

    def incoming(self) -> Iterator[split_pb2.ServerFrame | ChunkFrame]:
        """The frames of the server, then the error that ended the stream, if one did."""
        raise NotImplementedError

    def ask(
        self, id: int, data: bytes, crossing: Crossing | None = None, chunk_bytes: int = 1000, **changes: object
    ) -> None:
        """Uploads the cut, announces a request and sends its payload."""
        crossing = crossing or make_crossing(len(data))
        self.send(upload(crossing), header(id, crossing, **changes), *cut(id, [memoryview(data)], chunk_bytes))

    def answer(self, id: int, number: int = 1) -> Result:
        """The ``number``-th complete answer to request ``id``."""
        with self._news:
            assert self._news.wait_for(lambda: self._complete(id) >= number or self.over, PATIENCE), "no answer"
            assert self._complete(id) >= number, f"the stream ended without it: {self.error}"
            return self.results[id][number - 1]

    def other(self, kind: str) -> split_pb2.ServerFrame:
        """The first welcome, or draining."""
        with self._news:
            assert self._news.wait_for(lambda: kind in self._kinds() or self.over, PATIENCE), f"no {kind}"
            return self.others[self._kinds().index(kind)]

    def ended(self) -> Exception | None:
        """Waits for the end of the stream; the error that ended it."""
        with self._news:
            assert self._news.wait_for(lambda: self.over, PATIENCE), "the stream continues"
            return self.error

    def _complete(self, id: int) -> int:
        return sum(result.complete for result in self.results.get(id, []))

    def _kinds(self) -> list[str | None]:
        return [frame.WhichOneof("frame") for frame in self.others]

    def _read(self) -> None:
        try:
            for frame in self.incoming():
                with self._news:
                    self._take(frame)
                    self._news.notify_all()
        except Exception as error:
            self.error = error
        with self._news:
            self.over = True
            self._news.notify_all()

    def _take(self, frame: split_pb2.ServerFrame | ChunkFrame) -> None:
        if isinstance(frame, ChunkFrame):
            result = self.results[frame.id][-1]
            assert frame.offset == len(result.data)
            result.data += b"".join(frame.pieces)
        elif frame.WhichOneof("frame") == "reply":
            self.results.setdefault(frame.reply.id, []).append(Result())
            self.results[frame.reply.id][-1].reply = frame.reply
        elif frame.WhichOneof("frame") == "failed":
            self.results.setdefault(frame.failed.id, []).append(Result())
            self.results[frame.failed.id][-1].failed = frame.failed
        else:
            self.others.append(frame)


class CoreClient(Client):
    """A stream to a core, without a transport."""

    def __init__(
        self,
        core: Core,
        greet: bool = True,
        client_id: str = "alice",
        identity: str = "",
        caller: Caller | None = None,
    ) -> None:
        self.session: StreamSession = core.open(caller or Caller("test", identity))
        super().__init__()
        if greet:
            self.send(hello(client_id))

    def send(self, *frames: ClientFrame) -> bool:
        taken = [self.session.receive(frame) for frame in frames]  # all of them, whatever becomes of the first
        return all(taken)

    def incoming(self) -> Iterator[split_pb2.ServerFrame | ChunkFrame]:
        yield from self.session.frames()

    def leave(self) -> None:
        self.session.disconnect()


class GrpcClient(Client):
    """A stream to a server, through the generated messages alone: none of the project's own serialization."""

    def __init__(self, channel: grpc.Channel, first: split_pb2.ClientFrame | None = None) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method = channel.stream_stream(
            "/isthmus.v1.Split/Session", response_deserializer=split_pb2.ServerFrame.FromString
        )
        self.call = method(iter(self._queue.get, None))
        super().__init__()
        if first is not None:
            self.send(first)

    def send(self, *frames: ClientFrame) -> bool:
        for frame in frames:
            if isinstance(frame, ChunkFrame):
                data = b"".join(frame.pieces)
                frame = split_pb2.ClientFrame(chunk=split_pb2.Chunk(id=frame.id, offset=frame.offset, data=data))
            self.send_bytes(frame.SerializeToString())
        return True

    def send_bytes(self, data: bytes) -> None:
        self._queue.put(data)

    def half_close(self) -> None:
        self._queue.put(None)

    def incoming(self) -> Iterator[split_pb2.ServerFrame | ChunkFrame]:
        for frame in self.call:
            if frame.WhichOneof("frame") == "chunk":
                yield ChunkFrame(frame.chunk.id, frame.chunk.offset, (memoryview(frame.chunk.data),))
            else:
                yield frame

    def refusal(self) -> tuple[str, str]:
        """Waits for the end of the stream; its status and what it says."""
        error = self.ended()
        assert isinstance(error, grpc.RpcError), error
        return self.call.code().name, self.call.details()
