"""What one stream has to send, as the iterator that gRPC reads.

gRPC takes the next frame only after the previous one has passed flow control, and a chunk is cut only when it is taken.
So at most one chunk lies between the frontier and the transport, however large the frontier and however slow the
receiver: that is the back-pressure.

Small frames (hello, cancel) go first; requests follow in order, each completely before the next, because the first to
be complete is the first to be answered. Each message has a cost, whatever its size: so a payload begins in its header's
message, which also carries acknowledgements.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from edge_client.transport import wire
from edge_client.transport.exchange import Exchange, Waiting
from edge_client.transport.options import Counters
from edge_client.transport.times import NO_TABLES, ServerClock, Tables, now_ns
from protos.frames import ChunkFrame, ClientFrame, HeadedReply, HeadedRequest, ServerFrame, cut, reply_of
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import by_name
from shared_hooks.lifecycle import Lifecycle, Stage

# A request whose payload is sent while its head is still running.
#
# The thread that runs the head adds pieces of the payload as they become final; the stream's thread takes them. At
# last the request is closed with the exchange that it has become, or abandoned.


class SendQueue(Protocol):
    """What a stream has to send (`edge_client.transport.outbox.Outbox`), as seen by an `Opening`."""

    def add(self, opening: Opening, buffers: tuple[memoryview, ...]) -> None: ...

    def give_up(self, opening: Opening) -> None: ...


class Opening:
    """An open request. ``header``: its announcement; ``described``: its cut's description. `Connection.begin` sets its
    line.
    """

    def __init__(
        self, header: split_pb2.RequestHeader, described: split_pb2.ClientFrame, known_tables: Tables = NO_TABLES
    ) -> None:
        self.header = header
        self.described = described
        self.known_tables = known_tables
        self.line: SendQueue | None = None
        self.exchange: Exchange | None = None
        """What it has become."""
        self.first_sent: int | None = None
        """When its announcement was sent, by `times.now_ns`."""
        self.nbytes = 0
        self._frames: deque[ClientFrame] = deque([HeadedRequest(header)])

    @property
    def id(self) -> int:
        return self.header.id

    def add(self, buffers: tuple[memoryview, ...]) -> None:
        """Add more of the payload, which must not change until the request is over."""
        if self.line is not None:
            self.line.add(self, buffers)

    def give_up(self) -> None:
        """Give it up."""
        if self.line is not None:
            self.line.give_up(self)

    # for the line, with its lock

    def append(self, buffers: tuple[memoryview, ...], chunk_bytes: int) -> None:
        """As `add`."""
        for chunk in cut(self.id, buffers, chunk_bytes):
            self._frames.append(ChunkFrame(self.id, self.nbytes + chunk.offset, chunk.pieces))
        self.nbytes += sum(buffer.nbytes for buffer in buffers)

    def close(self, exchange: Exchange) -> None:
        """Complete it: ``exchange.outgoing`` is what was added."""
        outgoing = exchange.outgoing
        assert outgoing is not None and outgoing.nbytes == self.nbytes
        self.exchange = exchange
        closing = split_pb2.Closing(id=self.id, header=outgoing.header, payload_bytes=self.nbytes)
        self._frames.append(split_pb2.ClientFrame(closing=closing))

    def next(self) -> ClientFrame | None:
        """Return the next frame, or None if there is none yet."""
        return self._frames.popleft() if self._frames else None

    @property
    def ended(self) -> bool:
        """Whether its last frame was taken."""
        return self.exchange is not None and not self._frames


# Shared memory for payloads to a server on the same machine: they are copied twice, and cross no socket.
#
# It is a memfd, so no name can be left behind, and a server opens it through this process (``/proc/PID/fd/FD``): the
# system decides whether it may. A server that cannot read the nonce at its beginning does not use it.


PAGE: Final = 4096
NONCE_BYTES: Final = 16
LEAST: Final = 32 << 10
"""The least bytes of a payload that is put in shared memory."""


class SendArea:
    """Shared memory of one stream, ``nbytes`` in size, for payloads. Pages that were never written take no memory.

    Not thread-safe, except that another thread may `write` to what `take` returned.
    """

    def __init__(self, nbytes: int) -> None:
        """Raises OSError if there is no such memory."""
        self._fd = os.memfd_create("isthmus-area", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, nbytes)
            self._memory = mmap.mmap(self._fd, nbytes)
        except OSError:
            os.close(self._fd)
            raise
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._memory[:NONCE_BYTES] = self._nonce
        self._taken: dict[int, tuple[int, int]] = {}

    @classmethod
    def made(cls, nbytes: int) -> SendArea | None:
        """Return an area, or None if the system has no such memory or none is wanted."""
        if sys.platform != "linux" or nbytes <= PAGE:
            return None
        try:
            return cls(nbytes)
        except OSError:
            return None

    def description(self) -> split_pb2.Area:
        """Return what a server must know of it."""
        return split_pb2.Area(pid=os.getpid(), fd=self._fd, nbytes=len(self._memory), nonce=self._nonce)

    def take(self, request_id: int, nbytes: int) -> int | None:
        """Return the offset of a place for a payload; None if no gap is large enough."""
        start = PAGE
        for taken, end in sorted(self._taken.values()):
            if start + nbytes <= taken:
                break
            start = -(-end // PAGE) * PAGE
        if start + nbytes > len(self._memory):
            return None
        self._taken[request_id] = start, start + nbytes
        return start

    def write(self, offset: int, buffers: Iterable[memoryview]) -> None:
        """Copy ``buffers`` there, one after the other."""
        for buffer in buffers:
            if buffer.nbytes:
                self._memory[offset : offset + buffer.nbytes] = buffer.cast("B")
                offset += buffer.nbytes

    def free(self, request_id: int) -> None:
        """Free the payload's place. Idempotent."""
        self._taken.pop(request_id, None)

    def close(self) -> None:
        """Close the file; the memory is freed with its last reference."""
        os.close(self._fd)


