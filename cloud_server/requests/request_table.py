"""The requests in progress on a server: which there are, what they hold, and how each ends.

Answers are kept until the client has them, so that a request sent again after a lost connection is computed once.
Answers queued on streams count here, too, until they are sent *and* acknowledged, or evicted. One limit thus holds for
all of them, and a client that reads nothing fills only its own share.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from cloud_server import wire
from cloud_server.limits import Limits
from cloud_server.models import Computed, Engine, join_reply, leave_out
from cloud_server.requests.request import Key, Outlet, Request, RequestState, ServerAnswer
from protos.frames import HeadedReply, cut
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import BadFrame, Cancelled, DeadlineExceeded, IsthmusError, ServerUnavailable, TooLarge
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.sharing import Holding, Owner, Shares, evictions

# What a request is answered with: its result or its error, as frames.


class NextAnswer(NamedTuple):
    """A part of a request that the next server of its chain has answered. ``took_ns``: since it was passed on."""

    server: str
    cut: str
    bytes_up: int
    payload: bytes | bytearray
    took_ns: int
    sends: int


def computed_answer(request: Request, computed: Computed, started_ns: int, load: split_pb2.Load) -> ServerAnswer:
    """Return the answer to a request whose tail started at ``started_ns`` (perf_counter). Completes the
    engine's reply.
    """
    reply, buffers = computed.reply, computed.buffers
    request.reply = reply
    reply.id = request.id
    reply.load.CopyFrom(load)
    reply.observations = request.observations or reply.observations
    reply.durations.receive_ns = request.complete_ns - request.sent_ns
    reply.durations.complete_ns = request.complete_ns
    reply.durations.queue_ns = started_ns - request.complete_ns - request.read_ns
    if request.known_tables:
        leave_out(reply, request.known_tables)
    if not computed.is_part and reply.payload_bytes <= request.inline_bytes:
        reply.payload, buffers = b"".join(buffers), ()
    return ServerAnswer(request.key, request.fingerprint, reply=reply, buffers=buffers, about=request.about)


def joined_answer(
    request: Request, own: split_pb2.ReplyHeader, rest: split_pb2.ReplyHeader, hop: NextAnswer
) -> ServerAnswer:
    """Return the answer of a chain: ``own`` reports this server's part, ``rest`` is the answer of the next server."""
    reply = request.reply = split_pb2.ReplyHeader()
    reply.CopyFrom(own)
    join_reply(reply, rest, hop.server, hop.cut, bytes_up=hop.bytes_up, sends=hop.sends, took_ns=hop.took_ns)
    if request.known_tables:
        leave_out(reply, request.known_tables)
    buffers: tuple[memoryview, ...] = (memoryview(hop.payload),)
    if reply.payload_bytes <= request.inline_bytes:
        reply.payload, buffers = bytes(hop.payload), ()
    return ServerAnswer(request.key, request.fingerprint, reply=reply, buffers=buffers, about=request.about)


def failed_answer(request: Request, error: IsthmusError, retry: bool | None = None) -> ServerAnswer:
    """Return the answer to a request that failed; ``retry`` as in `wire.failed`."""
    return ServerAnswer(
        request.key, request.fingerprint, failed=wire.failed(request.id, error, retry), about=request.about
    )


def answer_frames(answer: ServerAnswer, chunk_bytes: int, headed: bool = False) -> Iterator[wire.OutFrame]:
    """Yield the frames of an answer: its reply and the payload in chunks, or its failure.

    ``headed``: the reply's message contains the first chunk.
    """
    if answer.reply is None:
        yield split_pb2.ServerFrame(failed=answer.failed)
        return
    chunks = iter(()) if answer.reply.payload else cut(answer.reply.id, answer.buffers, chunk_bytes)
    first = next(chunks, None) if headed else None
    if first is None:
        yield split_pb2.ServerFrame(reply=answer.reply)
    else:
        yield HeadedReply(answer.reply, first.pieces)
    yield from chunks


class _Kept:
    """A kept answer. ``lines``: the streams on which it is queued or being sent. ``acknowledged``: the client
    has it.
    """

    __slots__ = ("acknowledged", "answer", "expires", "lines", "size")

    def __init__(self, answer: ServerAnswer, expires: float) -> None:
        self.answer = answer
        self.expires = expires
        self.size = answer.held_bytes
        self.lines: list[Outlet] = []
        self.acknowledged = False


