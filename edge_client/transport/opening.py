"""A request whose payload begins to leave while its head is still running.

The thread that runs the head adds pieces of the payload as they become final; the stream's thread takes them. At last
the request is closed with the exchange that it has become, or given up.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from edge_client.transport.exchange import Exchange
from protos.chunks import ChunkFrame, cut
from protos.frames import ClientFrame
from protos.headed import HeadedRequest
from protos.isthmus.v1 import split_pb2


class Line(Protocol):
    """What a stream has still to send (`edge_client.transport.outbox.Outbox`)."""

    def add(self, opening: Opening, buffers: tuple[memoryview, ...]) -> None: ...

    def give_up(self, opening: Opening) -> None: ...


class Opening:
    """``header`` is its announcement, ``described`` its cut's description. `Connection.begin` gives it its line."""

    def __init__(self, header: split_pb2.RequestHeader, described: split_pb2.ClientFrame) -> None:
        self.header = header
        self.described = described
        self.line: Line | None = None
        self.exchange: Exchange | None = None
        """What it has become."""
        self.first_sent: int | None = None
        """When its announcement left, by `times.now_ns`."""
        self.nbytes = 0
        self._frames: deque[ClientFrame] = deque([HeadedRequest(header)])

    @property
    def id(self) -> int:
        return self.header.id

    def add(self, buffers: tuple[memoryview, ...]) -> None:
        """More of the payload, which stays as it is until the request is over."""
        if self.line is not None:
            self.line.add(self, buffers)

    def give_up(self) -> None:
        """It comes to nothing."""
        if self.line is not None:
            self.line.give_up(self)

    # for the line, with its lock

    def append(self, buffers: tuple[memoryview, ...], chunk_bytes: int) -> None:
        """As `add`."""
        for chunk in cut(self.id, buffers, chunk_bytes):
            self._frames.append(ChunkFrame(self.id, self.nbytes + chunk.offset, chunk.pieces))
        self.nbytes += sum(buffer.nbytes for buffer in buffers)

    def close(self, exchange: Exchange) -> None:
        """All is there: ``exchange.outgoing`` is what was added."""
        outgoing = exchange.outgoing
        assert outgoing is not None and outgoing.nbytes == self.nbytes
        self.exchange = exchange
        closing = split_pb2.Closing(id=self.id, header=outgoing.header, payload_bytes=self.nbytes)
        self._frames.append(split_pb2.ClientFrame(closing=closing))

    def next(self) -> ClientFrame | None:
        """The next frame; None where there is none yet."""
        return self._frames.popleft() if self._frames else None

    @property
    def ended(self) -> bool:
        """Whether its last frame was taken."""
        return self.exchange is not None and not self._frames
