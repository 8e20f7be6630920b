"""Connections to try, and what crosses them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edge_client.transport import wire
from edge_client.transport.connection import Backoff, Connection
from edge_client.transport.exchange import Exchange, Outgoing
from edge_client.transport.options import ConnectionOptions
from edge_client.transport.times import Stamps
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import (
    DeadlineExceeded,
)
from tests.waiting import PATIENCE


def hello() -> split_pb2.ClientFrame:
    return wire.hello_frame(
        client_id="c",
        model_id="m",
        weights_hash="w",
        structure_digest="s",
        plan_digest="p",
        environment={},
        about={},
    )


@contextmanager
def connected(address: str, describe: Any = None, codec: str = "raw", **options: Any) -> Iterator[Connection]:
    connection = Connection(
        address,
        hello(),
        ConnectionOptions(**{"patience": PATIENCE, **options}),
        Backoff(first=0.02, ceiling=0.2),
        describe=describe,
        codec=codec,
    )
    try:
        yield connection
    finally:
        connection.close()


def exchange(
    request_id: int, payload: bytes, *, seconds: float = PATIENCE, cut: str = "r", pieces: int = 3
) -> Exchange:
    size = max(1, -(-len(payload) // pieces))
    buffers = tuple(memoryview(payload)[start : start + size] for start in range(0, len(payload), size))
    return Exchange(
        request_id,
        Outgoing(cut, b"cut", b"header", buffers, len(payload)),
        until=time.monotonic() + seconds,
        stamps=Stamps(),
        check_header=lambda header, size: None,
    )


def send(connection: Connection, one: Exchange) -> bytes:
    connection.submit(one)
    if not one.wait():
        connection.cancel(one, DeadlineExceeded("too late"))
    if one.error is not None:
        raise one.error
    return bytes(one.payload)


def keepers(address: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"edge-connection {address}"]


class Relay:
    """A TCP relay that can stop passing bytes on, as a machine that lost its power would."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._passing = threading.Event()
        self._passing.set()
        self._generation = 0
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink, self._generation), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, generation: int) -> None:
        try:
            while data := source.recv(1 << 16):
                self._passing.wait()
                if generation != self._generation:
                    return  # frozen once, dead for good
                sink.sendall(data)
        except OSError:
            pass

    def freeze(self) -> None:
        self._passing.clear()

    def thaw(self) -> None:
        self._generation += 1
        self._passing.set()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for one in self._sockets:
            one.close()
