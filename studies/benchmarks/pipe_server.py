"""One pipe's other end: it takes payloads into memory of its own and answers each with a few bytes. Nothing else.

``python -m studies.benchmarks.pipe_server KIND ADDRESS [kept]``; KIND: grpc, asyncio, socket, flight. ``kept``: freed
memory is kept, as the real server keeps it. A message of gRPC is a kind (one letter), a size (8 bytes) and bytes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent import futures
from typing import Any

import grpc

from cloud_server.limits import Limits
from cloud_server.scheduling import few_heaps
from cloud_server.transport.server import options

SERVICE, METHOD = "isthmus.Pipe", "Session"
FRONT = 9
"""Bytes of a message before its data."""
HEADER, CHUNK, AREA, SHARED = b"H", b"C", b"A", b"S"
ANSWER = bytes(300)
MOST = 64 << 20


class Sink:
    """One client's payloads, one at a time."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(MOST))
        self._nbytes = self._filled = 0
        self._area = -1

    def take(self, message: bytes) -> bool:
        """Whether a payload is complete."""
        kind, number = message[:1], int.from_bytes(message[1:FRONT], "little")
        data = memoryview(message)[FRONT:]
        if kind == AREA:
            self._area = os.open(bytes(data).decode(), os.O_RDONLY)
            return True
        if kind == SHARED:
            return os.preadv(self._area, [self._buffer[:number]], 0) == number
        if kind == HEADER:
            self._nbytes, self._filled = number, 0
        self._buffer[self._filled : self._filled + data.nbytes] = data
        self._filled += data.nbytes
        return self._filled == self._nbytes


def session(messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
    sink = Sink()
    for message in messages:
        if sink.take(message):
            yield ANSWER


async def session_of_asyncio(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    sink = Sink()
    async for message in messages:
        if sink.take(message):
            yield ANSWER


def _handlers(behaviour: Any) -> tuple[grpc.GenericRpcHandler]:
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(behaviour)
    return (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)


def serve_grpc(address: str) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(4), options=options(Limits().max_message_bytes, streams=4))
    server.add_generic_rpc_handlers(_handlers(session))
    port = server.add_insecure_port(address)
    server.start()
    _say(port)
    threading.Event().wait()


async def serve_asyncio(address: str) -> None:
    server = grpc.aio.server(options=options(Limits().max_message_bytes, streams=4))
    server.add_generic_rpc_handlers(_handlers(session_of_asyncio))
    port = server.add_insecure_port(address)
    await server.start()
    _say(port)
    await server.wait_for_termination()


def serve_socket(address: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    _say(0)
    stream, _ = listener.accept()
    buffer, front = memoryview(bytearray(MOST)), memoryview(bytearray(FRONT))
    while _fill(stream, front):
        _fill(stream, buffer[: int.from_bytes(front[1:], "little")])
        stream.sendall(ANSWER)


def _fill(stream: socket.socket, view: memoryview) -> bool:
    while view.nbytes:
        if not (count := stream.recv_into(view)):
            return False
        view = view[count:]
    return True


def serve_flight(address: str) -> None:
    import pyarrow
    from pyarrow import flight

    buffer = memoryview(bytearray(MOST))

    class Server(flight.FlightServerBase):  # type: ignore[misc, unused-ignore]
        def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            answer = pyarrow.record_batch([pyarrow.array([ANSWER])], names=["answer"])
            writer.begin(answer.schema)
            for chunk in reader:
                data = memoryview(chunk.data.column(0).buffers()[1]).cast("B")
                buffer[: data.nbytes] = data
                writer.write_batch(answer)

    server = Server(address)
    _say(server.port)
    server.serve()


def _say(port: int) -> None:
    print(f"listening on 127.0.0.1:{port}", flush=True)


def main() -> None:
    kind, address, *more = sys.argv[1:]
    if more:
        few_heaps()
    if kind == "asyncio":
        asyncio.run(serve_asyncio(address))
    else:
        {"grpc": serve_grpc, "socket": serve_socket, "flight": serve_flight}[kind](address)


if __name__ == "__main__":
    main()
