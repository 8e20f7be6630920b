"""Clients of a bench that run heads in PyTorch, or send what such heads gave before."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Final

from edge_client.benching.generator import WaitingLane
from edge_client.benching.load import Ended, Over, Shot
from edge_client.call import Call
from edge_client.client import EdgeClient
from edge_client.credentials import Credentials
from edge_client.model_choice import ModelChoice
from edge_client.request import EdgeModel
from edge_client.transport import Connection, ConnectionOptions, Exchange, Outgoing, Stamps, wire
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import Cancelled, DeadlineExceeded, SpecError
from shared_hooks.lifecycle import Lifecycle


@dataclass(frozen=True)
class Load:
    """``codecs``: one for each client. ``give_up``: seconds after which a request is lost. ``exact``: else the server
    may compute requests as rows of a batch.
    """

    server: str
    choice: ModelChoice
    cuts: Sequence[str]
    codecs: Sequence[str]
    calls: Sequence[Call]
    give_up: float
    in_flight: int
    patience: float
    exact: bool = True
    credentials: Credentials = field(default_factory=Credentials)

    def connection(self) -> ConnectionOptions:
        """One client's connection."""
        return ConnectionOptions(patience=self.patience, max_in_flight=self.in_flight, credentials=self.credentials)


class LiveLane(WaitingLane):
    """A client that runs its heads: an `EdgeClient`."""

    def __init__(self, load: Load, client: int) -> None:
        super().__init__(load.in_flight, load.give_up)
        self._load = load
        self._client = EdgeClient(
            load.server,
            load.choice,
            load.cuts[0],
            codec=load.codecs[client],
            metrics=False,
            exact=load.exact,
            deadline=load.give_up,
            connection=load.connection(),
        )

    def begin(self) -> None:
        self._client.open()
        for cut in self._load.cuts:
            self._client.infer(self._load.calls[0], split=cut, deadline=60.0)
        super().begin()

    def disconnect(self) -> None:
        self._client.close()

    def ask(self, shot: Shot, left: float, ended: Ended) -> None:
        pending = self._client.submit(self._load.calls[shot.input], split=self._load.cuts[shot.cut], deadline=left)
        try:
            answer = pending.result()
            ended.batch_size, ended.bytes_up = answer.batch_size, answer.bytes_up
            if (load := answer.load) is not None:
                ended.pending, ended.workers, ended.queue_ns = load.pending, load.workers, int(load.queue_ns)
        finally:
            exchange = getattr(pending.request, "exchange", None)
            ended.put_offs = 0 if exchange is None else exchange.put_offs


# A client whose frontiers were made before: it sends them as they are, so that no head takes this machine's time.
#
# This is what the server can do for clients on other machines. Answers are received whole, and not decoded.


MAX_ANSWER: Final = 1 << 30
BEGIN_SECONDS: Final = 60.0
MOST_BYTES: Final = 2 << 30
"""Most of all frontiers: they are in memory, in each process."""


@dataclass(frozen=True)
class Recorded:
    """``hello``: the greeting, serialized; ``frontiers``: by codec, of each cut those of each input."""

    hello: bytes
    frontiers: Mapping[str, Sequence[Sequence[Outgoing]]]


def record(load: Load) -> Recorded:
    """Runs every head once for each codec. Raises as `EdgeModel.head`, SpecError for too many bytes."""
    total, hello = 0, b""
    frontiers: dict[str, list[list[Outgoing]]] = {}
    for codec in dict.fromkeys(load.codecs):
        model = EdgeModel(load.choice, codec=codec, metrics=False)
        try:
            hello = hello or model.greeting("").SerializeToString()
            frontiers[codec] = []
            for cut in load.cuts:
                frontiers[codec].append([])
                for call in load.calls:
                    made = model.head(call, cut, Stamps()).outgoing
                    payload = b"".join(made.buffers)  # the head's own memory is written again by the next
                    total += len(payload)
                    if total > MOST_BYTES:
                        raise SpecError(
                            f"the frontiers of {len(load.calls)} inputs at {len(load.cuts)} cuts are more than "
                            f"{MOST_BYTES >> 30} GiB: give fewer inputs"
                        )
                    frontiers[codec][-1].append(replace(made, buffers=(memoryview(payload),)))
        finally:
            model.wrapped.detach()
    return Recorded(hello, frontiers)


class RecordedLane:
    """One stream. Requests are given to the connection when they are due, which keeps its window."""

    def __init__(self, load: Load, recorded: Recorded, client: int) -> None:
        self._load = load
        self._frontiers = recorded.frontiers[load.codecs[client]]
        hello = split_pb2.ClientFrame.FromString(recorded.hello)
        hello.hello.client_id = uuid.uuid4().hex
        self._lifecycle = Lifecycle("edge")
        self._connection = Connection(
            load.server, hello, load.connection(), lifecycle=self._lifecycle, codec=load.codecs[client]
        )
        self._ids = count(1)
        self._under: deque[Exchange] = deque()

    def begin(self) -> None:
        self._connection.open(self._load.patience)
        for cut in self._frontiers:
            exchange = self._exchange(cut[0], time.monotonic() + BEGIN_SECONDS)
            self._connection.submit(exchange)
            if not exchange.wait():
                self._connection.cancel(exchange, DeadlineExceeded(f"no first answer within {BEGIN_SECONDS:.0f} s"))
            if exchange.error is not None:
                raise exchange.error

    def send(self, shot: Shot, intended: float, over: Over) -> None:
        late_ns = int(1e9 * (time.monotonic() - intended))
        holder: list[Exchange] = []
        settled = partial(self._settled, holder, shot, intended, late_ns, over)
        exchange = self._exchange(self._frontiers[shot.cut][shot.input], intended + self._load.give_up, settled)
        holder.append(exchange)
        self._under.append(exchange)
        try:
            self._connection.submit(exchange)
        except Cancelled as closed:
            exchange.settle(closed)

    def tick(self) -> None:
        """All requests have the same time, so the first that was sent is the first to be given up."""
        now = time.monotonic()
        while self._under and (self._under[0].settled or self._under[0].until <= now):
            exchange = self._under.popleft()
            if not exchange.settled:
                self._connection.cancel(exchange, DeadlineExceeded("no answer in time"))

    def close(self) -> None:
        self._connection.close()

    def _exchange(self, outgoing: Outgoing, until: float, settled: partial[None] | None = None) -> Exchange:
        return Exchange(
            next(self._ids),
            outgoing,
            until=until,
            stamps=Stamps(),
            check_header=lambda header, size: wire.check_answer(header, size, MAX_ANSWER),
            want_metrics=False,
            together=not self._load.exact,
            lifecycle=self._lifecycle,
            on_settled=settled or (lambda: None),
        )

    def _settled(self, holder: list[Exchange], shot: Shot, intended: float, late_ns: int, over: Over) -> None:
        took_ns = int(1e9 * (time.monotonic() - intended))
        exchange = holder[0]
        error = "" if exchange.error is None else type(exchange.error).__name__
        ended = Ended(shot.number, late_ns, took_ns, error, exchange.put_offs, exchange.bytes_up)
        if not error and (reply := exchange.reply) is not None:
            ended.batch_size = max(1, reply.batch_size)
            if (load := wire.load(reply)) is not None:
                ended.pending, ended.workers, ended.queue_ns = load.pending, load.workers, int(load.queue_ns)
        exchange.payload = bytearray()  # a bench counts answers and does not decode them
        over(ended)