class AnswerStore:
    """Answers by `Key`, bounded in number, bytes and age. Not thread-safe.

    Beyond a bound the account that holds the most, and in it the client that holds the most, loses its oldest answer;
    the client may ask again for one that it did not fetch.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._of: dict[Owner, OrderedDict[Key, None]] = {}
        self._numbers = Shares(limits.max_answers)
        self._bytes = Shares(limits.max_answer_bytes)

    def put(self, answer: ServerAnswer) -> None:
        """Keep an answer, which may be no larger than the bound for all of them."""
        if answer.key in self._kept:
            self._remove(answer.key)
        kept, owner = _Kept(answer, time.monotonic() + self._limits.answer_seconds), Owner(*answer.key[:2])
        self._numbers.add(owner, 1)
        self._bytes.add(owner, kept.size)
        while self._kept and not (self._numbers.has_room() and self._bytes.has_room()):
            self._make_room(self._bytes if self._numbers.has_room() else self._numbers)
        self._kept[answer.key] = kept
        self._of.setdefault(owner, OrderedDict())[answer.key] = None

    def send(self, answer: ServerAnswer, outlet: Outlet) -> None:
        """Queue an answer on a stream, whether it is kept or not."""
        kept = self._kept.get(answer.key)
        if kept is not None and not outlet.is_over:
            kept.lines.append(outlet)
        outlet.send(answer)

    def sent(self, answer: ServerAnswer, outlet: Outlet) -> None:
        """Record that an answer was sent completely."""
        kept = self._kept.get(answer.key)
        if kept is not None and kept.answer is answer:
            self._leaves(kept, outlet)

    def left(self, outlet: Outlet) -> None:
        """Record that a stream is gone; what was queued on it is kept for a client that reconnects."""
        for key in list(self._of.get(outlet.owner, ())):
            self._leaves(self._kept[key], outlet)

    def get(self, key: Key) -> ServerAnswer | None:
        found = self._kept.get(key)
        return found.answer if found else None

    def forget(self, keys: Iterable[Key]) -> None:
        """Forget acknowledged answers; unknown keys are ignored. One that is still queued is forgotten once it
        is sent.
        """
        for key in keys:
            kept = self._kept.get(key)
            if kept is None:
                continue
            kept.acknowledged = True
            if not kept.lines:
                self._remove(key)

    def sweep(self) -> None:
        """Drop answers that were not fetched or acknowledged in time, and streams that made no progress for as long."""
        now, seconds = time.monotonic(), self._limits.answer_seconds
        for key, kept in list(self._kept.items()):
            if kept.expires > now:
                break
            if self._withdraw(kept, f"it was not fetched within {seconds:g} s (answer_seconds)"):
                self._remove(key)
            elif all(outlet.stuck_seconds > seconds for outlet in kept.lines):
                self._drop(kept, f"nothing of an answer was fetched for {seconds:g} s (answer_seconds)")

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the answers take."""
        return self._bytes.total

    def _make_room(self, shares: Shares) -> None:
        """Evict one answer of the client that holds the most.

        The oldest that was sent; else the last one queued; else one that is being sent, and with it its stream.
        """
        bound = "max_answers" if shares is self._numbers else "max_answer_bytes"
        why = f"the server keeps answers up to its limit ({bound}), and this client has most of them: fetch them sooner"
        fullest = shares.fullest()
        if fullest not in self._of:  # all it holds is the request being queued
            fullest = max(self._of, key=lambda owner: (shares.account(owner.account), shares.client(owner)))
        mine = [self._kept[key] for key in self._of[fullest]]
        for kept in mine:
            if not kept.lines:
                self._remove(kept.answer.key)
                return
        for kept in reversed(mine):
            if self._withdraw(kept, why):
                self._remove(kept.answer.key)
                return
        slowest = max(mine, key=lambda kept: min(outlet.stuck_seconds for outlet in kept.lines))
        self._drop(slowest, why)

    def _withdraw(self, kept: _Kept, why: str) -> bool:
        """Remove an answer from every queue; returns False if it is being sent."""
        error = ServerUnavailable(f"the answer gave way: {why}; ask again")
        failure = wire.failed(kept.answer.key[2], error)
        kept.lines = [outlet for outlet in kept.lines if not outlet.withdraw(kept.answer, failure)]
        return not kept.lines

    def _drop(self, kept: _Kept, why: str) -> None:
        """Drop an answer that is being sent, and the streams that do not fetch it."""
        for outlet in kept.lines:
            outlet.drop(ServerUnavailable(f"this stream does not fetch what is sent on it: {why}"))
        self._remove(kept.answer.key)

    def _leaves(self, kept: _Kept, outlet: Outlet) -> None:
        if outlet in kept.lines:
            kept.lines.remove(outlet)
            if kept.acknowledged and not kept.lines:
                self._remove(kept.answer.key)

    def _remove(self, key: Key) -> None:
        kept, owner = self._kept.pop(key), Owner(*key[:2])
        self._numbers.remove(owner, 1)
        self._bytes.remove(owner, kept.size)
        mine = self._of[owner]
        del mine[key]
        if not mine:
            del self._of[owner]


