"""`Sender`: one attempt at a request. It waits for a place, the head runs, the frontier goes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from edge_client.answer import Answer
from edge_client.call import Call
from edge_client.request.ahead import Ahead
from edge_client.request.edge_model import Cut, EdgeModel, Head
from edge_client.request.many import Position
from edge_client.spoken import CLOUD_FILE, CLOUD_ONLY
from edge_client.transport import Connection, Exchange, Opening, Outgoing, Stamps, State, now_ns, wire
from edge_client.witness import INPUT, Kept, Witnesses
from protos.isthmus.v1 import split_pb2
from shared_hooks import Crossing
from shared_hooks.errors import (
    AccessRefused,
    Cancelled,
    DeadlineExceeded,
    Disagreement,
    IsthmusError,
    QuotaExceeded,
    RemoteError,
    ServerUnavailable,
    SpecError,
    UnknownModel,
    WorkerLost,
)
from shared_hooks.lifecycle import About, Stage
from shared_hooks.showing import size

# `Running`: a request on its way. `Done`: one that was answered on this side.


NOT_SERVED: Final = (
    *(ServerUnavailable, Disagreement, UnknownModel, AccessRefused, QuotaExceeded),
    *(RemoteError, WorkerLost),
)
"""The server's fault, or its wish: the whole model on this side has an answer, where it may be asked for one."""


Route = tuple[split_pb2.Hop, ...]
"""The parts of the model behind the first server's, and who computes them; empty: it computes to the end."""


@dataclass(slots=True)
class Running:
    """A request on its way, with what is needed to finish it or to start it over."""

    connection: Connection
    exchange: Exchange
    work: Call | Path
    cut: Cut
    head: Head
    about: About
    kept: Kept | None = None  # for a witness
    over: bool = False  # hooks have heard how it ended, or will
    again: Running | None = None  # what was begun in its place
    exact: bool = True
    route: Route = ()  # of a chain
    codec: str = ""  # chosen with the cut
    bytes_ahead: int = 0  # of requests that were to be sent before it, where codecs are chosen

    @property
    def settled(self) -> bool:
        return self.exchange.settled


@dataclass(frozen=True, slots=True)
class Done:
    """What was answered on this side."""

    answer: Answer
    settled: bool = True


def settle(exchange: Exchange, connection: Connection) -> None:
    """Wait until it is answered, or has failed: its deadline, the last; and the connection is informed."""
    try:
        if not exchange.wait():
            connection.cancel(exchange, _too_late(exchange, connection))
    except BaseException:
        connection.cancel(exchange, Cancelled("the caller was interrupted"))
        raise


def restarted(old: Stamps) -> Stamps:
    """For a request that starts over: what was done until now was in vain, but for what was put aside."""
    stamps = Stamps(called=old.called, prepared=old.prepared, kept_ns=old.aside_ns)
    stamps.retry_ns = now_ns() - (old.called if old.prepared is None else old.prepared) - old.aside_ns
    return stamps


def work_of(item: object, cut: Cut) -> Path | None:
    """The file to send as it is; None where the cut is another one."""
    if cut != CLOUD_FILE:
        return None
    path = getattr(item, "path", item)
    if not isinstance(path, Path):
        raise SpecError(f'split="{CLOUD_FILE}" takes input files (a path or an InputItem), not {type(item).__name__}')
    return path


def _too_late(exchange: Exchange, connection: Connection) -> IsthmusError:
    what = f"no answer from {connection.address} to request {exchange.id} before its deadline"
    if connection.state is not State.READY:
        return ServerUnavailable(f"{what}: no connection (last: {connection.last_reason})")
    if exchange.put_off_by is not None:
        return DeadlineExceeded(f"{what}: put off {exchange.put_offs} times (last: {exchange.put_off_by})")
    return DeadlineExceeded(what)


# `Reports`: requests get their numbers, and hooks hear what becomes of them.


