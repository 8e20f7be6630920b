"""The hostile client's means: channels, streams and frames by the protocol's definition alone; its answers."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from protos.isthmus.v1 import split_pb2
from studies.siege.material import DIGITS, Material, Recorded

SERVICE = "/isthmus.v1.Split/"
CHUNK = 256 << 10
ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Stranger:
    """One hostile client. ``seconds``: how long it continues; ``over`` says that this is past."""

    def __init__(self, address: str, material: Material, seconds: float, token: str = "", victims: Iterable[str] = ()):
        self.address = address
        self.material = material
        self.victims = list(victims)
        """Client ids of others, as they go over the wire."""
        self.rate = 500.0
        """Requests a second, for cases that send at a rate."""
        self.sent: Counter[str] = Counter()
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        self._until = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._reported: Counter[str] = Counter()
        self._example: dict[str, str] = {}
        self._about: dict[str, split_pb2.ModelInfo] = {}
        self._serial = 0
        self._closing: list[Callable[[], Any]] = []

    # Time

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._until

    def rest(self, seconds: float) -> bool:
        """Waits; False when the time is over."""
        time.sleep(max(0.0, min(seconds, self._until - time.monotonic())))
        return not self.over

    def wait(self) -> None:
        """Until the time is over."""
        self.rest(1e9)

    # The answers it gets

    def hear(self, text: str) -> None:
        """Counts what the server said; numbers and ids make no difference."""
        kind = re.sub(r"[0-9a-f]{16,}|\d+(\.\d+)?", "N", text.replace("\n", " "))[:240]
        with self._lock:
            self._reported[kind] += 1
            self._example.setdefault(kind, text[:400])

    def reported(self) -> list[tuple[str, int]]:
        """What was said, an example each, the most frequent first."""
        with self._lock:
            return [(self._example[kind], count) for kind, count in self._reported.most_common()]

    def hear_error(self, error: grpc.RpcError) -> None:
        self.hear(f"{error.code().name}: {error.details() or ''}")  # type: ignore[attr-defined]

    # Calls

    def channel(self, options: Iterable[tuple[str, Any]] = (), **more: Any) -> grpc.Channel:
        """A connection of its own."""
        made = grpc.insecure_channel(self.address, [*ANY_SIZE, ("grpc.use_local_subchannel_pool", 1), *options], **more)
        self._closing.append(made.close)
        return made

    def about(self, model_id: str) -> split_pb2.ModelInfo:
        """What the server says of a model."""
        if not self._about:
            with grpc.insecure_channel(self.address) as channel:
                ask = channel.unary_unary(
                    SERVICE + "ListModels",
                    request_serializer=split_pb2.ListModelsRequest.SerializeToString,
                    response_deserializer=split_pb2.ListModelsReply.FromString,
                )
                reply = ask(split_pb2.ListModelsRequest(), timeout=10, metadata=self._metadata)
            self._about = {model.model_id: model for model in reply.models}
        return self._about[model_id]

    def hello(self, model_id: str = DIGITS, client_id: str = "", **other: Any) -> split_pb2.ClientFrame:
        """A greeting that is taken."""
        about = self.about(model_id)
        with self._lock:
            self._serial += 1
            serial = self._serial
        made = split_pb2.Hello(
            protocol_version=3,
            client_id=client_id or f"hostile-{serial}",
            model_id=model_id,
            weights_hash=about.weights_hash,
            structure_digest=about.structure_digest,
            plan_digest=about.plan_digest,
            environment=self.material.environment[model_id],
            inline_bytes=64 << 10,
        )
        for name, value in other.items():
            setattr(made, name, value)
        return split_pb2.ClientFrame(hello=made)

    def stream(
        self,
        model_id: str = DIGITS,
        channel: grpc.Channel | None = None,
        hello: split_pb2.ClientFrame | bytes | None = None,
        greet: bool = True,
        read: bool = True,
        acknowledge: bool = True,
        client_id: str = "",
        **more: Any,
    ) -> Stream:
        """An open stream, greeted or not. Without ``read``, nothing that comes back is ever fetched."""
        made = Stream(self, channel or self.channel(), read, acknowledge, **more)
        if greet:
            made.put(hello or self.hello(model_id, client_id))
        self._closing.append(made.close)
        return made

    def call(self, method: str, request: bytes, timeout: float, stream: bool = False, **more: Any) -> Any:
        """Any RPC with a single request, by its full name; bytes in and out."""
        channel = more.pop("channel", None) or self.channel()
        kind = channel.unary_stream if stream else channel.unary_unary
        metadata = [*self._metadata, *more.pop("metadata", [])]
        return kind(method)(request, timeout=timeout, metadata=metadata, **more)

    def close(self) -> None:
        for close in reversed(self._closing):
            with contextlib.suppress(Exception):
                close()

    def together(self, count: int, work: Callable[[int], Any]) -> None:
        """``work`` in so many threads, until the last has ended; at most until a little after the time is over."""
        threads = [threading.Thread(target=self._quietly, args=(work, k), daemon=True) for k in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.01, self._until - time.monotonic() + 2))

    def _quietly(self, work: Callable[[int], Any], number: int) -> None:
        try:
            work(number)
        except grpc.RpcError as error:
            self.hear_error(error)
        except StreamEnded:
            pass


class StreamEnded(Exception):
    """The server has ended the stream; what it said was heard."""


class Stream:
    """One standing stream. `put` blocks while what was put before is not on its way."""

    def __init__(self, stranger: Stranger, channel: grpc.Channel, read: bool, acknowledge: bool, **more: Any) -> None:
        self._stranger = stranger
        self._acknowledge = acknowledge
        self._frames: queue.Queue[split_pb2.ClientFrame | bytes | None] = queue.Queue(maxsize=64)
        self.ended = threading.Event()
        self.welcomed = threading.Event()
        """Or an answer that it is not: see `greeted`."""
        self.greeted = False
        self.answered = 0
        metadata = [*stranger._metadata, *more.pop("metadata", [])]
        call = channel.stream_stream(
            SERVICE + "Session",
            request_serializer=lambda frame: frame if isinstance(frame, bytes) else frame.SerializeToString(),
            response_deserializer=split_pb2.ServerFrame.FromString,
        )
        self.call = call(iter(self._frames.get, None), metadata=metadata, **more)
        if read:
            threading.Thread(target=self._read, daemon=True).start()

    def put(self, frame: split_pb2.ClientFrame | bytes, seconds: float = 1e9) -> None:
        """Raises StreamEnded, also when the time is over."""
        deadline = time.monotonic() + seconds
        while not self.ended.is_set() and not self._stranger.over and time.monotonic() < deadline:
            try:
                self._frames.put(frame, timeout=0.2)
                self._stranger.sent["frames"] += 1
                return
            except queue.Full:
                continue
        raise StreamEnded

    def upload(self, request: Recorded) -> None:
        """The cut's description."""
        self.put(split_pb2.ClientFrame(cut=split_pb2.CutUpload(digest=request.digest, data=request.crossing)))

    def ask(self, id: int, request: Recorded, share: float = 1.0, **other: Any) -> None:
        """A request whose cut is uploaded, and this share of its payload."""
        header = split_pb2.RequestHeader(
            id=id, cut_digest=request.digest, header=request.header, payload_bytes=len(request.payload)
        )
        for name, value in other.items():
            if isinstance(value, list):
                getattr(header, name).extend(value)
            else:
                setattr(header, name, value)
        self.put(split_pb2.ClientFrame(request=header))
        for frame in chunks(id, request.payload[: int(share * len(request.payload))]):
            self.put(frame)

    def announce_file(self, id: int, nbytes: int, suffix: str = ".npy", checksum: int = 0) -> None:
        """A request with an input file of so many bytes, which do not follow."""
        from studies.siege.material import file_header

        file = split_pb2.FileInput(suffix=suffix, preprocess_digest=self._stranger.about(DIGITS).preprocess_digest)
        padded = -(-nbytes // 64) * 64
        header = split_pb2.RequestHeader(id=id, header=file_header(nbytes, checksum), payload_bytes=padded, file=file)
        self.put(split_pb2.ClientFrame(request=header))

    def _read(self) -> None:
        try:
            for frame in self.call:
                kind = frame.WhichOneof("frame")
                if kind == "welcome":
                    self.greeted = True
                    self.welcomed.set()
                elif kind == "failed":
                    self._stranger.hear(f"{frame.failed.error}: {frame.failed.message}")
                elif kind == "reply":
                    self.answered += 1
                    self._stranger.sent["answers"] += 1
                    if self._acknowledge:
                        acknowledge = split_pb2.Acknowledge(ids=[frame.reply.id])
                        self._frames.put(split_pb2.ClientFrame(acknowledge=acknowledge), timeout=5)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                self._stranger.hear_error(error)
        except queue.Full:
            pass
        finally:
            self.ended.set()
            self.welcomed.set()

    def close(self) -> None:
        self.ended.set()
        with contextlib.suppress(queue.Full):
            self._frames.put_nowait(None)
        self.call.cancel()


def chunks(id: int, payload: bytes, size: int = CHUNK) -> Iterator[split_pb2.ClientFrame]:
    """A payload in pieces."""
    for offset in range(0, len(payload), size):
        data = payload[offset : offset + size]
        yield split_pb2.ClientFrame(chunk=split_pb2.Chunk(id=id, offset=offset, data=data))


def varied(request: Recorded, number: int) -> bytes:
    """The description of another cut: as valid to the eye, and with a digest of its own."""
    reported = json.loads(request.crossing)
    reported["path"] = f"{number:032x}"
    return json.dumps(reported, separators=(",", ":")).encode()
