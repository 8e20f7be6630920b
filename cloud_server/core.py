"""The server without its transport: it opens streams, and turns incoming frames into outgoing ones.

A transport opens a `StreamSession` per stream and moves frames. What the streams share is here: the served models, the
table of requests in progress, the limits, the workers and draining.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from cloud_server.access import Caller, Quotas, granted
from cloud_server.decoding import Sessions, SessionStep
from cloud_server.executor import Executor, LastOfChain, Onward
from cloud_server.fleet import Fleet
from cloud_server.fleet.version import DeferredRequest
from cloud_server.limits import NEVER, Limits
from cloud_server.models import Engine, Identity, Profiles
from cloud_server.requests import Request, RequestTable
from cloud_server.scheduling import BatchLimits, Payer, Scheduler, Task, Trim, Workers
from cloud_server.streams import AccountPace, CrossingCache, ProbeStream, StreamSession
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import AccessRefused, ServerUnavailable, SpecError, logged
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.sharing import Holding, Owner, Shares, evictions

log = logging.getLogger("cloud_server")

FILE_READERS = 2
"""The number of threads that read image files; each decodes in a process of its own."""
SWEEP_SECONDS = 1.0
LEAVE_SECONDS = 2.0
"""How long a stream that must make room may take to receive its outgoing frames."""
PROBE_BYTES_PER_SECOND = 100e6
"""The rate of a probe while requests wait for a worker, because copying bytes delays all requests."""
FRESH_NS = 1_000_000
"""A deadline check within this time is not repeated."""
REFUSAL_SECONDS = 0.005
"""What a refused request is charged. gRPC's threads and the answer cost more than the check, and a client that respects
the limits of its Welcome is seldom refused.
"""
BURST_SECONDS = 60.0
"""How many seconds of a minute's probe quota may be used at once."""


