"""Several clients that ask as fast as they are answered, at the least cost of their own: requests are made once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc

from edge_client.transport.wire import CHUNK_BYTES
from protos import PROTOCOL_VERSION
from protos.frames import cut, serialize_client_frame
from protos.isthmus.v1 import split_pb2
from shared_hooks import EarlyOutput, WrappedModel

WINDOW = 2
"""Requests of one client under way: while one is computed, the next arrives."""


class Load:
    """``clients`` streams to a server, all with the same request."""

    def __init__(self, address: str, model_id: str, wrapped: WrappedModel, early: EarlyOutput, clients: int) -> None:
        self._early = early
        self._parcel = early.pack()
        self._channels = [
            grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(clients)
        ]
        self._streams = [
            _Stream(channel, _hello(f"load {number}", model_id, wrapped), early)
            for number, channel in enumerate(self._channels)
        ]

    def rate(self, seconds: float) -> float:
        """Answers in a second, of all clients together."""
        counts = [0] * len(self._streams)
        until = time.perf_counter() + seconds

        def run(number: int) -> None:
            counts[number] = self._streams[number].ask(until, self._early, self._parcel.header, self._parcel.buffers)

        began = time.perf_counter()
        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(counts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.perf_counter() - began)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        for channel in self._channels:
            channel.close()


class _Stream:
    def __init__(self, channel: grpc.Channel, hello: split_pb2.ClientFrame, early: EarlyOutput) -> None:
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        method: grpc.StreamStreamMultiCallable[bytes, split_pb2.ServerFrame] = channel.stream_stream(
            "/isthmus.v1.Split/Session", response_deserializer=split_pb2.ServerFrame.FromString
        )
        self._in: Iterator[split_pb2.ServerFrame] = iter(method(iter(self._out.get, None)))
        self._out.put(hello.SerializeToString())
        upload = split_pb2.CutUpload(digest=early.crossing.digest, data=early.crossing.to_bytes())
        self._out.put(split_pb2.ClientFrame(cut=upload).SerializeToString())
        assert next(self._in).WhichOneof("frame") == "welcome"
        self._id = 0

    def ask(self, until: float, early: EarlyOutput, header: bytes, buffers: tuple[memoryview, ...]) -> int:
        """Answers that came; all that was asked is answered when this returns."""
        nbytes = sum(buffer.nbytes for buffer in buffers)
        answered = waiting = 0
        while True:
            while waiting < WINDOW and time.perf_counter() < until:
                self._id, waiting = self._id + 1, waiting + 1
                request = split_pb2.RequestHeader(
                    id=self._id, cut_digest=early.crossing.digest, header=header, payload_bytes=nbytes
                )
                self._out.put(split_pb2.ClientFrame(request=request).SerializeToString())
                for chunk in cut(self._id, buffers, CHUNK_BYTES):
                    self._out.put(serialize_client_frame(chunk))
            if not waiting:
                return answered
            frame = next(self._in)
            if frame.WhichOneof("frame") == "failed":
                raise RuntimeError(frame.failed.message)
            if frame.WhichOneof("frame") != "reply" or not frame.reply.payload:
                raise RuntimeError("a whole answer in its header was expected")
            done = split_pb2.Acknowledge(ids=[frame.reply.id])
            self._out.put(split_pb2.ClientFrame(acknowledge=done).SerializeToString())
            answered, waiting = answered + 1, waiting - 1

    def close(self) -> None:
        self._out.put(None)


def _hello(client: str, model_id: str, wrapped: WrappedModel) -> split_pb2.ClientFrame:
    return split_pb2.ClientFrame(
        hello=split_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            client_id=client,
            model_id=model_id,
            weights_hash=wrapped.weights_hash(),
            structure_digest=wrapped.structure_digest(),
            environment=wrapped.environment(),
            inline_bytes=64 << 10,
        )
    )


@contextmanager
def loads(
    addresses: dict[str, str], model_id: str, wrapped: WrappedModel, early: EarlyOutput, clients: int
) -> Iterator[dict[str, Load]]:
    """One for each server."""
    with ExitStack() as stack:
        found = {}
        for name, address in addresses.items():
            found[name] = Load(address, model_id, wrapped, early, clients)
            stack.callback(found[name].close)
        yield found