ACKNOWLEDGE_AFTER_SECONDS: Final = 0.25  # an idle stream acknowledges after this long; a busy one with its next request
LARGE_MESSAGE: Final = 8.0  # times the usual silence while a large message is in flight
ROOM: Final = 64 << 10  # of a message, beside a piece of a payload; a larger header is sent alone
CANCELS_KEPT: Final = 1024  # a stalled stream cannot take more; the deadline on the other side ends the rest


class Outbox(Iterator[ClientFrame]):
    """The frames of one stream. One thread takes, any thread adds. Only ``hello`` is sent before `open`."""

    def __init__(
        self,
        hello: split_pb2.ClientFrame,
        chunk_bytes: int,
        lifecycle: Lifecycle | None = None,
        area: SendArea | None = None,
    ) -> None:
        """``area``: where payloads lie if the server reads it; ``hello`` describes it."""
        self._lifecycle = lifecycle or Lifecycle("edge")
        self._lock = threading.RLock()  # entered directly: a Condition would add two calls each time
        self._changed = threading.Condition(self._lock)
        self._chunk_bytes = chunk_bytes
        self._area = area
        self._into_area: tuple[int, Exchange] | None = None
        """A payload to be copied there before the frame that was chosen is sent, and its place."""
        self._headed = False
        self._control: deque[split_pb2.ClientFrame] = deque([hello], maxlen=CANCELS_KEPT)
        self._acknowledge: list[int] = []
        self._acknowledge_at = 0.0
        self._waiting: deque[Exchange] = deque()
        self._delayed: list[tuple[float, Exchange]] = []
        self._sending: tuple[Exchange, Iterator[ClientFrame]] | None = None
        self._handed_over: Exchange | None = None  # its last chunk was sent with the previous pull
        self._begins: Exchange | None = None  # its first frame is sent with this pull
        self._opening: Opening | None = None
        self._takes_open = False
        self._cuts: set[str] = set()
        self._clock = ServerClock()
        self._sending_cut = False  # a cut's description has not passed flow control yet
        self._begun: dict[int, Exchange] = {}  # sent on this stream, in part or whole, and not answered
        self._limit = 0
        self.inline_bytes = 0
        """A step's payload of at most so many bytes is sent with its header, to an older server, too."""
        self._draining = False
        self._finished = False
        self._aborted = False

    def open(self, max_in_flight: int, message_bytes: int = 0, area: bool = False, takes_open: bool = False) -> None:
        """Start sending requests after the Welcome, ``max_in_flight`` of them unanswered at a time.

        ``message_bytes``: the largest message that the server accepts, with payloads beginning in headers; 0: an older
        server. ``area``: whether it reads the shared memory. ``takes_open``: whether it accepts open requests.
        """
        with self._lock:
            if not area:
                self._area = None
            if message_bytes:
                self._headed = True
                self._chunk_bytes = max(1, min(self._chunk_bytes, message_bytes - ROOM))
                self._takes_open = takes_open
            self._limit = max(1, max_in_flight)
            self._changed.notify()

    def put(self, exchange: Exchange, delay: float = 0.0) -> None:
        """Send ``exchange`` after those before it, at the earliest ``delay`` seconds from now."""
        with self._lock:
            self._leave(exchange.id)
            if delay > 0:
                self._delayed.append((time.monotonic() + delay, exchange))
            else:
                self._waiting.append(exchange)
            self._changed.notify()

    def begin(self, opening: Opening) -> bool:
        """Send an open request, unless others are in progress, whose work uses the time of its head; returns whether it
        is sent.
        """
        with self._lock:
            busy = self._begun or self._waiting or self._delayed or self._opening is not None
            over = self._draining or self._finished or self._aborted
            if not self._takes_open or self._area is not None or busy or over:
                return False
            self._opening, opening.line = opening, self
            self._changed.notify()
            return True

    def add(self, opening: Opening, buffers: tuple[memoryview, ...]) -> None:
        """Add to an open request's payload; no effect if it is over."""
        with self._lock:
            if self._opening is opening:
                opening.append(buffers, self._chunk_bytes)
                self._changed.notify()

    def close(self, opening: Opening, exchange: Exchange) -> bool:
        """Complete an open request as ``exchange``. Returns False if it is over and must be sent again."""
        with self._lock:
            if self._opening is not opening or self._draining or self._finished or self._aborted:
                self._opening = None if self._opening is opening else self._opening
                return False
            opening.close(exchange)
            self._begun[exchange.id] = exchange
            exchange.begin_send(opening.first_sent)
            self._changed.notify()
            return True

    def give_up(self, opening: Opening) -> None:
        """Give up an open request."""
        with self._lock:
            if self._opening is opening:
                self._opening = None
                if opening.first_sent is not None:
                    self._control.append(split_pb2.ClientFrame(cancel=split_pb2.Cancel(id=opening.id)))
                self._changed.notify()

    def refused(self, request_id: int) -> None:
        """The server refused it: an open request, or one that was given up."""
        with self._lock:
            opening = self._opening
            if opening is not None and opening.id == request_id and opening.exchange is None:
                self._opening = None
                self._cuts.discard(opening.header.cut_digest)  # it may be what the server is missing
        self.answered(request_id)

    def forget_cut(self, digest: str) -> None:
        """The server has dropped this cut's description: it is sent again with the next request that names it."""
        with self._lock:
            self._cuts.discard(digest)

    def answered(self, request_id: int, acknowledge: bool = True) -> None:
        """The answer has come: make room for the next request, and let the server forget it."""
        with self._lock:
            self._leave(request_id)
            if acknowledge:
                if not self._acknowledge:
                    self._acknowledge_at = time.monotonic() + ACKNOWLEDGE_AFTER_SECONDS
                self._acknowledge.append(request_id)
            self._changed.notify()

    @property
    def draining(self) -> bool:
        """Whether the server has announced that it shuts down."""
        return self._draining

    def patience(self) -> float:
        """Return the multiple of the usual silence that is tolerated now; 0 if nothing is expected.

        A cut's description is one message, and so is a chunk of an answer: nothing is heard while they are in transit.
        """
        with self._lock:
            if not self._begun:
                return 0.0
            large = self._sending_cut or any(exchange.receiving for exchange in self._begun.values())
            return LARGE_MESSAGE if large else 1.0

    def cancel(self, request_id: int) -> None:
        """Cancel a request on the server, if it knows of it."""
        with self._lock:
            if self._leave(request_id):
                self._control.append(split_pb2.ClientFrame(cancel=split_pb2.Cancel(id=request_id)))
            self._changed.notify()

    def drain(self) -> None:
        """Begin no further requests; end the stream when those begun are answered."""
        with self._lock:
            self._draining = True
            self._finished = self._finished or not self._begun
            self._changed.notify()

    def pong(self, number: int, clock: int) -> None:
        """Process the server's clock in the answer to a ping."""
        with self._lock:
            self._clock.pong(number, clock, now_ns())
            if self._clock.is_new:
                self._changed.notify()

    def server_clock(self, now: int) -> tuple[int, int] | None:
        """`ServerClock.offset`."""
        with self._lock:
            return self._clock.offset(now)

    def finish(self) -> None:
        """End the stream after what has been begun."""
        with self._lock:
            self._finished = True
            self._changed.notify()

    def abort(self) -> None:
        """Release the thread that takes frames at once, because the stream is dead."""
        with self._lock:
            self._aborted = True
            self._changed.notify()

    def __next__(self) -> ClientFrame:
        self._sent()
        frame = self._wait()
        if (begins := self._begins) is not None:
            self._begins = None
            self._lifecycle.emit(Stage.BEFORE_SEND, begins.about, nbytes=begins.bytes_up)
        self._fill_area()
        return frame

    def _fill_area(self) -> None:
        """Copy a payload to the shared memory, without the lock because it takes time."""
        filling, self._into_area = self._into_area, None
        if filling is not None and self._area is not None and (outgoing := filling[1].outgoing) is not None:
            self._area.write(filling[0], outgoing.buffers)

    def _sent(self) -> None:
        """Called when gRPC asks for the next frame: the previous one is being sent."""
        with self._lock:
            if self._aborted:
                raise StopIteration
            sent, self._handed_over = self._handed_over, None
            if sent is not None:
                sent.stamps.last_sent = now_ns()
        if sent is not None:
            self._lifecycle.emit(Stage.AFTER_SEND, sent.about, nbytes=sent.bytes_up)

    def _wait(self) -> ClientFrame:
        with self._lock:
            while not self._aborted:
                frame = self._pick()
                if frame is not None:
                    return frame
                if self._finished:
                    raise StopIteration
                self._changed.wait(self._seconds_to_next())
            raise StopIteration

    def _leave(self, request_id: int) -> bool:
        """Remove a request from those begun; returns whether it was one. The last one of a draining stream ends it."""
        left = self._begun.pop(request_id, None) is not None
        if self._area is not None:
            self._area.free(request_id)
        if self._draining and not self._begun:
            self._finished = True
        return left

    def _pick(self) -> ClientFrame | None:
        if self._control:
            return self._control.popleft()
        if self._limit and (self._waiting or self._clock.is_new) and self._clock.wants(now := now_ns()):
            return split_pb2.ClientFrame(ping=split_pb2.Ping(number=self._clock.ping(now)))
        was_sending = self._sending is not None
        frame = self._continue() or self._open_frame()
        if frame is not None:
            return frame
        # with a request, or after one, while the server computes; not before one, which it would delay
        if self._acknowledge and (self._finished or was_sending or time.monotonic() >= self._acknowledge_at):
            return split_pb2.ClientFrame(acknowledge=split_pb2.Acknowledge(ids=self._take_acknowledged()))
        while self._can_begin():
            exchange = self._waiting.popleft()
            if exchange.settled:
                continue
            self._begun[exchange.id] = exchange
            exchange.begin_send()
            self._begins = exchange
            self._sending = exchange, self._frames(exchange)
            frame = self._continue()
            if frame is not None:
                return frame
        return None

    def _take_acknowledged(self) -> list[int]:
        ids, self._acknowledge = self._acknowledge, []
        return ids

    def _continue(self) -> ClientFrame | None:
        """Return the next frame of the request being sent; None if there is none."""
        if self._sending is None:
            return None
        exchange, frames = self._sending
        # The remaining chunks of a request that was answered, refused or abandoned in the middle are not sent, and
        # one that is to be retried (not among those begun) starts over with its header.
        frame = None if exchange.settled or exchange.id not in self._begun else next(frames, None)
        if frame is None:
            self._sending, self._sending_cut = None, False
        return frame

    def _open_frame(self) -> ClientFrame | None:
        """Return the next frame of the open request; None if there is none."""
        if (opening := self._opening) is None:
            return None
        exchange = opening.exchange
        if exchange is not None and (exchange.settled or self._begun.get(exchange.id) is not exchange):
            self._opening = None  # it was refused, or is to be retried
            return None
        if opening.header.cut_digest not in self._cuts:
            self._cuts.add(opening.header.cut_digest)
            return opening.described
        frame = opening.next()
        if frame is not None and opening.first_sent is None:
            opening.first_sent = now_ns()
        if opening.ended:
            self._opening, self._handed_over, self._begins = None, exchange, exchange
        return frame

    def _frames(self, exchange: Exchange) -> Iterator[ClientFrame]:
        outgoing = exchange.outgoing
        if outgoing is None:
            return
        described = outgoing.file is None and outgoing.decoding is None
        if described and outgoing.cut_digest not in self._cuts:
            self._cuts.add(outgoing.cut_digest)
            self._sending_cut = True
            yield wire.cut_frame(outgoing.cut_digest, outgoing.cut_data)
            self._sending_cut = False
        known = self._clock.offset(now := now_ns())
        sent = 0 if known is None else max(0, now - known[0])
        header = wire.request_header(exchange, outgoing, self._take_acknowledged() if self._headed else (), sent)
        if self._area is not None and outgoing.nbytes >= LEAST:
            offset = self._area.take(exchange.id, outgoing.nbytes)
            if offset is not None:
                header.area_offset = offset
                self._into_area, self._handed_over = (offset, exchange), exchange
                yield HeadedRequest(header)
                return
        left = outgoing.nbytes
        chunks = cut(exchange.id, outgoing.buffers, self._chunk_bytes)
        whole = outgoing.decoding is not None and outgoing.nbytes <= self.inline_bytes
        first = next(chunks, None) if whole or (self._headed and header.ByteSize() <= ROOM // 2) else None
        opening: HeadedRequest | ChunkFrame = HeadedRequest(header, first.pieces if first else ())
        for frame in itertools.chain((opening,), chunks):
            left -= frame.nbytes
            if not left:
                self._handed_over = exchange
            yield frame

    def _can_begin(self) -> bool:
        now, over = time.monotonic(), self._draining or self._finished
        if self._delayed:
            for due, exchange in [entry for entry in self._delayed if entry[0] <= now]:
                self._delayed.remove((due, exchange))
                self._waiting.append(exchange)
        open_one = self._opening is not None and self._opening.exchange is None
        return bool(self._waiting) and not over and len(self._begun) + open_one < self._limit

    def _seconds_to_next(self) -> float | None:
        times = [due for due, _ in self._delayed] if self._delayed else []
        if self._acknowledge:
            times.append(self._acknowledge_at)
        return max(0.0, min(times) - time.monotonic()) if times else None


# What arrives on one accepted stream: answers in pieces, failures, and the announcement of a drain.


PUT_OFF_SECONDS: Final = (0.1, 2.0)  # first and longest delay before a request is retried that the server postponed


class Inbox:
    """Passes frames to the requests that they belong to. One thread calls `take`."""

    def __init__(
        self,
        address: str,
        welcome: split_pb2.Welcome,
        waiting: Waiting,
        outbox: Outbox,
        counters: Counters,
        lifecycle: Lifecycle,
    ) -> None:
        self._address = address
        self._welcome = welcome
        self._waiting = waiting
        self._outbox = outbox
        self._counters = counters
        self._lifecycle = lifecycle

    def take(self, frame: ServerFrame) -> None:
        """Process a frame; unknown kinds, of later servers, are skipped."""
        if isinstance(frame, ChunkFrame):
            if exchange := self._find(frame.id):
                exchange.take_chunk(frame)
                self._if_settled(exchange)
            return
        if isinstance(frame, HeadedReply):
            self._take_reply(frame)
            return
        kind = frame.WhichOneof("frame")
        if kind == "reply":
            self._take_reply(reply_of(frame.reply))
        elif kind == "failed":
            self._take_failure(frame.failed)
        elif kind == "pong":
            self._outbox.pong(frame.pong.number, frame.pong.clock_ns)
        elif kind == "draining":
            self._lifecycle.emit(Stage.BEFORE_DRAIN, address=self._address)
            self._outbox.drain()

    def _take_reply(self, frame: HeadedReply) -> None:
        if exchange := self._find(frame.header.id):
            exchange.stamps.clock = self._outbox.server_clock(now_ns())
            exchange.take_reply(frame.header, frame.pieces)
            self._if_settled(exchange)
        else:
            self._counters.stray += 1
            self._outbox.answered(frame.header.id)

    def _take_failure(self, failed: split_pb2.RequestFailed) -> None:
        exchange = self._find(failed.id)
        if exchange is None:
            self._outbox.refused(failed.id)
            return
        error = by_name(failed.error)(f"{failed.message} (reported by {self._address})")
        error.retry_after_seconds = failed.retry_after_ms / 1e3 or None
        if failed.retry:  # until the deadline, which then reports this error
            first, longest = PUT_OFF_SECONDS
            delay = min(longest, first * 2**exchange.put_offs)
            exchange.put_off(error)
            self._outbox.forget_cut(exchange.cut_digest)  # it may be what the server is missing
            self._outbox.put(exchange, delay)
        else:
            exchange.settle(error)
            self._if_settled(exchange)

    def _find(self, request_id: int) -> Exchange | None:
        with self._waiting.changed:
            return self._waiting.find(request_id)

    def _if_settled(self, exchange: Exchange) -> None:
        if exchange.settled:
            with self._waiting.changed:
                self._waiting.leave(exchange)
                if exchange.breaks:  # it may have been what the others wait for
                    self._outbox.open(self._waiting.limit(self._welcome))
            self._outbox.answered(exchange.id)