class Core:
    """Serves ``engines`` to any number of sessions. Use it as a context manager, or call `close` at the end."""

    def __init__(
        self,
        engines: Iterable[Engine] | Fleet,
        limits: Limits | None = None,
        workers: int = 1,
        observers: Iterable[str] = (),
        lifecycle: Lifecycle | None = None,
        onward: Onward | None = None,
    ) -> None:
        """``observers``: those that clients may ask for. ``lifecycle``: the server's own hooks. ``onward``: connections
        to the next servers of chains, or None.
        """
        self.lifecycle = Lifecycle("cloud") if lifecycle is None else lifecycle
        self.limits = limits or Limits()
        self.observers = frozenset(observers)
        self.fleet = engines if isinstance(engines, Fleet) else None
        """Models that are loaded and unloaded at run time; None if they are fixed."""
        self.engines: Mapping[str, Engine] = engines if isinstance(engines, Fleet) else _named(engines)
        self.crossings = CrossingCache(self.limits)
        self.decoding = Sessions(self.limits)
        self.pace = AccountPace(self.limits.max_frames_share)
        self.requests = RequestTable(self.limits, self.check_open, self.lifecycle, self._check_new)
        self._changed = self.requests.changed  # guards draining and sessions, too: nothing is admitted during a drain
        self._draining = False
        self._drained = False
        self._sessions: set[StreamSession] = set()
        self._places = Shares(self.limits.max_clients)
        """Streams by account."""
        self._leaving: dict[StreamSession, float] = {}
        """Streams that must make room, and when they end at the latest: their threads may be blocked in sending."""
        self._quotas = Quotas()
        self.scheduler = Scheduler(workers, _batch_limits(self.limits))
        self.onward = onward or LastOfChain()
        self.check_next, self.link_onward = self.onward.check, self.onward.link
        self._executor = Executor(self.limits, self.requests, self.scheduler, self.lifecycle, self.load, self.onward)
        self._workers = Workers(self.scheduler, workers, self._executor)
        self._readers = Workers(Scheduler(FILE_READERS), FILE_READERS)
        self._probes: Counter[str] = Counter()
        self.profiles = Profiles(self.engines, self.limits, self._workers, self._quotas, self.onward.profile)
        self._closed = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="isthmus-sweeper", daemon=True)
        self._sweeper.start()

    def __enter__(self) -> Core:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def identities(self) -> list[Identity]:
        """The identities of the served models."""
        return [engine.identity for engine in self.engines.values()]

    def engines_for(self, caller: Caller) -> dict[str, Engine]:
        """Return the served models by id, without those that ``caller`` may not use."""
        known = dict(self.engines.items())  # a snapshot
        return {id: known[id] for id in granted(caller.policy.models, known)}

    # Streams

    @property
    def draining(self) -> bool:
        return self._draining

    def check_open(self) -> None:
        """Raise ServerUnavailable while draining."""
        if self._draining:
            raise ServerUnavailable("the server is draining: it finishes what it has and takes nothing new")

    def open(self, caller: Caller, brief: bool = False) -> StreamSession:
        """Open a stream for ``caller``; ``brief``: for one request. Raises ServerUnavailable while draining or full."""
        with self._changed:
            self.check_open()
            self._make_place(caller)
            session = StreamSession(self, caller, self._left, brief)
            self._sessions.add(session)
            self._places.add(Owner(caller.account), 1)
        self.lifecycle.emit(Stage.AFTER_CONNECT, peer=caller.peer)
        return session

    def _make_place(self, caller: Caller) -> None:
        """Make room for one more stream by ending the least useful one if all are taken. Raises ServerUnavailable."""
        if self._places.has_room(1):
            return
        busy, newcomer, most = self.requests.outlets(), Owner(caller.account), self.limits.max_clients
        gone = evictions(self._places, newcomer, 1, [self._holding(one, one in busy) for one in self._sessions])
        if gone is None:
            raise ServerUnavailable(
                f"the server has {most} clients, its limit (max_clients), and none is idle; "
                f"{self._places.account(caller.account)} are of this account: try again later"
            )
        for session in gone:
            self._discard(session)
            self._leaving[session] = time.monotonic() + LEAVE_SECONDS
            session.give_up(
                ServerUnavailable(
                    f"this stream was silent for {session.silent_seconds:.1f} s, and its place was needed: the server "
                    f"has {most} clients, its limit (max_clients)"
                )
            )

    def _holding(self, session: StreamSession, busy: bool) -> Holding[StreamSession]:
        """Return a stream, for eviction: those without a handshake go first, then those without requests, the longest
        silent first.
        """
        busy, silent = busy or session.has_mail, session.silent_seconds
        usefulness = (busy, session.is_greeted, -silent)
        is_idle = not busy and silent > self.limits.idle_seconds
        return Holding(session, Owner(session.caller.account), 1, usefulness, is_idle)

    def _discard(self, session: StreamSession) -> None:
        """Release the place of a stream. The caller holds the lock."""
        if session in self._sessions:
            self._sessions.remove(session)
            self._places.remove(Owner(session.caller.account), 1)

    def _left(self, session: StreamSession, reason: str) -> None:
        """Called when a stream is gone; its place is released after hooks have run."""
        self.requests.left(session)
        peer, brief = session.caller.peer, session.brief
        self.lifecycle.emit(Stage.ON_DISCONNECT, client=session.client_id, peer=peer, reason=reason, brief=brief)
        with self._changed:
            self._discard(session)
            self._leaving.pop(session, None)
            self._changed.notify_all()

    @contextmanager
    def probing(self, caller: Caller) -> Iterator[ProbeStream]:
        """Open a stream of ``caller`` that measures the link.

        Raises AccessRefused, and ServerUnavailable if there are too many.
        """
        if not caller.policy.probe:
            raise AccessRefused(f'identity "{caller.identity}" may not probe the link here')
        limits, account = self.limits, caller.account
        with self._changed:
            if self._probes[account] >= limits.max_probes_per_account:
                most = limits.max_probes_per_account
                text = f"{account} has {most} streams that probe the link"
                raise ServerUnavailable(f"{text}, the limit of one account (max_probes_per_account)")
            if sum(self._probes.values()) >= limits.max_probes:
                raise ServerUnavailable(f"{limits.max_probes} streams probe the link, which is the limit (max_probes)")
            self._probes[account] += 1
        try:
            yield ProbeStream(limits, partial(self.load, caller), partial(self._pay_probe, caller))
        finally:
            with self._changed:
                self._probes[account] -= 1
                self._probes += Counter()  # drops those at 0

    def _pay_probe(self, caller: Caller, nbytes: int) -> None:
        """Charge a probe for ``nbytes``, and slow it down while requests wait. Raises QuotaExceeded."""
        self._quotas.take(caller, [("bytes of probes", self.limits.probe_bytes_per_minute, nbytes)], BURST_SECONDS)
        if self.scheduler:
            time.sleep(nbytes / PROBE_BYTES_PER_SECOND)

    def load(self, caller: Caller | None = None, but: Request | None = None) -> split_pb2.Load:
        """Return how busy the server is, not counting the request ``but``, and how long ``caller`` (None: the average
        caller) waits for a worker.
        """
        queue_ns = self.scheduler.waits.mean_ns(caller.account if caller else None)
        return split_pb2.Load(pending=self.requests.pending(but), workers=self._workers.count, queue_ns=queue_ns)

    @property
    def clients(self) -> int:
        """The number of open streams."""
        return len(self._sessions)

    # Requests

    def submit(self, request: Request) -> None:
        """Let a request whose payload is complete wait for a worker."""
        self.requests.complete(request, partial(self._wait, request))

    def turned_away(self, payer: Payer) -> None:
        """Charge a payer for a request that was refused because the server is too busy."""
        self.scheduler.refused(payer)
        self.pace.spent(payer.account, REFUSAL_SECONDS)

    def _check_new(self, request: Request) -> None:
        """Raise ServerUnavailable for a request that would miss its deadline, and QuotaExceeded."""
        self._check_time(request)
        self._quotas.spend(request.caller, request.payload_bytes)

    def _check_time(self, request: Request) -> None:
        """Raise ServerUnavailable for a request that would miss its deadline."""
        self.scheduler.check_time(request.payer, request.seconds_left(self.limits.deadline_seconds))

    def _wait(self, request: Request) -> Callable[[], None]:
        """Add the request to the scheduler. Raises ServerUnavailable if it would wait there in vain."""
        if request.complete_ns - request.began_ns > FRESH_NS:
            self._check_time(request)
        self._check_queue(request)
        residence, put = request.engine.residence, partial(self._put, request)
        cut = "" if request.crossing is None or request.step_task is not None else request.crossing.layer_name
        enter = put if residence is None else partial(residence.enter, request.caller.account, put, cut)
        if request.step_task is not None:
            return self._line_up(request, request.step_task.step, enter, put)
        if not request.is_file:
            return enter()
        # decoded by another process: no worker waits for it
        deferred = DeferredRequest()
        deferred.before = self._readers.scheduler.add(
            Task(partial(self._read, request, deferred, enter), request.payer)
        )
        return deferred.leave

    def _line_up(
        self,
        request: Request,
        step: SessionStep,
        enter: Callable[[], Callable[[], None]],
        put: Callable[[], Callable[[], None]],
    ) -> Callable[[], None]:
        """Let a step of a decoding session wait for earlier steps that are in progress."""
        deferred = DeferredRequest()
        waits, given_up = self.decoding.line_up(request.owner, step, partial(deferred.go, enter, instead=put))
        deferred.before = given_up
        if waits:
            return deferred.leave
        try:
            leave_line = enter()
        except BaseException:
            given_up()
            raise

        def leave() -> None:
            given_up()
            leave_line()

        return leave

    def _read(self, request: Request, deferred: DeferredRequest, enter: Callable[[], Callable[[], None]]) -> bool:
        """Read an input file. Runs in a reader's thread, which must survive; a request without an answer ends by its
        deadline.
        """
        try:
            request.read_file(self.limits.max_request_bytes)
            deferred.go(enter, instead=partial(self._put, request))
        except Exception:
            log.exception("a file for model %s was not put in line", request.engine.identity.model_id)
        return True

    def _put(self, request: Request) -> Callable[[], None]:
        return self.scheduler.add(request.task(self.limits.deadline_seconds))

    def _check_queue(self, request: Request) -> None:
        """Raise ServerUnavailable if too many requests for its model wait already; counts the refusal."""
        most = self.limits.max_queue_size
        if most < NEVER and self.requests.queued(request.engine) > most:
            model = request.engine.identity.model_id
            raise ServerUnavailable(
                f'{most} requests wait for model "{model}", the limit (max_queue_size); try again later'
            )

    # Time limits

    def _sweep(self) -> None:
        trim = Trim()
        while not self._closed.wait(SWEEP_SECONDS):
            with logged(log, "ending what is late"):
                self.requests.sweep(self._draining)
                self.decoding.sweep()
                trim.look(self.requests.held_bytes + self.requests.kept()[1])
                with self._changed:
                    now = time.monotonic()
                    late = [session for session, until in self._leaving.items() if until <= now]
                for session in late:
                    why = "its place was needed, and the client does not fetch what it is sent"
                    session.drop(ServerUnavailable(why))

    # Shutdown

    def drain(self) -> None:
        """Accept no new requests, and inform every client."""
        with self._changed:
            if self._draining:
                return
            self._draining = True
            for session in self._sessions:
                session.drain()
        self.lifecycle.emit(Stage.BEFORE_DRAIN)

    def drained(self, answered: bool) -> None:
        """Run the hooks for the end of draining; only the first call after `drain` counts."""
        with self._changed:
            if self._drained or not self._draining:
                return
            self._drained = True
        self.lifecycle.emit(Stage.AFTER_DRAIN, answered=answered)

    def wait_idle(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until all requests are answered or cancelled; returns whether they are."""
        return self._wait_for(lambda: self.requests.empty, timeout)

    def wait_gone(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until all streams are closed; returns whether they are."""
        return self._wait_for(lambda: not self._sessions, timeout)

    def _wait_for(self, condition: Callable[[], bool], timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def dismiss(self) -> None:
        """End every stream after its outgoing frames."""
        with self._changed:
            for session in self._sessions:
                session.end(ServerUnavailable("the server has drained and goes away"))

    def close(self) -> None:
        """End the streams and threads; a running tail is left to finish."""
        self.drain()
        self.drained(self.wait_idle(0))
        self.dismiss()
        self._closed.set()
        self._readers.stop()
        self._workers.stop()
        self.decoding.close()
        self.onward.close()
        self._executor.close()


def _batch_limits(limits: Limits) -> BatchLimits:
    delay = limits.max_queue_delay_microseconds / 1e6
    return BatchLimits(limits.max_batch_size, limits.max_request_bytes, delay, limits.preferred_batch_size)


def _named(engines: Iterable[Engine]) -> dict[str, Engine]:
    """Return the engines by model id. Raises SpecError for duplicates."""
    found: dict[str, Engine] = {}
    for engine in engines:
        if engine.identity.model_id in found:
            raise SpecError(f'models: two are called "{engine.identity.model_id}"')
        found[engine.identity.model_id] = engine
    return found