class Reports:
    """Numbers the requests of one client, and calls its hooks. Any thread may call."""

    def __init__(self, edge_model: EdgeModel, client_id: str) -> None:
        self.lifecycle = edge_model.lifecycle
        self._edge_model = edge_model
        self._client_id = client_id
        self._ids = itertools.count(1)
        self._singles = itertools.count()

    def about(self, position: Position | None = None) -> About:
        """A new request; ``position``: where in its run its input is, None for one by itself."""
        position = position or Position(next(self._singles), None)
        return About(self.next_id(), position.index, position.total, self._edge_model.model_id, self._client_id)

    def next_id(self) -> int:
        """No other request of this client has it."""
        return next(self._ids)

    def ending(self, about: About, answer: Callable[[], Answer]) -> Answer:
        """``answer()``, with which the request is over: with what it gives, or with what it raises."""
        try:
            with self.lifecycle.request(about):
                given = answer()
                self.lifecycle.emit(Stage.ON_RESULT, answer=given)
        except BaseException as error:
            self.over(about, error)
            raise
        self.over(about, answer=given)
        return given

    def over(self, about: About, error: BaseException | None = None, answer: Answer | None = None) -> None:
        """Hooks hear how it ended. Ctrl-C and what abandons a hedge are no errors."""
        if error is not None and not isinstance(error, Exception):
            error = Cancelled("the caller was interrupted")
        if error is not None and not isinstance(error, Cancelled):
            self.lifecycle.emit(Stage.ON_ERROR, about, where="request", error=error)
        self.lifecycle.emit(Stage.AFTER_REQUEST, about, error=error, answer=answer)


# `Places`: room for requests between head and answer, by number and by the bytes that they send.

KINDS: Final = 256
"""Cuts of which it is known what they send."""


class Places:
    """Any thread may call. At most ``most_bytes`` lie between heads and answers, or one request that has more.

    What a head will make is not known before it has run: it is taken for as large as the last one of its cut, and the
    first of a cut for as large as the largest.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.RLock()  # entered as it is: a Condition would add two calls each time
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._taken = 0
        self._bytes = 0
        self._sizes: dict[Hashable, int] = {}

    def __str__(self) -> str:
        return f"{self._taken} requests of {size(self._bytes)}"

    def take(self, cut: Hashable, most: int, until: float) -> Place | None:
        """A place, once fewer than ``most`` are taken and there is room for a frontier of ``cut``; None where there is
        none before ``until`` (``time.monotonic()``).
        """
        with self._lock:
            expected = self._expected(cut)
            while self._taken and (self._taken >= most or self._bytes + expected > self._most_bytes):
                if (left := until - time.monotonic()) <= 0:
                    return None
                self._waiting += 1
                try:
                    self._changed.wait(left)
                finally:
                    self._waiting -= 1
                expected = self._expected(cut)
            self._taken += 1
            place = Place(self, cut)
            self._bytes += expected
            place.nbytes = expected
            return place

    def _expected(self, cut: Hashable) -> int:
        return self._sizes.get(cut) or max(self._sizes.values(), default=0)

    def weigh(self, place: Place, nbytes: int) -> None:
        """What its head has made, in bytes."""
        with self._lock:
            if len(self._sizes) >= KINDS:
                self._sizes.clear()
            self._sizes[place.cut] = nbytes
            if not place.is_left:
                self._bytes += nbytes - place.nbytes
                place.nbytes = nbytes
            if self._waiting:
                self._changed.notify_all()

    def leave(self, place: Place) -> None:
        """Once; more often without effect."""
        with self._lock:
            if not place.is_left:
                self._bytes -= place.nbytes
                place.nbytes = 0
                place.is_left = True
                self._taken -= 1
                if self._waiting:
                    self._changed.notify_all()


class Place:
    """One request's share of the room, in bytes."""

    __slots__ = ("_places", "cut", "is_left", "nbytes")

    def __init__(self, places: Places, cut: Hashable) -> None:
        self._places = places
        self.cut = cut
        self.nbytes = 0
        self.is_left = False

    def weigh(self, nbytes: int) -> None:
        self._places.weigh(self, nbytes)

    def leave(self) -> None:
        self._places.leave(self)


