"""The server without its transport: streams are opened, frames go in, frames come out.

A transport opens a `Session` per stream and moves frames; everything that streams share is here: the served models,
the requests on their way, the answers that wait to be acknowledged, the bounds, the workers and the draining.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from cloud_server import wire
from cloud_server.answers import Answer, AnswerStore, Key
from cloud_server.engine import Engine, Identity
from cloud_server.limits import Limits
from cloud_server.load import QueueClock
from cloud_server.probe import Probe
from cloud_server.profiles import Profiles
from cloud_server.recipes import RecipeCache
from cloud_server.request import Request, State
from cloud_server.session import Session
from cloud_server.workers import Workers
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import (
    BadFrame,
    Cancelled,
    DeadlineExceeded,
    IsthmusError,
    ModelFailed,
    ServerUnavailable,
    SpecError,
)

log = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0


class Core:
    """Serves ``engines`` to any number of sessions. Use as a context manager, or call `close` at the end."""

    def __init__(
        self,
        engines: Iterable[Engine],
        limits: Limits | None = None,
        workers: int = 1,
        hooks: Iterable[str] = (),
    ) -> None:
        """``hooks``: observers that clients may ask for."""
        self.limits = limits or Limits()
        self.hooks = frozenset(hooks)
        self.engines: dict[str, Engine] = {}
        for engine in engines:
            if engine.identity.model_id in self.engines:
                raise SpecError(f'models: two are called "{engine.identity.model_id}"')
            self.engines[engine.identity.model_id] = engine
        self.recipes = RecipeCache(self.limits)
        self._changed = threading.Condition()  # its lock guards all that follows, and every request's state
        self._draining = False
        self._sessions: set[Session] = set()
        self._live: dict[Key, Request] = {}
        self._live_of: Counter[str] = Counter()
        self._live_bytes = 0
        self._answers = AnswerStore(self.limits)
        self._workers = Workers(workers)
        self._queue_clock = QueueClock()
        self._probes = threading.Semaphore(self.limits.max_probes)
        self.profiles = Profiles(self.engines, self.limits, self._workers.put)
        self._closed = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="isthmus-sweeper", daemon=True)
        self._sweeper.start()

    def __enter__(self) -> Core:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def identities(self) -> list[Identity]:
        return [engine.identity for engine in self.engines.values()]

    # Streams

    @property
    def draining(self) -> bool:
        return self._draining

    def check_open(self) -> None:
        """Raises ServerUnavailable while draining."""
        if self._draining:
            raise ServerUnavailable("the server is draining: it finishes what it has and takes nothing new")

    def open(self, peer: str) -> Session:
        """A new stream from ``peer`` (for the log). Raises ServerUnavailable while draining or full."""
        with self._changed:
            self.check_open()
            if len(self._sessions) >= self.limits.max_clients:
                raise ServerUnavailable(f"the server has {len(self._sessions)} clients, its limit; try again later")
            session = Session(self, peer)
            self._sessions.add(session)
            return session

    def left(self, session: Session) -> None:
        """The stream is gone: unfinished uploads are dropped, running requests finish for whoever comes back."""
        with self._changed:
            self._sessions.discard(session)
            for request in [request for request in self._live.values() if request.session is session]:
                request.session = None
                if request.state is not State.RUNNING:
                    self._end(request)
            self._changed.notify_all()

    @contextmanager
    def probing(self) -> Iterator[Probe]:
        """A stream that measures the link. Raises ServerUnavailable while draining, or when there are enough."""
        self.check_open()
        if not self._probes.acquire(blocking=False):
            raise ServerUnavailable(f"{self.limits.max_probes} streams probe the link, which is the limit")
        try:
            yield Probe(self.limits, self.load)
        finally:
            self._probes.release()

    def load(self, but: Request | None = None) -> split_pb2.Load:
        """How busy the server is, not counting the request ``but``."""
        with self._changed:
            waiting = (State.QUEUED, State.RUNNING)
            pending = sum(one.state in waiting and one is not but for one in self._live.values())
        return split_pb2.Load(pending=pending, workers=self._workers.count, queue_ns=self._queue_clock.mean_ns)

    # Requests

    def admit(self, request: Request) -> Answer | None:
        """Takes a new request in, or recognises one that is known already.

        Returns its answer when there is one. Otherwise the request is RECEIVING afterwards, or OVER when the same one
        is waiting or running already: its answer then goes to this request's stream, and its chunks are not needed.
        Raises BadFrame when the id belongs to another request, and ServerUnavailable when there is no room now.
        """
        session = request.session
        assert session is not None
        with self._changed:
            known = self._live.get(request.key)
            answer = self._answers.get(request.key)
            earlier = known.fingerprint if known else answer.fingerprint if answer else request.fingerprint
            if earlier != request.fingerprint:
                raise BadFrame(f"request id {request.key[1]} was used before, for a request with other content")
            if answer is not None:
                request.state = State.OVER
                return answer
            if known is not None:
                if known.state is not State.RECEIVING:
                    known.session, known.cancelled = session, False
                    request.state = State.OVER
                    return None
                if known.session is session:
                    raise BadFrame(f"request {request.key[1]} was announced again before its payload was complete")
                self._end(known)  # the client came back before the old stream was seen to be dead
            self._check_room(request, session)
            self._live[request.key] = request
            self._live_of[request.key[0]] += 1
            self._live_bytes += request.payload_bytes
            return None

    def _check_room(self, request: Request, session: Session) -> None:
        limits, client = self.limits, request.key[0]
        self.check_open()
        if self._live_of[client] + session.undelivered >= limits.max_in_flight:
            raise ServerUnavailable(f"this client has {limits.max_in_flight} requests in flight, which is the limit")
        if len(self._live) >= limits.max_pending:
            raise ServerUnavailable(f"the server has {limits.max_pending} requests waiting, which is its limit")
        if self._live_bytes + request.payload_bytes > limits.max_pending_bytes:
            raise ServerUnavailable(f"the server has no room: it holds {self._live_bytes} bytes of requests")

    def submit(self, request: Request) -> None:
        """The payload is complete: the request waits for a worker."""
        with self._changed:
            if request.state is State.RECEIVING:
                request.state = State.QUEUED
                request.completed()
                self._workers.put(partial(self._work, request))

    def abandon(self, request: Request) -> None:
        """Forgets a request whose payload is not complete."""
        with self._changed:
            if request.state is State.RECEIVING:
                self._end(request)

    def cancel(self, key: Key) -> None:
        """Ends a request unless it is answered already; a running tail is not interrupted, its answer is dropped."""
        with self._changed:
            request = self._live.get(key)
            if request is None or request.cancelled:
                return
            session = request.session
            if request.state is State.RUNNING:
                request.cancelled = True
            else:
                self._end(request)
            if session is not None:
                session.send(wire.failure(key, request.fingerprint, Cancelled(f"request {key[1]} was cancelled")))

    def forget(self, keys: Iterable[Key]) -> None:
        """The client has these answers."""
        with self._changed:
            self._answers.forget(keys)

    def waits_for(self, session: Session) -> bool:
        """Whether any request still has to be answered on this stream."""
        with self._changed:
            return any(request.session is session and not request.cancelled for request in self._live.values())

    def _end(self, request: Request) -> None:
        """Takes a request out of the books; the caller holds the lock."""
        if request.state is not State.OVER:
            request.state = State.OVER
            del self._live[request.key]
            self._live_of[request.key[0]] -= 1
            if not self._live_of[request.key[0]]:
                del self._live_of[request.key[0]]
            self._live_bytes -= request.payload_bytes
            self._changed.notify_all()

    # Work

    def _work(self, request: Request) -> None:
        """One worker's turn: decide whether the request is still wanted, compute, answer."""
        with self._changed:
            if request.state is not State.QUEUED:
                return
            if self._expired(request):
                return
            request.state = State.RUNNING
        self._queue_clock.add(time.perf_counter_ns() - request.complete_ns)
        answer = self._compute(request)
        request.payload = memoryview(b"")
        with self._changed:
            session = request.session
            self._end(request)
            if request.cancelled:
                return
            self._answers.put(answer)
            if session is not None:
                session.send(answer)

    def _compute(self, request: Request) -> Answer:
        started_ns = time.perf_counter_ns()
        try:
            computed = request.compute(self.limits.max_request_bytes)
            return wire.answer(request, computed, started_ns, self.load(but=request))
        except IsthmusError as error:
            failure: IsthmusError = error
        except BaseException as error:  # a worker survives everything: a model may even raise SystemExit
            failure = ModelFailed(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
        log.warning("request %s of %s: %s: %s", request.key[1], request.key[0], type(failure).__name__, failure)
        if failure.__cause__ is not None:
            log.info("its cause:", exc_info=failure.__cause__)
        return wire.failure(request.key, request.fingerprint, failure)

    def _expired(self, request: Request) -> bool:
        """Ends a request that is older than its deadline; the caller holds the lock."""
        limit = request.deadline_seconds(self.limits.deadline_seconds)
        if request.age_seconds <= limit:
            return False
        session, was = request.session, request.state
        self._end(request)
        if session is not None:
            text = f"request {request.key[1]} is {request.age_seconds:.3f} s old and still {was.value}"
            error = DeadlineExceeded(f"{text}; its limit is {limit:g} s")
            session.send(wire.failure(request.key, request.fingerprint, error))
        return True

    def _sweep(self) -> None:
        while not self._closed.wait(SWEEP_SECONDS):
            with self._changed:
                self._answers.sweep()
                for request in [request for request in self._live.values() if request.state is not State.RUNNING]:
                    self._expired(request)

    # The end

    def drain(self) -> None:
        """Takes nothing new from now on and tells every client."""
        with self._changed:
            if self._draining:
                return
            self._draining = True
            for session in self._sessions:
                session.drain()

    def wait_idle(self, timeout: float) -> bool:
        """Waits until every admitted request is answered, at most ``timeout`` seconds; False when some are not."""
        return self._wait(lambda: not self._live, timeout)

    def wait_gone(self, timeout: float) -> bool:
        """Waits until every stream is closed, at most ``timeout`` seconds; False when some are not."""
        return self._wait(lambda: not self._sessions, timeout)

    def _wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def dismiss(self) -> None:
        """Ends every stream after the frames that wait to be sent on it."""
        with self._changed:
            for session in self._sessions:
                session.end(ServerUnavailable("the server has drained and goes away"))

    def close(self) -> None:
        """Ends the streams and the threads; a running tail is left to finish on its own."""
        self.drain()
        self.dismiss()
        self._closed.set()
        self._workers.stop()