# Whether there is room for one more request, and which requests are evicted to make room.


class Room:
    """Counts the requests in progress and their bytes, by account and client. Not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.places = Shares(limits.max_pending)
        self.memory = Shares(limits.max_pending_bytes)

    def take(self, request: Request) -> None:
        self.places.add(request.owner, 1)
        self.memory.add(request.owner, request.held_bytes)

    def give_back(self, request: Request) -> None:
        self.places.remove(request.owner, 1)
        self.memory.remove(request.owner, request.held_bytes)

    def check_client(self, owner: Owner, undelivered: int) -> None:
        """Raise ServerUnavailable if a client has no place left of its own.

        ``undelivered``: answers of its stream that it has not begun to fetch.
        """
        most = self._limits.max_in_flight
        if self.places.client(owner) + undelivered >= most:
            raise ServerUnavailable(
                f"this client has {most} requests in flight, which is the limit (max_in_flight); answers that it has "
                "not fetched count, too"
            )

    def make(self, request: Request, undelivered: int, live: Iterable[Request]) -> dict[Request, str]:
        """Return the requests to evict for this one, each with the reason.

        Raises ServerUnavailable, naming the limit, if none may be evicted. ``undelivered``: see `check_client`.
        """
        self.check_client(request.owner, undelivered)
        gone: dict[Request, str] = {}
        for bound, shares, unit, weigh in self._bounds(request):
            amount = weigh(request)
            if shares.has_room(amount) or not shares.total:
                continue
            give = evictions(shares, request.owner, amount, [self._holding(one, weigh(one)) for one in live])
            if give is None:
                raise ServerUnavailable(
                    f"the server has no room: {shares.total} {unit} are on their way, "
                    f"{shares.account(request.owner.account)} of them of this account; {bound} is {shares.limit}"
                )
            gone |= dict.fromkeys(give, f"its place was needed ({bound} is {shares.limit})")
        return gone

    def _bounds(self, request: Request) -> Iterator[tuple[str, Shares, str, Callable[[Request], int]]]:
        """Yields (name of a limit, current shares, unit, what a request takes of it)."""
        policy, account = request.caller.policy, request.owner.account
        places, memory = ("requests", _one), ("bytes of requests", _size)
        if policy.max_in_flight:
            yield "max_in_flight of this identity", self.places.of(account, policy.max_in_flight), *places
        if policy.max_bytes:
            yield "max_bytes of this identity", self.memory.of(account, policy.max_bytes), *memory
        yield "max_pending", self.places, *places
        yield "max_pending_bytes", self.memory, *memory

    def _holding(self, request: Request, amount: int) -> Holding[Request]:
        """Return a request, for eviction: uploads that wait for their client go first, the longest first; then other
        uploads, the newest first; then what waits for a worker.
        """
        limits = self._limits
        since = request.waiting_since_ns(limits.deadline_seconds)
        is_idle = since is not None and time.perf_counter_ns() - since > limits.idle_seconds * 1e9
        usefulness: tuple[float, ...] | None
        if since is not None:
            usefulness = (0, since) if is_idle else (1, -request.began_ns)
        elif request.state is RequestState.QUEUED:
            usefulness = (2, -request.complete_ns)
        else:
            usefulness = None
        return Holding(request, request.owner, amount, usefulness, is_idle)


def _one(_: Request) -> int:
    return 1


def _size(request: Request) -> int:
    return request.held_bytes


class _Locked:
    """The table's lock. On leaving, it runs the hooks of the requests that ended, without the lock."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table

    def __enter__(self) -> None:
        self._table.lock.acquire()

    def __exit__(self, *_: object) -> None:
        table = self._table
        ended, table.ended = table.ended, []
        table.lock.release()
        for request, error in ended:  # also if the block raises after one has ended
            table.run_end_hooks(request, error)


