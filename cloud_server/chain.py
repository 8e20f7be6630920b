"""The next servers of chains: a request whose part is computed here is sent to the server that computes the next part.

This server is then a client, and uses the edge's connection: several requests in flight, each retried under its id
after a break and answered once, heartbeats, deadlines. It forwards only to servers that its operator has named; other
names are refused.

The next server gets the caller's identity in a token that this one signs (`access.Register`). Callers have connections
of their own, so each is charged for its own requests there.
"""

from __future__ import annotations

import contextvars
import itertools
import json
import logging
import queue
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from cloud_server.access import Caller
from cloud_server.config import NextServer
from cloud_server.executor import Finish
from cloud_server.limits import Limits
from cloud_server.models import Computed, Engine
from cloud_server.requests import Request
from cloud_server.requests.request_table import NextAnswer, failed_answer, joined_answer
from edge_client.probing import fetch_profile, probe
from edge_client.transport import Connection, ConnectionOptions, Exchange, Outgoing, Stamps, State, now_ns, wire
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import (
    AccessRefused,
    Cancelled,
    DeadlineExceeded,
    Disagreement,
    IsthmusError,
    NotAuthenticated,
    ServerUnavailable,
    SpecError,
    UnknownModel,
    logged,
)
from shared_hooks.generation import StepReply
from shared_hooks.metrics import NO_LAYERS
from shared_hooks.modules.manifest import encode

log = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 256
"""The maximum number of connections; beyond it the least recently used idle one is closed."""
IN_FLIGHT: Final = 1024
"""Concurrent requests on one connection, unless the next server accepts fewer."""
PATIENCE: Final = 10.0
"""Seconds without a stream before a request tries the next address, or fails."""

ELSEWHERE: Final = (ServerUnavailable, Disagreement, UnknownModel, NotAuthenticated)
"""Errors after which another address of the same server may succeed."""

_numbers = itertools.count(1)


class _Key(NamedTuple):
    """What connections are kept apart by."""

    address: str
    model_id: str
    weights_hash: str
    account: str


