"""`Sender`: one attempt at a request. It waits for its turn, runs the head and sends what crosses.

Several of many inputs are in progress at a time, and the answers come in order (`in_order`).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sized
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from edge_client.answer import Answer, Failure
from edge_client.call import Call
from edge_client.request.ahead import Ahead
from edge_client.request.edge_model import Cut, EdgeModel, HeadResult
from edge_client.transport import Connection, Exchange, Opening, Outgoing, Stamps, State, now_ns, wire
from edge_client.transport.times import NO_TABLES, Tables
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY
from edge_client.witness import InitialState, Witnesses
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
from shared_hooks.lifecycle import About, Lifecycle, Stage
from shared_hooks.modules import INPUT
from shared_hooks.showing import size, summary_of

# How many requests of a run are in flight: as few as keep the connection and the server busy.
#
# A request alone in flight takes the time of the fastest. What later ones take beyond that is spent in queues: on
# this side, in the network's buffers or at the server, which need not be distinguished. So of ``n`` in flight ``n *
# (1 - fastest / took)`` wait somewhere. While less than one does, and this side had to wait for an answer, one more
# may be in flight (until the pipe was full once, twice as many); where more than `TOO_MANY` do, half of those fewer.
# More would make answers late and nothing faster. Requests sent before a change are not counted.

ENOUGH: Final = 1
TOO_MANY: Final = 3
RENEWED: Final = 4096
"""Answers after which the fastest is measured again with few requests in progress: the path may have become slower for
good.
"""


class RequestWindow:
    """Adapts the number of requests in progress, between ``least`` and ``most``. Not thread-safe."""

    def __init__(self, least: int, most: int) -> None:
        self.size = self._least = least
        self._most = max(least, most)
        self._fastest: float | None = None
        self._of = ""
        self._left = RENEWED
        self._unaware = 0
        """Answers still to come to what was begun before the last change."""
        self._has_met_end = False

    def answered(self, split: str, took_ns: int, under_way: int, waited: bool) -> None:
        """Record that a request, the last of ``under_way``, took ``took_ns`` from its packed frontier to its answer's
        last byte.

        ``split``: its cut; another cut is measured again. ``waited``: the answer had to be awaited, with no place left.
        """
        if took_ns <= 0:  # nothing was sent
            return
        self._left -= 1
        if split != self._of or not self._left:
            self.size, self._of, self._fastest, self._left = self._least, split, None, RENEWED
            self._unaware, self._has_met_end = 0, False
        fastest = self._fastest = took_ns if self._fastest is None else min(self._fastest, took_ns)
        self._unaware -= 1
        waiting = under_way * (1 - fastest / took_ns)
        if self._unaware >= 0 or under_way < self.size:
            return
        if waiting > TOO_MANY:
            if under_way <= self._least:  # so few do not wait for each other: everything has become slower
                self._fastest = took_ns
            self._has_met_end = True
            self._change(round(under_way - waiting / 2))
        elif waited and waiting < ENOUGH:
            self._change(self.size + (1 if self._has_met_end else self.size))

    def _change(self, size: int) -> None:
        self._unaware = self.size
        self.size = max(self._least, min(self._most, size))


class Started(Protocol):
    """A request in progress."""

    @property
    def settled(self) -> bool:
        """Whether its answer or error is there."""


Request = TypeVar("Request", bound=Started)

LOOK_SECONDS: Final = 0.005
"""The interval of checks for answers while a live source has no frame."""


@runtime_checkable
class LiveInputs(Protocol):
    """Inputs that arrive by themselves (`edge_client.sources`): the next is taken when there is a place for it, and
    answers are returned while it has not arrived.
    """

    @property
    def live(self) -> bool:
        """Whether inputs arrive by themselves."""

    def wait_for_input(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the next input or the end; returns whether it is there."""


@dataclass(frozen=True, slots=True)
class Position:
    """An input's number in its run, from 0, and the number of inputs; None if they have no length."""

    index: int
    total: int | None