class RequestTable:
    """Live requests by `Key`, and the answers that clients have not acknowledged. Thread-safe.

    The condition `changed` guards the table and every request's state, and is notified of changes. ``check_open``
    raises if no new requests are accepted, ``check_new`` if this one is not.
    """

    def __init__(
        self,
        limits: Limits,
        check_open: Callable[[], None],
        lifecycle: Lifecycle,
        check_new: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._locked = _Locked(self)
        self._limits = limits
        self._check_open = check_open
        self._lifecycle = lifecycle
        self._check_new = check_new
        self._live: dict[Key, Request] = {}
        self._room = Room(limits)
        self._answers = AnswerStore(limits)
        self._numbers = itertools.count()
        self.ended: list[tuple[Request, IsthmusError | None]] = []
        self._ends_unheard = 0

    def run_end_hooks(self, request: Request, error: IsthmusError | None) -> None:
        """Run the hooks for the end of a request."""
        if error is not None and not isinstance(error, Cancelled):
            self._lifecycle.emit(Stage.ON_ERROR, request.about, where="request", error=error)
        facts = {"split": request.split, "nbytes": request.received_bytes, "reply": request.reply}
        self._lifecycle.emit(Stage.AFTER_REQUEST, request.about, error=error, began_ns=request.sent_ns, **facts)
        with self.lock:
            self._ends_unheard -= 1
            self.changed.notify_all()

    def begin(self, request: Request) -> None:
        """Run the hooks for an accepted request; those for its end come later in any case. Raises HookRefused."""
        about, began_ns = request.about, request.sent_ns
        facts = {"client": about.client, "split": request.split, "nbytes": request.payload_bytes}
        try:
            self._lifecycle.emit(Stage.BEFORE_REQUEST, about, began_ns=began_ns, **facts)
        finally:
            with self._locked:
                request.announced = True
                if request.state is RequestState.OVER:  # while the hooks ran
                    self.ended.append((request, request.error))

    @property
    def empty(self) -> bool:
        """Whether no client waits for a request, and all hooks have run. The caller holds `changed`.

        A running request whose client has left does not count.
        """
        return all(request.outlet is None for request in self._live.values()) and not self._ends_unheard

    @property
    def running(self) -> bool:
        """Whether a worker is computing."""
        with self.lock:
            return any(request.state is RequestState.RUNNING for request in self._live.values())

    def admit(self, request: Request) -> bool:
        """Accept a new request, or recognise one that is known already; returns whether it is new. If so, `begin` must
        follow.

        A new request is RECEIVING afterwards. A known one is OVER: it is answered, waiting or running already, its
        answer goes to this request's stream, and its chunks are not needed. Raises BadFrame if the id belongs to
        another request, ServerUnavailable without room, and Cancelled if its stream has ended.
        """
        outlet = request.outlet
        assert outlet is not None
        with self._locked:
            if outlet.is_over:  # it left while its frames were taken, and `left` may already have been called
                raise Cancelled("its stream ended")
            known = self._live.get(request.key)
            answer = self._answers.get(request.key)
            earlier = known.fingerprint if known else answer.fingerprint if answer else request.fingerprint
            if earlier != request.fingerprint and not (known and known.opening):
                raise BadFrame(f"request id {request.id} was used before, for a request with other content")
            if answer is not None:
                request.state = RequestState.OVER
                self._answers.send(answer, outlet)
                return False
            if known is not None:
                if known.state is not RequestState.RECEIVING:
                    known.outlet, known.cancelled = outlet, False
                    request.state = RequestState.OVER
                    return False
                if known.outlet is outlet:
                    raise BadFrame(f"request {request.id} was announced again before its payload was complete")
                # the client reconnected before the old stream was seen to be dead
                self._end(known, Cancelled("it was announced again on another stream"))
            self._check_open()
            gone = self._room.make(request, outlet.undelivered, self._live.values())
            self._check_new(request)
            for other, why in gone.items():
                self._refuse(other, ServerUnavailable(f"request {other.id} gave way to another: {why}"))
            self._live[request.key] = request
            self._room.take(request)
            request.about = replace(request.about, index=next(self._numbers))
            return True

    def check_place(self, id: int, outlet: Outlet) -> None:
        """Raise ServerUnavailable if `admit` would for lack of a place of the client's own.

        Called before any costly work, so that a flood is refused cheaply.
        """
        key = outlet.caller.account, outlet.client_id, id
        with self.lock:
            if key not in self._live and self._answers.get(key) is None:
                self._room.check_client(outlet.owner, outlet.undelivered)

    def complete(self, request: Request, wait: Callable[[], Callable[[], None]]) -> None:
        """Let a request with a complete payload wait for a worker. ``wait`` queues it and returns a function that
        removes it; an error that it raises ends the request.
        """
        with self._locked:
            if request.state is RequestState.RECEIVING:
                request.state = RequestState.QUEUED
                request.completed()
                try:
                    request.leave_line = wait()
                except IsthmusError as error:
                    self._refuse(request, error)

    def start(self, request: Request, takes: float = 0.0) -> bool:
        """Mark a request as running for ``takes`` seconds; returns False if it was cancelled, or would miss its
        deadline.
        """
        with self._locked:
            if request.state is not RequestState.QUEUED or self._expired(
                request, takes if request.deadline_ms else 0.0
            ):
                return False
            request.state = RequestState.RUNNING
            return True

    def forward_to_next(self, request: Request, send: Callable[[], Callable[[], None]]) -> bool:
        """Pass the rest of a request, whose first part is computed, on to the next server; `finish` follows.

        ``send`` returns a function that cancels this without blocking. Returns False if the client has cancelled the
        request.
        """
        with self._locked:
            if request.cancelled:
                self._end(request, Cancelled("the client cancelled it while it ran"))
                return False
            request.state = RequestState.FORWARDED
            leave_line, request.leave_line = request.leave_line, lambda: None
        leave_line()  # the request no longer needs the model
        leave = send()
        with self.lock:
            if request.state is not RequestState.OVER:
                request.leave_line = leave
                return True
        leave()
        return True

    def finish(self, request: Request, answer: ServerAnswer, error: IsthmusError | None) -> None:
        """End a request: its answer is kept, and sent on the stream that waits for it."""
        if answer.held_bytes > self._limits.max_answer_bytes:
            most = self._limits.max_answer_bytes
            error = TooLarge(f"an answer of {answer.nbytes} bytes; all answers may have {most} (max_answer_bytes)")
            answer = failed_answer(request, error)
        with self._locked:
            outlet = request.outlet
            if request.state is RequestState.OVER:  # cancelled or expired while another server had it
                return
            if request.cancelled:
                self._end(request, Cancelled("the client cancelled it while it ran"))
                return
            self._end(request, error)
            if answer.failed is None or not answer.failed.retry:  # otherwise it is sent again, under the same id
                self._answers.put(answer)
            if outlet is not None:
                self._answers.send(answer, outlet)

    def abandon(self, request: Request, error: IsthmusError) -> None:
        """Forget a request whose payload is incomplete."""
        with self._locked:
            if request.state is RequestState.RECEIVING:
                self._end(request, error)

    def cancel(self, key: Key) -> None:
        """End a request unless it is answered. A running tail is not interrupted; its answer is dropped."""
        with self._locked:
            request = self._live.get(key)
            if request is None or request.cancelled:
                return
            outlet, error = request.outlet, Cancelled(f"request {key[2]} was cancelled")
            if request.state is RequestState.RUNNING:
                request.cancelled = True
            else:
                self._end(request, error)
            if outlet is not None:
                outlet.send(failed_answer(request, error))

    def left(self, outlet: Outlet) -> None:
        """Record that a stream is gone: incomplete uploads are dropped, running requests finish for a client that
        reconnects.
        """
        with self._locked:
            for request in [request for request in self._live.values() if request.outlet is outlet]:
                request.outlet = None
                if request.state not in (RequestState.RUNNING, RequestState.FORWARDED):
                    self._end(request, Cancelled("its stream ended"))
            self._answers.left(outlet)
            self.changed.notify_all()

    def forget(self, keys: Iterable[Key]) -> None:
        """Forget answers that the client has."""
        with self.lock:
            self._answers.forget(keys)

    def sent(self, answer: ServerAnswer, outlet: Outlet) -> None:
        """Record that an answer was sent completely on this stream."""
        with self.lock:
            self._answers.sent(answer, outlet)

    def outlets(self) -> set[Outlet]:
        """Streams with requests in progress. The caller holds `changed`."""
        return {request.outlet for request in self._live.values() if request.outlet is not None}

    def waits_for(self, outlet: Outlet) -> bool:
        """Return whether a request is still to be answered on this stream."""
        with self.lock:
            return any(request.outlet is outlet and not request.cancelled for request in self._live.values())

    def pending(self, but: Request | None = None) -> int:
        """Return the number of requests that wait for a worker or have one, not counting ``but``."""
        with self.lock:
            waiting = (RequestState.QUEUED, RequestState.RUNNING)
            return sum(one.state in waiting and one is not but for one in self._live.values())

    def queued(self, engine: Engine) -> int:
        """Return the number of requests for this model that wait for a worker."""
        with self.lock:
            return sum(one.state is RequestState.QUEUED and one.engine is engine for one in self._live.values())

    def states(self) -> Counter[RequestState]:
        """Return the number of requests in each state."""
        with self.lock:
            return Counter(one.state for one in self._live.values())

    def kept(self) -> tuple[int, int]:
        """Return the number of answers that are not acknowledged, and their bytes."""
        with self.lock:
            return len(self._answers), self._answers.nbytes

    @property
    def held_bytes(self) -> int:
        """The bytes that requests in progress hold."""
        return self._room.memory.total

    def sweep(self, draining: bool = False) -> None:
        """Drop unacknowledged answers that are too old, and requests past their deadline.

        ``draining``: also uploads that wait for their client.
        """
        limits = self._limits
        with self._locked:
            self._answers.sweep()
            for request in [request for request in self._live.values() if request.state is not RequestState.RUNNING]:
                idle = request.idle_seconds(limits.deadline_seconds)
                if not self._expired(request) and draining and idle > limits.idle_seconds:
                    text = f"the server is draining, and the rest of request {request.id} did not come in {idle:.1f} s"
                    self._refuse(request, ServerUnavailable(text))

    def _expired(self, request: Request, takes: float = 0.0) -> bool:
        """End a request that is past its deadline, or will be in ``takes`` seconds. The caller holds the lock.

        A request whose time limit is shorter than ``takes`` is tried: the estimate comes from other requests.
        """
        limit = request.deadline_seconds(self._limits.deadline_seconds)
        takes = takes if takes < limit else 0.0
        if request.age_seconds + takes <= limit:
            return False
        text = f"request {request.id} is {request.age_seconds:.3f} s old and still {request.state.value}"
        text += f", and takes about {takes:.3f} s" if takes else ""
        self._refuse(request, DeadlineExceeded(f"{text}; its limit is {limit:g} s"))
        return True

    def _refuse(self, request: Request, error: IsthmusError) -> None:
        """End a request and report it on its stream. The caller holds the lock."""
        outlet = request.outlet
        self._end(request, error)
        if outlet is not None:
            outlet.send(failed_answer(request, error))

    def _end(self, request: Request, error: IsthmusError | None) -> None:
        """Remove a request from the table. The caller holds the lock."""
        if request.state is not RequestState.OVER:
            request.state = RequestState.OVER
            del self._live[request.key]
            self._room.give_back(request)
            request.error = error
            request.leave_line()
            request.release()
            self._ends_unheard += 1
            if request.announced:
                self.ended.append((request, error))
            self.changed.notify_all()
