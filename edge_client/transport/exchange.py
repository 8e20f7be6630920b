"""One request and its answer: what is sent, what has come, and which requests wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from edge_client.transport.times import NO_TABLES, Stamps, Tables, now_ns
from protos.frames import ChunkFrame
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import BadFrame, Disagreement, IsthmusError, RemoteError, TooLarge
from shared_hooks.lifecycle import About, Lifecycle, Stage


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A packed frontier for the connection: bytes, and the digest of the cut's description.

    ``file``: the payload is an input file of this kind instead, and there is no cut. ``decoding``: it is step ``step``
    of session ``session``, and has no description of a cut.
    """

    cut_digest: str
    cut_data: bytes
    header: bytes
    buffers: tuple[memoryview, ...]
    nbytes: int
    file: split_pb2.FileInput | None = None
    decoding: split_pb2.Decoding | None = None
    session: int = 0
    step: int = 0
    codecs: tuple[str, ...] = ()
    """The codec of each tensor of a frontier, by name."""
    route: tuple[split_pb2.Hop, ...] = ()
    """The parts of the model after the server's, and their servers."""


class Exchange:
    """One request id, used by the requesting thread, the stream's sender and its reader; settled exactly once.

    `check_header` (header, announced bytes) raises for an implausible size of the answer, before its memory is
    allocated. `on_settled` runs once, in whatever thread settles it.
    """

    def __init__(
        self,
        request_id: int,
        outgoing: Outgoing,
        *,
        until: float,
        stamps: Stamps,
        check_header: Callable[[bytes, int], None],
        want_metrics: bool = True,
        known_tables: Tables = NO_TABLES,
        together: bool = False,
        observers: Sequence[str] = (),
        about: About | None = None,
        lifecycle: Lifecycle | None = None,
        on_settled: Callable[[], None] = lambda: None,
    ) -> None:
        self.id = request_id
        self.cut_digest = outgoing.cut_digest
        self.payload_bytes = outgoing.nbytes
        self.is_step = outgoing.decoding is not None
        self.until = until  # time.monotonic() at which the caller gives up
        self.stamps = stamps
        self.want_metrics = want_metrics
        self.known_tables = known_tables  # the server does not describe them again
        self.together = together  # whether the server may compute it as part of a batch
        self.observers = observers
        self.about = about or About(request_id, 0)
        self._lifecycle = lifecycle or Lifecycle("edge")
        self.sends = 0  # how often the request was begun on a stream
        self.breaks = 0  # how many streams broke during it, not ended by this side
        self.interruptions = 0  # ... including those that this side ended because they were silent
        self.put_offs = 0  # how often the server asked for a retry
        self.put_off_by: IsthmusError | None = None  # ... and why, the last time
        self.bytes_up = len(outgoing.header) + outgoing.nbytes
        self.bytes_down = 0
        self.reply: split_pb2.ReplyHeader | None = None
        self.payload = bytearray()
        self.error: IsthmusError | None = None
        self._outgoing: Outgoing | None = outgoing
        self._check_header = check_header
        self._filled = 0
        self._on_stream = False
        self._on_settled = on_settled
        self.settled = False
        """Whether there is an answer or an error."""
        self._lock = threading.Lock()
        self._until_settled = threading.Lock()  # held until it is settled
        self._until_settled.acquire()

    @property
    def outgoing(self) -> Outgoing | None:
        """What to send; None once settled, so that a late sender does not keep the frontier alive."""
        return self._outgoing

    def remaining(self) -> float:
        """Return the seconds left, at least 0."""
        return max(0.0, self.until - time.monotonic())

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until settled, at most ``seconds`` (default: the time left); returns whether it is."""
        seconds = self.until - time.monotonic() if seconds is None else seconds
        if not self.settled and self._until_settled.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX)):
            self._until_settled.release()  # for the next waiter
        return self.settled

    def begin_send(self, began: int | None = None) -> None:
        """Record that a stream begins to send this request: the stamps are those of the attempt that is answered.

        ``began``: when that was, if earlier.
        """
        self.sends += 1
        self._on_stream = True
        self.stamps.first_sent = now_ns() if began is None else began
        self.stamps.last_sent = None

    @property
    def receiving(self) -> bool:
        """Whether a part of its answer has come."""
        return self.reply is not None and not self.settled

    def interrupted(self, suspect: bool = True) -> None:
        """Discard a partial answer, because the stream broke. ``suspect``: this request may be the cause."""
        self.interruptions += self._on_stream
        self.breaks += self._on_stream and suspect
        self._start_over()

    def put_off(self, error: IsthmusError) -> None:
        """Record that the server wants the request again later; ``error`` says why."""
        self.put_offs += 1
        self.put_off_by = error
        self._start_over()

    def take_reply(self, reply: split_pb2.ReplyHeader, first: tuple[memoryview, ...] = ()) -> None:
        """Process the answer's header, with its first bytes. A second one restarts the answer (the request was sent
        again).
        """
        if self.settled:
            return
        self.stamps.replied = now_ns()
        self._lifecycle.emit(Stage.BEFORE_RECEIVE, self.about, nbytes=reply.payload_bytes)
        try:
            self._check_header(reply.header, reply.payload_bytes)
        except IsthmusError as error:
            self.settle(error)
            return
        self.reply, self.payload, self._filled = reply, bytearray(reply.payload_bytes), 0
        self.bytes_down = len(reply.header) + reply.payload_bytes
        if first:
            self.take_chunk(ChunkFrame(self.id, 0, first))
        else:
            self._settle_if_full()

    def take_chunk(self, chunk: ChunkFrame) -> None:
        """Process a piece of the answer; pieces come in order and stay within the announced size."""
        if self.settled or self.reply is None:
            return
        end = chunk.offset + chunk.nbytes
        if chunk.offset != self._filled or end > len(self.payload):
            self.settle(
                BadFrame(
                    f"answer {self.id}: a chunk of {chunk.nbytes} bytes at {chunk.offset}, where {self._filled} of "
                    f"{len(self.payload)} bytes had come"
                )
            )
            return
        with memoryview(self.payload) as payload:
            for piece in chunk.pieces:
                payload[self._filled : self._filled + piece.nbytes] = piece
                self._filled += piece.nbytes
        self._settle_if_full()

    def settle(self, error: IsthmusError | None = None) -> bool:
        """End the exchange, with ``error`` if given; returns False if it had ended before."""
        with self._lock:
            if self.settled:
                return False
            self.error = error
            self.stamps.received = now_ns()
            self._outgoing = None
            self.settled = True
            self._until_settled.release()
        self._on_settled()
        return True

    def _start_over(self) -> None:
        self._on_stream = False
        self.reply, self.payload, self._filled = None, bytearray(), 0

    def _settle_if_full(self) -> None:
        if self._filled == len(self.payload):
            self._lifecycle.emit(Stage.AFTER_RECEIVE, self.about, nbytes=self.bytes_down)
            self.settle()


# The waiters of a connection: requests without an answer, and callers of `open` without a Welcome.


SUSPECT_BREAKS: Final = 2  # a request during which two streams broke may be the cause: sent alone from then on
MAX_BREAKS: Final = 5  # a request during which five streams broke is the cause

Opener = Future[split_pb2.Welcome]


class Waiting:
    """The requests of a connection that wait. `changed` guards them and the connection's own state; all methods but
    `fail` are called with it held.
    """

    def __init__(self, address: str, max_in_flight: int) -> None:
        self.changed = threading.Condition()
        self._requests: dict[int, Exchange] = {}
        self._openers: list[Opener] = []
        self._since: dict[Exchange | Opener, float] = {}
        self._address = address
        self._most = max_in_flight

    def __len__(self) -> int:
        return len(self._requests) + len(self._openers)

    def add(self, who: Exchange | Opener) -> None:
        """Add a request that waits for an answer, or a caller that waits for a Welcome."""
        self._since.setdefault(who, time.monotonic())
        if isinstance(who, Exchange):
            self._requests[who.id] = who
        else:
            self._openers.append(who)

    def find(self, request_id: int) -> Exchange | None:
        """Return the request that waits under this id, or None."""
        return self._requests.get(request_id)

    def leave(self, who: Exchange | Opener) -> None:
        """Remove a request. Idempotent."""
        self._since.pop(who, None)
        if isinstance(who, Exchange):
            self._requests.pop(who.id, None)
        elif who in self._openers:
            self._openers.remove(who)

    def in_order(self) -> list[Exchange]:
        """Return the requests in the order of submission."""
        return [exchange for _, exchange in sorted(self._requests.items())]

    def take_openers(self) -> list[Opener]:
        """Return the callers of `open`, which wait no longer: the caller gives them the Welcome."""
        openers, self._openers = self._openers, []
        for opener in openers:
            self._since.pop(opener, None)
        return openers

    def left(self, lost: float, patience: float) -> float:
        """Return seconds until the first has waited for ``patience`` without a stream, 0 or more.

        There is none since ``lost``; each counts from when it came, for its patience is its own.
        """
        now = time.monotonic()
        return max(0.0, min((patience - (now - max(lost, since)) for since in self._since.values()), default=patience))

    def take_late(self, lost: float, patience: float) -> list[Exchange | Opener]:
        """Remove and return what has waited that long; the caller must settle it."""
        now = time.monotonic()
        late = [who for who, since in self._since.items() if now - max(lost, since) >= patience]
        for who in late:
            self.leave(who)
        return late

    def limit(self, welcome: split_pb2.Welcome) -> int:
        """Return how many requests may be in progress on the stream: one, while one is suspected to break streams.

        Otherwise others on the stream would be given up together with the culprit.
        """
        if any(exchange.breaks >= SUSPECT_BREAKS for exchange in self._requests.values()):
            return 1
        return min(self._most, welcome.max_in_flight or self._most)

    def refuse(self, exchange: Exchange, welcome: split_pb2.Welcome | None) -> bool:
        """Return whether the server would not accept this request, which is then settled."""
        if welcome is not None and exchange.is_step and not welcome.inline_bytes:
            self.leave(exchange)
            return exchange.settle(Disagreement(f"{self._address} is older than decoding sessions, and has none"))
        limit = welcome.max_request_bytes if welcome else 0
        if not limit or exchange.payload_bytes <= limit:
            return False
        self.leave(exchange)
        return exchange.settle(
            TooLarge(f"the frontier has {exchange.payload_bytes} bytes; {self._address} takes {limit} at most")
        )

    def interrupted(self, reason: str, suspect: bool = True) -> None:
        """Called when the stream broke: partial answers are discarded, and requests that broke too many are given up.

        ``suspect``: this side did not cause it, so a request may have.
        """
        for exchange in list(self._requests.values()):
            exchange.interrupted(suspect)
            if exchange.breaks >= MAX_BREAKS:
                self.leave(exchange)
                exchange.settle(
                    RemoteError(
                        f"{self._address}: the stream broke {exchange.breaks} times while request {exchange.id} was "
                        f"on it (last: {reason})"
                    )
                )

    def fail(self, error: IsthmusError) -> None:
        """Settle everything with ``error``."""
        with self.changed:
            requests, self._requests = list(self._requests.values()), {}
            openers = self.take_openers()
            self._since.clear()
        settle([*requests, *openers], error)


def settle(waiting: Iterable[Exchange | Opener], error: IsthmusError) -> None:
    """Settle each with an error of its own, because an exception collects its raiser's traceback."""
    for who in waiting:
        own = type(error)(str(error))
        if isinstance(who, Exchange):
            who.settle(own)
        else:
            who.set_exception(own)