def in_order(
    inputs: Iterable[Any],
    most: int,
    more: int | None = None,
    *,
    start: Callable[[Any, Position], Request],
    finish: Callable[[Request], Answer],
    cancel: Callable[[Request], None],
    fatal: tuple[type[Exception], ...],
    raise_failures: bool,
    lifecycle: Lifecycle,
) -> Iterator[Answer | Failure]:
    """``finish(start(input))`` of each input, in order, with up to ``most`` in progress; up to ``more`` if these do not
    use the link fully (`RequestWindow`).

    A failure takes its place in the order: raised, or yielded as `Failure` unless it is ``fatal``. If a server says
    when to retry, only that request has failed. An error of ``inputs`` is raised after the answers to all previous
    inputs. What is in progress when the iteration ends is cancelled. The hooks for a run are called here.
    """
    window: deque[tuple[int, Any, Request | Exception, int]] = deque()
    allowed = RequestWindow(most, more or most)
    total = _length(inputs)

    def collect() -> Answer | Failure:
        is_full = len(window) >= allowed.size
        index, item, started, under_way = window.popleft()
        try:
            if isinstance(started, Exception):
                raise started
            waited = is_full and not started.settled
            answer = finish(started)
            if more is not None:
                allowed.answered(answer.split, answer.times.round_trip, under_way, waited)
            return answer
        except Exception as error:
            again = isinstance(error, IsthmusError) and error.retry_after_seconds is not None
            if raise_failures or (isinstance(error, fatal) and not again):
                raise
            return Failure(index, item, error)

    def over(full: bool) -> bool:
        return bool(window) and (_is_over(window[0][2]) or (full and len(window) >= allowed.size))

    live = inputs if isinstance(inputs, LiveInputs) and inputs.live else None
    broken: Exception | None = None
    lifecycle.emit(Stage.BEFORE_RUN, total=total)
    try:
        rest = enumerate(inputs)
        while True:
            while over(full=live is not None):
                yield collect()
            if live is not None and window and not live.wait_for_input(LOOK_SECONDS):
                continue
            try:
                index, item = next(rest)
            except StopIteration:
                break
            except Exception as error:
                broken = error
                break
            while over(full=True):
                yield collect()
            try:
                started: Request | Exception = start(item, Position(index, total))
            except Exception as error:
                started = error
            window.append((index, item, started, len(window) + 1))
        while window:
            yield collect()
        if broken is not None:
            raise broken
    finally:
        for _, _, left, _ in window:
            if not isinstance(left, Exception):
                cancel(left)
        lifecycle.emit(Stage.AFTER_RUN, total=total)


def closing_with(source: Any, answers: Iterator[Answer | Failure]) -> Iterator[Answer | Failure]:
    """Close ``source`` at the end of the answers."""
    with closing(source):
        yield from answers