class Sender:
    """Sends the requests of one client; ``connect`` gives the connection. Any thread may call."""

    def __init__(
        self,
        edge_model: EdgeModel,
        connect: Callable[[], Connection],
        reports: Reports,
        witnesses: Witnesses,
        *,
        max_in_flight_bytes: int,
        metrics: bool,
        max_answer_bytes: int,
    ) -> None:
        self.connect = connect
        self.places = Places(max_in_flight_bytes)
        self._edge_model = edge_model
        self._reports = reports
        self._witnesses = witnesses
        self._metrics = metrics
        self._max_answer_bytes = max_answer_bytes
        self._sending: list[Exchange] = []
        self._in_vain: set[str] = set()  # cuts at which nothing leaves before its head has ended

    def attempt(
        self,
        work: Call | Path,
        cut: Cut,
        stamps: Stamps,
        until: float,
        about: About,
        most: int,
        exact: bool,
        codec: str = "",
        before: Running | None = None,
        route: Route = (),
    ) -> Running:
        """``most``: requests under way, this one included. ``before``: the attempt that this one repeats. ``route``: of
        a chain.
        """
        connection = self.connect()
        place = self.place((cut, codec), most, until)
        ahead: Ahead | None = None
        try:
            kept = self._keep(work, stamps, before)
            stamps.admitted = now_ns()
            # what is compared with the whole model here is to be that, bit for bit
            together = not (exact or kept is not None)
            if isinstance(work, Path):
                head = self._edge_model.file(work, stamps)
            else:
                offered = wire.FIRST_CODECS if connection.welcome is None else wire.codecs_of(connection.welcome)
                if before is None:
                    begin = partial(self._announced, connection, about, together, until, route)
                    ahead = Ahead(partial(self._edge_model.way, codec=codec), begin, self._in_vain)
                head = self._edge_model.head(work, "input" if cut == CLOUD_ONLY else cut, stamps, offered, codec, ahead)
            if route:
                head = replace(head, outgoing=replace(head.outgoing, route=route))
            opening = None if ahead is None else ahead.opening
            # the server has answered the old one, or has heard of one that came to nothing
            is_new = before is not None or (ahead is not None and ahead.has_left and opening is None)
            id = self._reports.next_id() if is_new else about.id
            exchange = self.exchange(id, head.outgoing, stamps, until, about, place, together, head.answer_bytes)
        except BaseException:
            place.leave()
            if ahead is not None:
                ahead.give_up()
            raise
        before_it = self._bytes_ahead()
        self._sending.append(exchange)
        connection.submit(exchange, opening)
        return Running(
            *(connection, exchange, work, cut, head, about, kept),
            exact=exact,
            route=route,
            codec=codec,
            bytes_ahead=before_it,
        )

    def place(self, cut: Hashable, most: int, until: float) -> Place:
        """One among ``most`` requests of this client, when there is one. Raises DeadlineExceeded."""
        if (place := self.places.take(cut, most, until)) is None:
            raise DeadlineExceeded(
                f"{self.places} are in flight and none was answered before the deadline (max_in_flight, "
                "max_in_flight_bytes)"
            )
        return place

    def exchange(
        self,
        id: int,
        outgoing: Outgoing,
        stamps: Stamps,
        until: float,
        about: About,
        place: Place,
        together: bool = False,
        most: int | None = None,
    ) -> Exchange:
        """Which gives its place back when it is settled. ``together``: a row of a batch's will do. ``most``: bytes that
        the model can answer with.
        """
        limit = self._max_answer_bytes if most is None else min(most, self._max_answer_bytes)
        place.weigh(outgoing.nbytes)
        return Exchange(
            id,
            outgoing,
            until=until,
            stamps=stamps,
            check_header=lambda header, size: wire.check_answer(header, size, limit),
            want_metrics=self._wants_metrics,
            together=together,
            observers=self._edge_model.observers,
            about=about,
            lifecycle=self._reports.lifecycle,
            on_settled=place.leave,
        )

    def _announced(
        self,
        connection: Connection,
        about: About,
        together: bool,
        until: float,
        route: Route,
        crossing: Crossing,
        most: int,
    ) -> Opening | None:
        """A request whose head is running, of ``most`` bytes; None where it does not leave before it is whole."""
        header = wire.open_header(
            about,
            crossing.digest,
            most,
            until - time.monotonic(),
            want_metrics=self._wants_metrics,
            together=together,
            hooks=self._edge_model.observers,
            route=route,
        )
        opening = Opening(header, wire.cut_frame(crossing.digest, crossing.to_bytes()))
        return opening if connection.begin(opening) else None

    @property
    def _wants_metrics(self) -> bool:
        return self._metrics and self._edge_model.wrapped.metrics_enabled

    def _bytes_ahead(self) -> int:
        """Bytes of requests that have still to be sent, and take the link first."""
        self._sending = [one for one in self._sending if one.stamps.last_sent is None and not one.settled]
        return sum([one.bytes_up for one in self._sending]) if self._sending else 0

    def _keep(self, work: Call | Path, stamps: Stamps, before: Running | None) -> Kept | None:
        """What a witness will need, taken before the head; the time goes to ``stamps.kept_ns``."""
        if isinstance(work, Path):
            self._witnesses.check_cut(INPUT)  # the same whole model there
            return None
        if before is None and not self._witnesses.share:
            return None
        began = now_ns()
        if before is None:
            kept = self._witnesses.keep(work)
        elif (kept := before.kept) is not None:
            kept.mark()
        stamps.kept_ns += now_ns() - began
        return kept