class _Way:
    """A connection, and how many requests wait on it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.waiting = 0


class Chain:
    """The connections of one server to its ``next`` servers; an `executor.Onward`."""

    def __init__(self, servers: Sequence[NextServer], limits: Limits) -> None:
        """Raises SpecError if two servers share a name or address."""
        self._servers: dict[str, NextServer] = {}
        for server in servers:
            for name in dict.fromkeys((server.name, *server.addresses)):
                if name in self._servers:
                    raise SpecError(f'next: two servers are called "{name}"')
                self._servers[name] = server
        self._limits = limits
        self._lock = threading.Lock()
        self._ways: OrderedDict[_Key, _Way] = OrderedDict()
        self._closed = False
        self._steps = ThreadPoolExecutor(IN_FLIGHT, "isthmus-chain-step")
        self._withdrawn: queue.SimpleQueue[_Forwarded | _Step | None] = queue.SimpleQueue()
        self._withdrawing = threading.Thread(target=self._withdraw, name="isthmus-chain", daemon=True)
        self._withdrawing.start()

    def check(self, server: str) -> None:
        """Raise AccessRefused, with the known names, for an unknown server."""
        if server not in self._servers:
            names = ", ".join(dict.fromkeys(one.name for one in self._servers.values()))
            raise AccessRefused(f'this server hands nothing on to "{server[:256]}"; it does to: {names} (--next)')

    def send(self, request: Request, part: Computed, own: split_pb2.ReplyHeader, finish: Finish) -> Callable[[], None]:
        """As `executor.Onward.send`."""
        server = self._servers[request.route[0].server]
        handed: _Forwarded | _Step
        if part.rest is None:
            handed = _Forwarded(self, server, request, part, own, finish)
            handed.send_next()
        else:
            handed = _Step(server, request, part.rest, own, finish, self._limits)
            try:
                self._steps.submit(contextvars.Context().run, handed.run)
            except RuntimeError:  # the pool is closed
                error = ServerUnavailable("the server is going away")
                finish(request, failed_answer(request, error), error)
        return partial(self._withdrawn.put, handed)

    def give_up(self, rest: Callable[[], Computed]) -> None:
        """As `executor.Onward.give_up`."""
        try:
            rest()  # outside of a `_Step` no link sends anything
        except IsthmusError:
            pass

    def link(self, engine: Engine, caller: Caller, route: Sequence[split_pb2.Hop]) -> _Link:
        """As `executor.Onward.link`."""
        return _Link(self, self._servers[route[0].server], engine, caller, route)

    def profile(self, request: split_pb2.ProfileRequest) -> Iterator[split_pb2.ProfileReply]:
        """As `executor.Onward.profile`; requested with this server's own credentials."""
        self.check(request.next[0])
        server = self._servers[request.next[0]]
        news: queue.SimpleQueue[split_pb2.ProfileReply | IsthmusError] = queue.SimpleQueue()

        def on_progress(done: int, total: int, what: str) -> None:
            progress = split_pb2.ProfileProgress(done=done, total=total, what=f"{server.name}: {what}"[:200])
            news.put(split_pb2.ProfileReply(progress=progress))

        def fetch() -> None:
            try:
                news.put(split_pb2.ProfileReply(profile=self._profile(server, request, on_progress)))
            except IsthmusError as error:
                news.put(type(error)(f"{server.name}: {error}"))
            except Exception as error:
                log.exception("the profile of %s", server.name)
                news.put(ServerUnavailable(f"{server.name}: {type(error).__name__}: {error}"))

        threading.Thread(target=fetch, name="isthmus-chain-profile", daemon=True).start()
        while True:
            item = news.get()
            if isinstance(item, IsthmusError):
                raise item
            yield item
            if item.WhichOneof("reply") == "profile":
                return

    def _profile(
        self, server: NextServer, request: split_pb2.ProfileRequest, on_progress: Callable[[int, int, str], None]
    ) -> bytes:
        address, rest = server.addresses[0], list(request.next[1:])
        found = fetch_profile(
            address,
            request.model_id,
            request.warmup,
            request.repetitions,
            request.seconds,
            on_progress,
            codecs=list(request.codecs),
            weights_hash=request.weights_hash,
            fresh=request.fresh,
            credentials=server.credentials,
            following=rest,
        )
        if not rest:
            sizes = sorted({int(cut.get("frontier_bytes", 0)) for cut in found.get("cuts", ())})
            answers = (0, int(found.get("answer_bytes", 0)))
            link, _ = probe(address, sizes[:: max(1, len(sizes) // 6)], answers, credentials=server.credentials)
            found = {"profile": found, "link": link.as_dict()}
        return json.dumps(found).encode()

    def _withdraw(self) -> None:
        """Cancel requests, in a thread, because those who cancel hold a lock."""
        while (handed := self._withdrawn.get()) is not None:
            with logged(log, "withdrawing a request from the next server"):
                handed.withdraw()

    def way(self, server: NextServer, address: str, engine: Engine, caller: Caller) -> _Way:
        """Return the connection for this caller and model, with one more request waiting. Raises ServerUnavailable."""
        key = self._key(address, engine, caller)
        gone = None
        with self._lock:
            if self._closed:
                raise ServerUnavailable("the server is going away")
            way = self._ways.get(key)
            if way is None:
                way = self._ways[key] = _Way(self._opened(server, address, engine, caller))
                if len(self._ways) > MOST_CONNECTIONS:
                    gone = next((one for one, found in self._ways.items() if not found.waiting and one != key), None)
            self._ways.move_to_end(key)
            way.waiting += 1
            idle = None if gone is None else self._ways.pop(gone)
        if idle is not None:
            idle.connection.close()
        return way

    def ready(self, address: str, engine: Engine, caller: Caller) -> _Way | None:
        """As `way`, if there is a connection that is up; else None."""
        with self._lock:
            way = self._ways.get(self._key(address, engine, caller))
            if way is None or way.connection.state is not State.READY:
                return None
            way.waiting += 1
            return way

    @staticmethod
    def _key(address: str, engine: Engine, caller: Caller) -> _Key:
        identity = engine.identity
        return _Key(address, identity.model_id, identity.weights_hash, caller.account)

    def exchange(
        self, way: _Way, outgoing: Outgoing, until: float, on_settled: Callable[[], None] | None = None, **more: Any
    ) -> Exchange:
        """Return a request on ``way``, which leaves it as soon as it is settled; ``on_settled``: called instead of
        that.
        """
        most = self._limits.max_answer_bytes
        return Exchange(
            next(_numbers),
            outgoing,
            until=until,
            stamps=Stamps(),
            check_header=lambda header, size: wire.check_answer(header, size, most),
            on_settled=on_settled or partial(self.left, way),
            **more,
        )

    def left(self, way: _Way) -> None:
        """Record that one request fewer waits on the connection."""
        with self._lock:
            way.waiting -= 1

    def _opened(self, server: NextServer, address: str, engine: Engine, caller: Caller) -> Connection:
        identity, credentials = engine.identity, server.credentials
        if server.signer is not None:
            credentials = credentials.with_passport(partial(server.signer.sign, caller))
        hello = wire.hello_frame(
            client_id=uuid.uuid4().hex,
            model_id=identity.model_id,
            weights_hash=identity.weights_hash,
            structure_digest=identity.structure_digest,
            plan_digest=identity.plan_digest,
            environment=identity.environment,
            about={**identity.about, "chain": "handed on"},
        )
        options = ConnectionOptions(
            patience=PATIENCE,
            max_in_flight=IN_FLIGHT,
            max_answer_bytes=self._limits.max_answer_bytes,
            credentials=credentials,
        )
        return Connection(address, hello, options, describe=lambda: encode(engine.manifest()))

    @property
    def limits(self) -> Limits:
        return self._limits

    def close(self) -> None:
        """Close the connections; what waits on them fails."""
        with self._lock:
            self._closed = True
            ways = list(self._ways.values())
            self._ways.clear()
        for way in ways:
            way.connection.close()
        self._steps.shutdown(wait=False, cancel_futures=True)
        self._withdrawn.put(None)


class _Forwarded:
    """A request that was passed on, until it is answered."""

    def __init__(
        self,
        chain: Chain,
        server: NextServer,
        request: Request,
        part: Computed,
        own: split_pb2.ReplyHeader,
        finish: Finish,
    ) -> None:
        assert part.cut is not None
        self._chain = chain
        self._server = server
        self._addresses = list(server.addresses)
        self._request = request
        self._own = own
        self._finish = finish
        self._began = now_ns()
        digest, description = part.cut
        self._outgoing: Outgoing | None = Outgoing(
            digest, description, part.reply.header, part.buffers, part.nbytes, route=tuple(request.route[1:])
        )
        self._until = time.monotonic() + request.seconds_left(chain.limits.deadline_seconds)
        self._lock = threading.Lock()
        self._sent_to: tuple[_Way, Exchange] | None = None
        self._over = False
        self._sends = 0
        """The number of addresses that were given up."""

    def send_next(self) -> None:
        """Ask at the next address."""
        try:
            self._send_to(self._addresses.pop(0))
        except IsthmusError as error:
            self._end(error)
        except Exception as error:  # a worker survives any failure
            log.exception("a request could not be handed on to %s", self._server.name)
            self._end(ServerUnavailable(f"{type(error).__name__}: {error}"))

    def _send_to(self, address: str) -> None:
        request, chain, outgoing = self._request, self._chain, self._outgoing
        assert outgoing is not None
        way = chain.way(self._server, address, request.engine, request.caller)
        exchange = chain.exchange(
            way,
            outgoing,
            self._until,
            lambda: self._settled(way, exchange),
            want_metrics=request.want_metrics,
            known_tables=dict.fromkeys(request.known_tables, NO_LAYERS),  # the edge has them
            together=request.together,
            observers=request.observers,
            about=request.about,
        )
        with self._lock:
            self._sent_to = way, exchange
            over = self._over
        if over:
            exchange.settle(AccessRefused("it is not wanted any more"))
        else:
            way.connection.submit(exchange)

    def _settled(self, way: _Way, exchange: Exchange) -> None:
        """Called in whatever thread settled it."""
        self._chain.left(way)
        error, over = exchange.error, self._over
        if isinstance(error, ELSEWHERE) and self._addresses and not over and exchange.remaining():
            self._sends += exchange.sends
            log.warning("%s: %s; %s is asked", way.connection.address, error, self._addresses[0])
            # not in this thread: the caller may hold the connection's lock
            with suppress(RuntimeError):  # no thread can be started
                threading.Thread(target=self.send_next, name="isthmus-chain-retry", daemon=True).start()
                return
        self._end(error, exchange)

    def _end(self, error: IsthmusError | None, exchange: Exchange | None = None) -> None:
        with self._lock:
            if self._over:
                return
            self._over, self._outgoing = True, None
        request = self._request
        if error is not None:
            named = type(error)(f"{self._server.name}: {error}")
            # not under the same id: this part would be computed again, and its connection has retried long enough
            self._finish(request, failed_answer(request, named, retry=False), named)
            return
        assert exchange is not None and exchange.reply is not None
        hop = request.route[0]
        sizes, took = (exchange.bytes_up, exchange.payload), now_ns() - self._began
        handed = NextAnswer(hop.server, hop.cut, *sizes, took, self._sends + exchange.sends)
        self._finish(request, joined_answer(request, self._own, exchange.reply, handed), None)

    def withdraw(self) -> None:
        """Cancel it at its client's wish."""
        with self._lock:
            if self._over:
                return
            self._over, self._outgoing, requested = True, None, self._sent_to
        if requested is not None:
            way, exchange = requested
            way.connection.cancel(exchange, AccessRefused("it is not wanted any more"))


_under_way: ContextVar[_Step] = ContextVar("isthmus_step_under_way")
"""The step for which this thread asks the next server."""


class _Step:
    """A step of a generation whose part here is done. A thread of its own asks the next server, so no worker waits."""

    def __init__(
        self,
        server: NextServer,
        request: Request,
        rest: Callable[[], Computed],
        own: split_pb2.ReplyHeader,
        finish: Finish,
        limits: Limits,
    ) -> None:
        self._server = server
        self._request = request
        self._rest = rest
        self._own = own
        self._finish = finish
        self._began = now_ns()
        self._until = time.monotonic() + request.seconds_left(limits.deadline_seconds)
        self._lock = threading.Lock()
        self._sent_to: tuple[_Way, Exchange] | None = None
        self._over = False
        self._reply = split_pb2.ReplyHeader()
        self._sizes = 0, 0
        """(bytes sent, number of messages)."""

    def run(self) -> None:
        """Ask for the rest. Runs in a thread of its own, which must survive."""
        _under_way.set(self)
        request, error = self._request, None
        try:
            computed = self._rest()
        except IsthmusError as wrong:
            error = wrong
        except Exception as wrong:
            log.exception("a step could not be handed on to %s", self._server.name)
            error = ServerUnavailable(f"{type(wrong).__name__}: {wrong}")
        if error is not None:
            # not under the same id: this part would be computed again, and its connection has retried long enough
            self._finish(request, failed_answer(request, error, retry=False), error)
            return
        hop, (bytes_up, sends), reply = request.route[0], self._sizes, self._reply
        reply.header, reply.payload_bytes = computed.reply.header, computed.nbytes
        payload, took = b"".join(computed.buffers), now_ns() - self._began
        handed = NextAnswer(hop.server, hop.cut, bytes_up, payload, took, sends)
        self._finish(request, joined_answer(request, self._own, reply, handed), None)

    def send_next(self, chain: Chain, way: _Way, outgoing: Outgoing) -> StepReply:
        """Send one step on one connection. Raises the error that it is answered with, and DeadlineExceeded."""
        exchange = chain.exchange(way, outgoing, self._until, want_metrics=False, about=self._request.about)
        with self._lock:
            self._sent_to = way, exchange
            over = self._over
        if over:
            exchange.settle(Cancelled("it is not wanted any more"))
        else:
            way.connection.submit(exchange)
        if not exchange.wait():
            way.connection.cancel(exchange, DeadlineExceeded(f"no answer of {self._server.name} within the deadline"))
        bytes_up, sends = self._sizes
        self._sizes = bytes_up + exchange.bytes_up, sends + exchange.sends
        if exchange.error is not None:
            raise exchange.error
        assert exchange.reply is not None
        self._reply.CopyFrom(exchange.reply)
        return StepReply(*wire.step_answer(exchange), exchange.bytes_up, exchange.bytes_down)

    def withdraw(self) -> None:
        """Cancel it at its client's wish."""
        with self._lock:
            self._over, requested = True, self._sent_to
        if requested is not None:
            way, exchange = requested
            way.connection.cancel(exchange, Cancelled("it is not wanted any more"))


class _Link:
    """A generation's sessions at the next server: a `shared_hooks.generation.Link`."""

    def __init__(
        self, chain: Chain, server: NextServer, engine: Engine, caller: Caller, route: Sequence[split_pb2.Hop]
    ) -> None:
        self._chain = chain
        self._server = server
        self._to = engine, caller
        self._cut = route[0].cut
        self._route = tuple(route[1:])
        self._addresses = list(server.addresses)
        """The address that served last comes first."""

    def step(
        self,
        session: int,
        number: int,
        header: dict[str, Any],
        tensors: list[torch.Tensor],
        fork: tuple[int, int] | None = None,
    ) -> StepReply:
        """As `Link.step`, for the `_Step` that this thread runs. Another address has none of its sessions, so they are
        rebuilt.
        """
        step = _under_way.get(None)
        if step is None:
            raise Cancelled("the step is not wanted any more")
        of, steps = fork or (0, 0)
        decoding = split_pb2.Decoding(cut=self._cut, fork_of=of, fork_step=steps)
        outgoing = wire.outgoing_step(session, number, decoding, header, tensors, self._route)
        for left in reversed(range(len(self._addresses))):
            address = self._addresses[0]
            try:
                return step.send_next(self._chain, self._chain.way(self._server, address, *self._to), outgoing)
            except ELSEWHERE as error:
                if not left:
                    raise type(error)(f"{self._server.name}: {error}") from error
                self._addresses = [*self._addresses[1:], address]
                log.warning("%s: %s; %s is asked", address, error, self._addresses[0])
            except IsthmusError as error:
                raise type(error)(f"{self._server.name}: {error}") from error
        raise AssertionError("unreachable: a server has an address")

    def close(self, session: int) -> None:
        """As `Link.close`; does not block."""
        chain = self._chain
        way = chain.ready(self._addresses[0], *self._to)
        if way is None:
            return
        decoding = split_pb2.Decoding(cut=self._cut, close=True)
        outgoing = wire.outgoing_step(session, 0, decoding, {}, [], self._route)
        exchange = chain.exchange(way, outgoing, time.monotonic() + PATIENCE, want_metrics=False)
        try:
            way.connection.submit(exchange)
        except IsthmusError:
            pass  # the server is leaving, and the session with it