def _length(inputs: Iterable[Any]) -> int | None:
    """Return the number of inputs; None if unknown, such as for a `DataLoader` whose length raises."""
    try:
        return len(inputs) if isinstance(inputs, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def _is_over(started: Started | Exception) -> bool:
    return isinstance(started, Exception) or started.settled


# `Pending`: a request in flight, for callers that do not wait for it at once.


@dataclass(frozen=True, slots=True, repr=False)
class Pending:
    """A request whose head has run, made by `EdgeClient.submit`. Get its answer once, or cancel it.

    Any thread may cancel it while another waits for its answer.
    """

    request: Any
    finish: Callable[[Any], Answer]
    leave: Callable[[Any, str], None]

    @property
    def settled(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        started: Started = self.request
        return started.settled

    def result(self) -> Answer:
        """Wait for the answer. Raises as `EdgeClient.infer`, and Cancelled after `cancel`."""
        return self.finish(self.request)

    def cancel(self, why: str = "the caller wants it no more") -> None:
        """Cancel it and inform the server; no effect if it is answered."""
        self.leave(self.request, why)

    def __repr__(self) -> str:
        return summary_of(self, "settled" if self.settled else "under way")


# `Running`: a request in flight. `Done`: one that was answered on this side.


NOT_SERVED: Final = (
    *(ServerUnavailable, Disagreement, UnknownModel, AccessRefused, QuotaExceeded),
    *(RemoteError, WorkerLost),
)
"""Errors that are the server's fault or wish: the whole model on this side can answer, if that is allowed."""


Route = tuple[split_pb2.Hop, ...]
"""The parts of the model after the first server's, and their servers; empty: it computes to the end."""


@dataclass(slots=True)
class Running:
    """A request in progress, with what is needed to finish or restart it."""

    connection: Connection
    exchange: Exchange
    work: Call | Path
    cut: Cut
    head: HeadResult
    about: About
    kept: InitialState | None = None  # for a witness
    over: bool = False  # hooks were called with its end, or will be
    again: Running | None = None  # the request that replaced it
    exact: bool = True
    route: Route = ()  # of a chain
    codec: str = ""  # chosen with the cut
    bytes_ahead: int = 0  # of requests to be sent before it, where codecs are chosen

    @property
    def settled(self) -> bool:
        return self.exchange.settled


@dataclass(frozen=True, slots=True)
class Done:
    """An answer made on this side."""

    answer: Answer
    settled: bool = True


def settle(exchange: Exchange, connection: Connection) -> None:
    """Wait until it is answered or has failed, at its deadline at the latest, and inform the connection."""
    try:
        if not exchange.wait():
            connection.cancel(exchange, _too_late(exchange, connection))
    except BaseException:
        connection.cancel(exchange, Cancelled("the caller was interrupted"))
        raise


def restarted(old: Stamps) -> Stamps:
    """Stamps for a request that restarts: time spent so far is lost, except for what was kept aside."""
    stamps = Stamps(called=old.called, prepared=old.prepared, kept_ns=old.aside_ns)
    stamps.retry_ns = now_ns() - (old.called if old.prepared is None else old.prepared) - old.aside_ns
    return stamps


def work_of(item: object, cut: Cut) -> Path | None:
    """Return the file to send as it is; None if the cut is another one."""
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


# `Reports`: numbers requests, and calls hooks with their outcomes.


class Reports:
    """Numbers the requests of one client, and calls its hooks. Thread-safe."""

    def __init__(self, edge_model: EdgeModel, client_id: str) -> None:
        self.lifecycle = edge_model.lifecycle
        self._edge_model = edge_model
        self._client_id = client_id
        self._ids = itertools.count(1)
        self._singles = itertools.count()

    def about(self, position: Position | None = None) -> About:
        """Return a new request; ``position``: of its input in its run, None for a single one."""
        position = position or Position(next(self._singles), None)
        return About(self.next_id(), position.index, position.total, self._edge_model.model_id, self._client_id)

    def next_id(self) -> int:
        """Return a request id that is unique for this client."""
        return next(self._ids)

    def ending(self, about: About, answer: Callable[[], Answer]) -> Answer:
        """Call ``answer()``, whose result or error ends the request."""
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
        """Call the hooks for the end of a request. Ctrl-C, and what cancels a hedged request, are no errors."""
        if error is not None and not isinstance(error, Exception):
            error = Cancelled("the caller was interrupted")
        if error is not None and not isinstance(error, Cancelled):
            self.lifecycle.emit(Stage.ON_ERROR, about, where="request", error=error)
        self.lifecycle.emit(Stage.AFTER_REQUEST, about, error=error, answer=answer)


# `Reservations`: bounds requests between head and answer, by number and by bytes to send.

KINDS: Final = 256
"""The number of cuts whose sizes are remembered."""


class Reservations:
    """Limits the requests between heads and answers to ``most_bytes``, or to a single larger one. Thread-safe.

    A head's size is unknown before it has run: it is assumed to equal the last one at its cut, or, for a new cut, the
    largest.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.RLock()  # entered directly: a Condition would add two calls each time
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._taken = 0
        self._bytes = 0
        self._sizes: dict[Hashable, int] = {}

    def __str__(self) -> str:
        return f"{self._taken} requests of {size(self._bytes)}"

    def take(self, cut: Hashable, most: int, until: float) -> Reservation | None:
        """Return a reservation, once fewer than ``most`` are taken and what crosses at ``cut`` has room; None if
        none is free before ``until`` (``time.monotonic()``).
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
            reservation = Reservation(self, cut)
            self._bytes += expected
            reservation.nbytes = expected
            return reservation

    def _expected(self, cut: Hashable) -> int:
        return self._sizes.get(cut) or max(self._sizes.values(), default=0)

    def weigh(self, reservation: Reservation, nbytes: int) -> None:
        """Record the bytes that its head has made."""
        with self._lock:
            if len(self._sizes) >= KINDS:
                self._sizes.clear()
            self._sizes[reservation.cut] = nbytes
            if not reservation.is_left:
                self._bytes += nbytes - reservation.nbytes
                reservation.nbytes = nbytes
            if self._waiting:
                self._changed.notify_all()

    def release(self, reservation: Reservation) -> None:
        """End it. Idempotent."""
        with self._lock:
            if not reservation.is_left:
                self._bytes -= reservation.nbytes
                reservation.nbytes = 0
                reservation.is_left = True
                self._taken -= 1
                if self._waiting:
                    self._changed.notify_all()


class Reservation:
    """One request's share of the room, in bytes."""

    __slots__ = ("_reservations", "cut", "is_left", "nbytes")

    def __init__(self, reservations: Reservations, cut: Hashable) -> None:
        self._reservations = reservations
        self.cut = cut
        self.nbytes = 0
        self.is_left = False

    def weigh(self, nbytes: int) -> None:
        self._reservations.weigh(self, nbytes)

    def release(self) -> None:
        self._reservations.release(self)


class Sender:
    """Sends the requests of one client; ``connect`` returns the connection. Thread-safe."""

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
        self.reservations = Reservations(max_in_flight_bytes)
        self._edge_model = edge_model
        self._reports = reports
        self._witnesses = witnesses
        self._metrics = metrics
        self._max_answer_bytes = max_answer_bytes
        self._sending: list[Exchange] = []
        self._in_vain: set[str] = set()  # cuts at which nothing is sent before its head has ended

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
        """Make one attempt. ``most``: the maximum number of requests in progress, including this one. ``before``: the
        attempt that this one repeats. ``route``: of a chain.
        """
        connection = self.connect()
        reservation = self.reserve((cut, codec), most, until)
        ahead: Ahead | None = None
        try:
            kept = self._keep(work, stamps, before)
            stamps.admitted = now_ns()
            # what is compared with the whole model here must equal it bit for bit
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
            # the server has answered the old one, or has seen one that was abandoned
            is_new = before is not None or (ahead is not None and ahead.has_left and opening is None)
            id = self._reports.next_id() if is_new else about.id
            exchange = self.exchange(id, head.outgoing, stamps, until, about, reservation, together, head.answer_bytes)
            if opening is not None:
                exchange.known_tables = {**exchange.known_tables, **opening.known_tables}
        except BaseException:
            reservation.release()
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

    def reserve(self, cut: Hashable, most: int, until: float) -> Reservation:
        """Return a reservation among ``most`` requests of this client, when there is one. Raises DeadlineExceeded."""
        if (reservation := self.reservations.take(cut, most, until)) is None:
            raise DeadlineExceeded(
                f"{self.reservations} are in flight and none was answered before the deadline (max_in_flight, "
                "max_in_flight_bytes)"
            )
        return reservation

    def exchange(
        self,
        id: int,
        outgoing: Outgoing,
        stamps: Stamps,
        until: float,
        about: About,
        reservation: Reservation,
        together: bool = False,
        most: int | None = None,
    ) -> Exchange:
        """Create the exchange, which ends its reservation when it is settled. ``together``: it may be computed in a
        batch. ``most``: the largest answer in bytes.
        """
        limit = self._max_answer_bytes if most is None else min(most, self._max_answer_bytes)
        reservation.weigh(outgoing.nbytes)
        return Exchange(
            id,
            outgoing,
            until=until,
            stamps=stamps,
            check_header=lambda header, size: wire.check_answer(header, size, limit),
            want_metrics=self._wants_metrics,
            known_tables=self._known_tables(outgoing.cut_digest),
            together=together,
            observers=self._edge_model.observers,
            about=about,
            lifecycle=self._reports.lifecycle,
            on_settled=reservation.release,
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
        """Announce a request of ``most`` bytes whose head is running; None if it would not be sent before it is
        complete.
        """
        known = self._known_tables(crossing.digest)
        header = wire.open_header(
            about,
            crossing.digest,
            most,
            until - time.monotonic(),
            want_metrics=self._wants_metrics,
            known_tables=known,
            together=together,
            hooks=self._edge_model.observers,
            route=route,
        )
        opening = Opening(header, wire.cut_frame(crossing.digest, crossing.to_bytes()), known)
        return opening if connection.begin(opening) else None

    def _known_tables(self, cut_digest: str) -> Tables:
        return self._edge_model.layer_tables.of(cut_digest) if self._wants_metrics else NO_TABLES

    @property
    def _wants_metrics(self) -> bool:
        return self._metrics and self._edge_model.wrapped.metrics_enabled

    def _bytes_ahead(self) -> int:
        """Return bytes of earlier requests still to be sent."""
        self._sending = [one for one in self._sending if one.stamps.last_sent is None and not one.settled]
        return sum([one.bytes_up for one in self._sending]) if self._sending else 0

    def _keep(self, work: Call | Path, stamps: Stamps, before: Running | None) -> InitialState | None:
        """Return what a witness will need, taken before the head; the time goes to ``stamps.kept_ns``."""
        if isinstance(work, Path):
            self._witnesses.check_cut(INPUT)  # the whole model runs there, too
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
