"""The connection to a server: opened on demand, reopened when broken; unanswered requests are sent again by id.

One keeper thread owns the stream and reads it; any thread may submit, wait and cancel. Which failures end what:

* The server refuses the hello for a permanent reason (another model or weights, unknown model, no such service): all
  waiting requests get that error, and the next request starts again.
* The stream breaks otherwise: after back-off with jitter a new stream is opened, and everything unanswered is sent
  again under its old id (the server answers a repeated id from memory). Each request has a deadline and a limit of
  attempts.
* The server sends heartbeats while it has requests of this client; if several are missing, the stream is broken off.
* No stream for ``patience`` seconds: requests that have waited so long get `ServerUnavailable`; the others keep
  waiting. With an alternative (``otherwise``), if the address refuses connections, it is `REFUSED_SECONDS`: a
  flickering path loses packets, but refuses nothing.

An idle connection that breaks is not reopened before the next request.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # the builtin one only from Python 3.11 on
from dataclasses import dataclass
from typing import Any, Final, cast

import grpc

from edge_client.credentials import Credentials
from edge_client.dial import dial, hang_up, is_loopback
from edge_client.transport import options, wire
from edge_client.transport.exchange import Exchange, Opener, Waiting, settle
from edge_client.transport.options import ConnectionOptions, Counters, KeepAlive, State
from edge_client.transport.outbox import Inbox, Opening, Outbox, SendArea
from protos import PROTOCOL_VERSION
from protos.frames import ServerFrame, parse_server_frame, serialize_client_frame
from protos.isthmus.v1 import split_pb2
from shared_hooks.codecs import is_offered
from shared_hooks.errors import (
    Cancelled,
    Disagreement,
    IsthmusError,
    ServerUnavailable,
)
from shared_hooks.lifecycle import Lifecycle, Stage

# Whether the other side is alive: it has to send heartbeats at the agreed interval while it has requests of ours.
#
# Heartbeats notice what pings do not: a proxy answers for a server that is gone, and gRPC's own threads answer for a
# process that hangs.

BEATS: Final = 4
"""The number of missing heartbeats that counts as silence."""
LONGEST_SECONDS: Final = 60.0
FADE: Final = 0.9
"""The share of a long silence that is remembered from frame to frame."""


class Pulse:
    """One connection's limit of silence, in seconds: ``beats`` missing heartbeats, or twice the longest recent silence.

    A slow link keeps a frame for long behind others, so a silence that ended well is tolerated again, and after an
    alarm twice as much. One thread calls `record_frame`, one `watch`.
    """

    def __init__(self, heartbeat: float) -> None:
        self._least = self.bound = BEATS * heartbeat
        self._last_frame = time.monotonic()

    def record_frame(self) -> None:
        """Record that a frame came."""
        now = time.monotonic()
        silence, self._last_frame = now - self._last_frame, now
        self.bound = max(self._least, FADE * self.bound, min(LONGEST_SECONDS, 2 * silence))

    @property
    def is_weak(self) -> bool:
        """Whether half of the tolerated silence has passed: too little to reconnect, enough to use an alternative
        meanwhile.
        """
        return time.monotonic() - self._last_frame > self.bound / 2

    def watch(self, ended: threading.Event, patience: Callable[[], float]) -> float:
        """Wait until the silence exceeds ``patience()`` times the limit, and return it in seconds; 0 once ``ended``.

        A patience of 0 means that nothing is expected now.
        """
        self._last_frame = time.monotonic()
        while not ended.wait(self._least / (2 * BEATS)):
            if not (times := patience()):
                self._last_frame = time.monotonic()
            elif (silence := time.monotonic() - self._last_frame) > times * self.bound:
                self.bound = max(self._least, min(LONGEST_SECONDS, 2 * self.bound))
                return silence
        return 0.0


# Exponential back-off with jitter.


class Backoff:
    """Growing delays: ``first * factor**n`` seconds, at most ``ceiling``, each drawn from the upper half.

    The jitter keeps many edges from returning to a restarted server at once; the lower half is excluded so that one
    edge does not flood it. The ceiling limits how long a server's return goes unnoticed: an attempt at a closed port
    takes 1.4 ms of one core (100 in a row, loopback), so two per second cost an edge 0.3 % of it.
    """

    def __init__(
        self,
        first: float = 0.1,
        factor: float = 2.0,
        ceiling: float = 0.5,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._first, self._factor, self._ceiling, self._draw = first, factor, ceiling, draw
        self._n = 0

    def next(self) -> float:
        """Return the seconds to wait before the next attempt."""
        delay = min(self._ceiling, self._first * self._factor**self._n)
        if delay < self._ceiling:
            self._n += 1
        return self._draw(delay / 2, delay)

    def reset(self) -> None:
        """Start again from the first delay, because the other side is alive."""
        self._n = 0


NUDGE_SECONDS: Final = 0.5  # between two attempts at a server that is gone, while requests run without it
DOUBT_AFTER: Final = 3
"""The number of failed attempts after which credentials that were once accepted may be the reason."""
REFUSED_SECONDS: Final = 1.0  # several attempts: a server that is being restarted is not missed
POLITE_SECONDS: Final = 0.5  # the time that a stream has for a clean end when the client closes
log = logging.getLogger("edge_client")

CONNECT_SECONDS: Final = (1.5, 1.5, 5.0)
"""Time limits for TCP and HTTP/2 of three attempts in turn. TCP repeats packets lost on a dead path after 1, 3 and 7 s:
a new attempt detects a recovered path sooner. The long one is for slow links.
"""


# One gRPC stream to one server: channel and call. It is used once; the next attempt makes another.


METHOD: Final = "/isthmus.v1.Split/Session"


@dataclass(frozen=True, slots=True)
class _Arguments:
    """The channel's arguments: keep-alive, and the time limit for the HTTP/2 handshake."""

    keep_alive: KeepAlive
    connect_within: float

    def options(self) -> list[tuple[str, int]]:
        return [*self.keep_alive.options(), ("grpc.min_reconnect_backoff_ms", int(1000 * self.connect_within))]


class Stream:
    """One gRPC stream. Iterating raises `grpc.RpcError` when it breaks."""

    def __init__(
        self,
        address: str,
        outbox: Outbox,
        keep_alive: KeepAlive,
        connect_within: float,
        credentials: Credentials | None = None,
    ) -> None:
        """Raises SpecError for unusable credentials."""
        self.welcomed = threading.Event()
        """Set when the handshake is over, and at the end."""
        self.ended = threading.Event()
        self.broken_for = ""
        """Why this side broke it off."""
        self._outbox = outbox
        self._channel = dial(address, _Arguments(keep_alive, connect_within), credentials)
        session = self._channel.stream_stream(
            METHOD, request_serializer=serialize_client_frame, response_deserializer=parse_server_frame
        )
        self._call: Any = session(cast("Iterator[Any]", outbox))

    def __iter__(self) -> Iterator[ServerFrame]:
        return cast("Iterator[ServerFrame]", iter(self._call))

    def cancel(self, why: str = "") -> None:
        """Break the stream off; the iteration ends with CANCELLED."""
        self.broken_for = self.broken_for or why
        self._call.cancel()

    def close(self) -> None:
        """Release everything, and end the threads that read the outbox and watch the stream."""
        self.ended.set()
        self.welcomed.set()
        self._outbox.abort()
        self._call.cancel()
        hang_up(self._channel)


class Connection:
    """The connection to one server, with one stream at a time. ``hello``: the first frame of every stream."""

    def __init__(
        self,
        address: str,
        hello: split_pb2.ClientFrame,
        options: ConnectionOptions | None = None,
        backoff: Backoff | None = None,
        lifecycle: Lifecycle | None = None,
        describe: Callable[[], bytes | None] | None = None,
        otherwise: bool = False,
        codec: str = "raw",
    ) -> None:
        """``describe``: returns the facts behind the hello's digests, for a server whose own differ. ``otherwise``:
        requests have an alternative to this server. ``codec``: one that the server must support.
        """
        self.address = address
        self.counters = Counters()
        self.lifecycle = lifecycle or Lifecycle("edge")
        self.welcome: split_pb2.Welcome | None = None
        self._options = options or ConnectionOptions()
        self.gone = False
        """Whether the last requests that waited for a stream failed, or were refused."""
        self._nudged = 0.0
        self._hello = split_pb2.ClientFrame()
        self._hello.CopyFrom(hello)
        self._describe = describe
        self._noted: set[str] = set()
        self._hello.hello.heartbeat_ms = max(1, round(1000 * self._options.heartbeat))
        self._keep_alive = self._options.keep_alive
        self._backoff = backoff or Backoff()
        self._waiting = Waiting(address, self._options.max_pipelined)
        self._changed = self._waiting.changed
        self._state = State.UNOPENED
        self._closing = False
        self._outbox: Outbox | None = None
        self._stream: Stream | None = None
        self._keeper: threading.Thread | None = None
        self._pulse: Pulse | None = None
        self._without_stream_since: float | None = None
        self._broken_off = False  # whether this side ended the last stream
        self._at_once = False  # the next attempt needs no back-off: the server announced that it leaves
        self._tries = 0  # since the last Welcome
        self._last_reason = "no answer to the greeting so far"
        self._otherwise = otherwise
        self._codec = codec
        self._no_listener = False  # the last attempt found no listener
        self._refused: Disagreement | None = None  # ... with this error, and the server needs more detail

    @property
    def state(self) -> State:
        """The state of the connection."""
        return self._state

    @property
    def last_reason(self) -> str:
        """Why the last stream ended, for messages."""
        return self._last_reason

    @property
    def is_silent(self) -> bool:
        """Whether heartbeats are missing, though not yet enough to break the stream off. For requests in
        progress only.
        """
        pulse = self._pulse
        return self._state is State.READY and pulse is not None and pulse.is_weak

    def open(self, seconds: float) -> split_pb2.Welcome:
        """Wait for the server's Welcome; raises the error of the handshake, `ServerUnavailable` after ``seconds``."""
        opener: Opener = Future()
        with self._changed:
            if self._state is State.READY and self.welcome is not None:
                return self.welcome
            self._demand(opener)
        try:
            return opener.result(seconds)
        except FutureTimeout:
            self.gone = True
            raise self._unavailable(seconds) from None
        finally:
            with self._changed:
                self._waiting.leave(opener)

    def begin(self, opening: Opening) -> bool:
        """Announce an open request. Returns False if it must wait until it is complete: there is no stream, others are
        in progress, or the server is older, or on this machine.
        """
        with self._changed:
            if self._closing or self._state is not State.READY or self._outbox is None or self._waiting:
                return False
            if not self._options.ahead:
                return False
            most = self.welcome.max_request_bytes if self.welcome else 0
            return opening.header.payload_bytes <= most and self._outbox.begin(opening)

    def submit(self, exchange: Exchange, opening: Opening | None = None) -> None:
        """Send a request as soon as there is a stream; the exchange is settled with the answer or an error.

        ``opening``: the part that was sent before.
        """
        with self._changed:
            if self._closing:
                exchange.settle(Cancelled("the client is closed"))
            elif self._state is not State.READY or not self._waiting.refuse(exchange, self.welcome):
                self._demand(exchange)
                outbox = self._outbox if self._state is State.READY else None
                if outbox is not None and (opening is None or not outbox.close(opening, exchange)):
                    outbox.put(exchange)

    def nudge(self) -> None:
        """Check whether a server that is `gone` is back, without waiting; at most twice per second."""
        with self._changed:
            if self.gone and not self._closing and time.monotonic() - self._nudged >= NUDGE_SECONDS:
                self._nudged = time.monotonic()
                if not self._waiting:
                    self._demand(Future())

    def cancel(self, exchange: Exchange, error: IsthmusError) -> None:
        """End a request with ``error``; no effect on one that is settled."""
        with self._changed:
            self._waiting.leave(exchange)
            outbox = self._outbox
        if exchange.settle(error) and outbox is not None:
            outbox.cancel(exchange.id)

    def close(self) -> None:
        """End the stream and everything that waits on it (`Cancelled`), within a second. Idempotent."""
        with self._changed:
            self._closing = True
            outbox, stream, keeper = self._outbox, self._stream, self._keeper
            self._changed.notify_all()
        self._waiting.fail(Cancelled("the client was closed"))
        if outbox is not None and self._state is State.READY:
            outbox.finish()
        elif stream is not None:
            stream.cancel()
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join(POLITE_SECONDS)
            if keeper.is_alive() and self._stream is not None:
                self._stream.cancel()
                keeper.join(POLITE_SECONDS)
        with self._changed:
            self._state = State.CLOSED

    def _demand(self, who: Exchange | Opener) -> None:
        """Record a waiting request, and wake or start the keeper. The caller holds the lock."""
        if self._closing:
            raise Cancelled("the client is closed")
        self._waiting.add(who)
        if self._keeper is None:
            keeper = threading.Thread(target=self._keep, name=f"edge-connection {self.address}", daemon=True)
            keeper.start()
            self._keeper = keeper
        self._changed.notify_all()

    def _keep(self) -> None:
        while self._await_demand():
            streams = self.counters.streams
            error, reason = self._run_stream()
            if self.counters.streams > streams:
                why = "the client was closed" if self._closing else reason
                self.lifecycle.emit(Stage.ON_DISCONNECT, address=self.address, reason=why)
            if self._closing:
                break
            self._after_stream(error, reason)
        with self._changed:
            self._state = State.CLOSED

    def _await_demand(self) -> bool:
        """Wait for demand for a stream, and for the end of a back-off; returns False when closing."""
        if self._state is State.BACKOFF:
            self._back_off()
        with self._changed:
            while not self._closing and not self._waiting:
                self._state = State.UNOPENED
                self._without_stream_since = None
                self._changed.wait()
            if self._closing:
                return False
            self._state = State.CONNECTING
            self._tries += 1
            self.counters.attempts += 1
            if self._without_stream_since is None:
                self._without_stream_since = time.monotonic()
            return True

    def _back_off(self) -> None:
        """Wait before the next attempt; meanwhile requests that have waited long enough get an error."""
        at_once, self._at_once = self._at_once, False
        until = time.monotonic() + (0.0 if at_once else self._backoff.next())
        while True:
            with self._changed:
                left = until - time.monotonic()
                if self._closing or not self._waiting or left <= 0:
                    return
                self._changed.wait(min(left, self._patience_left()))
            self._give_up_late()

    @property
    def _patience(self) -> float:
        patience = self._options.patience
        return min(patience, REFUSED_SECONDS) if self._otherwise and self._no_listener else patience

    def _patience_left(self) -> float:
        """Return seconds until the first waiting request gives up."""
        with self._changed:
            return self._waiting.left(self._without_stream_since or time.monotonic(), self._patience)

    def _give_up_late(self) -> bool:
        """End requests that have waited too long; returns whether none is left."""
        with self._changed:
            patience, lost = self._patience, self._without_stream_since or time.monotonic()
            late = self._waiting.take_late(lost, patience)
            if unused := not self._waiting:
                if self._state is State.BACKOFF:  # before callers are woken and look
                    self._state = State.UNOPENED
                self._backoff.reset()
            error = self._unavailable(max(patience, time.monotonic() - lost))
            if unused:
                self._tries = 0
            self.gone = self.gone or bool(late)
        if late:
            self.lifecycle.emit(Stage.ON_ERROR, where="connection", error=error)
            settle(late, error)
        return unused

    def _run_stream(self) -> tuple[IsthmusError | None, str]:
        """One stream from the hello to its end: (the permanent error, or None; why it ended)."""
        self.lifecycle.emit(Stage.BEFORE_CONNECT, address=self.address, attempt=self._tries)
        self.lifecycle.emit(Stage.BEFORE_HANDSHAKE, hello=self._hello.hello)
        area = SendArea.made(self._options.area_bytes) if is_loopback(self.address) else None
        hello = split_pb2.ClientFrame()
        hello.CopyFrom(self._hello)
        if area is not None:
            hello.hello.area.CopyFrom(area.description())
        outbox = Outbox(hello, self._options.chunk_bytes, self.lifecycle, area)
        connect_within = CONNECT_SECONDS[(self._tries - 1) % len(CONNECT_SECONDS)]
        if self.counters.streams == 0 and self._tries == 1:  # nothing is known of the link yet
            connect_within = max(CONNECT_SECONDS)
        self._broken_off = self._no_listener = False
        stream: Stream | None = None
        try:
            stream = Stream(self.address, outbox, self._keep_alive, connect_within, self._options.credentials)
            threading.Thread(target=self._watch, args=(stream, outbox), name="edge-watch", daemon=True).start()
            with self._changed:
                self._stream = stream
                if self._closing:
                    stream.cancel()
            inbox: Inbox | None = None
            for frame in stream:
                if inbox is None:
                    inbox = self._greet(frame, outbox, stream)
                else:
                    self._backoff.reset()  # only now: a server that accepts and dies must not be hammered
                    if self._pulse is not None:
                        self._pulse.record_frame()
                    inbox.take(frame)
            return None, "the server ended the stream"
        except grpc.RpcError as error:
            return self._judge(error, stream)
        except IsthmusError as error:
            return error, str(error)
        except Exception as error:  # a bug here must not leave callers waiting for their deadlines
            broken = IsthmusError(f"the connection to {self.address} failed: {error!r}")
            broken.__cause__ = error
            return broken, str(broken)
        finally:
            self._at_once = outbox.draining
            with self._changed:
                self._outbox = self._stream = None
            if stream is not None:
                stream.close()
            if area is not None:
                area.close()

    def _watch(self, stream: Stream, outbox: Outbox) -> None:
        """Runs in a stream's own thread: breaks it off if the Welcome, or later every sign of life, is missing."""
        began = time.monotonic()
        limit = began + self._options.welcome_within
        while not stream.welcomed.wait(min(limit - time.monotonic(), self._patience_left())):
            late = time.monotonic() >= limit
            with self._changed:
                self._last_reason = why = f"no answer to the greeting within {time.monotonic() - began:.1f} s"
            if self._give_up_late() or late:
                stream.cancel(why)
                return
        pulse = self._pulse
        if pulse is not None and (silent := pulse.watch(stream.ended, outbox.patience)):
            stream.cancel(f"nothing was heard for {silent:.1f} s, while requests were under way")

    def _greet(self, frame: ServerFrame, outbox: Outbox, stream: Stream) -> Inbox:
        """Process the first frame, which must be the Welcome; requests are sent from here on."""
        if not isinstance(frame, split_pb2.ServerFrame) or frame.WhichOneof("frame") != "welcome":
            raise Disagreement(f"{self.address} did not answer the greeting with Welcome: not an Isthmus server?")
        welcome = frame.welcome
        if welcome.protocol_version != PROTOCOL_VERSION:
            raise Disagreement(
                f"{self.address} speaks protocol version {welcome.protocol_version}, this client {PROTOCOL_VERSION}"
            )
        if not is_offered(self._codec, offered := wire.codecs_of(welcome)):
            more = " (cloud-server --codec)" if ":" in self._codec else ""
            raise Disagreement(f"{self.address} has no codec {self._codec}: it has {', '.join(offered)}{more}")
        if not welcome.heartbeat_ms:
            self._pulse = None  # an older server
        elif self._pulse is None:
            self._pulse = Pulse(welcome.heartbeat_ms / 1000)
        for effect, notes in (
            ("any effect on results", welcome.notes),
            ("an effect but on last bits", welcome.rounding),
        ):
            for note in {*notes} - self._noted:
                log.info("%s differs without %s: %s", self.address, effect, note)
            self._noted |= {*notes}
        stream.welcomed.set()
        self.lifecycle.emit(Stage.AFTER_HANDSHAKE, welcome=welcome)
        with self._changed:
            outbox.inline_bytes = welcome.inline_bytes
            outbox.open(self._waiting.limit(welcome), welcome.message_bytes, welcome.area, welcome.open)
            self._state, self.welcome, self._outbox = State.READY, welcome, outbox
            self._without_stream_since, self._tries, self.gone = None, 0, False
            self.counters.streams += 1
            openers = self._waiting.take_openers()
            again = 0
            for exchange in self._waiting.in_order():
                if not self._waiting.refuse(exchange, welcome):
                    again += exchange.sends > 0
                    outbox.put(exchange)
            self.counters.resent += again
            self._changed.notify_all()
        self.lifecycle.emit(Stage.AFTER_CONNECT, address=self.address)
        if self.counters.streams > 1:
            self.lifecycle.emit(Stage.AFTER_RECONNECT, address=self.address, resent=again)
        for opener in openers:
            opener.set_result(welcome)
        return Inbox(self.address, welcome, self._waiting, outbox, self.counters, self.lifecycle)

    def _judge(self, error: grpc.RpcError, stream: Stream | None) -> tuple[IsthmusError | None, str]:
        if stream is not None and stream.broken_for:
            self._broken_off = True
            return None, stream.broken_for
        self._no_listener = options.is_port_closed(error)
        if options.pinged_too_often(error):  # a server or proxy with another policy: half as often from now on
            self._keep_alive = KeepAlive(self._keep_alive.every * 2, self._keep_alive.timeout)
        # A server that was compatible before is checked last: the check takes its time where there is no answer.
        doubtful = self._state is not State.READY and (self.counters.streams == 0 or self._tries >= DOUBT_AFTER)
        final = options.final_error(error, self.address, self._options.credentials if doubtful else None)
        return final, options.reason(error) if final is None else str(final)

    def _send_facts(self, error: IsthmusError | None) -> bool:
        """Send a server whose digests differ the facts behind this side's, once; returns whether that is worthwhile.

        That may take long, or fail: then the refusal is final, also for requests that wait meanwhile.
        """
        describe = self._describe
        if not isinstance(error, Disagreement) or not error.wants_facts or describe is None:
            return False
        with self._changed:
            self._last_reason, self._refused = str(error), error
        try:
            facts = describe()
        except Exception as failure:  # may run a model's own code
            log.warning("what differs from %s cannot be described more exactly: %r", self.address, failure)
            return False
        self._describe = None  # the description is final, and part of every greeting from now on
        self._hello.hello.manifest = facts or b""
        self._without_stream_since = None  # no caller waited for the server meanwhile
        return bool(facts)

    def _after_stream(self, error: IsthmusError | None, reason: str) -> None:
        self._refused = None
        if self._send_facts(error):
            error, self._at_once = None, True
        with self._changed:
            self._last_reason = reason
            if self._without_stream_since is None:
                self._without_stream_since = time.monotonic()
            # Without waiting callers there is no hurry, and no back-off for the next caller.
            self._state = State.BACKOFF if self._waiting else State.UNOPENED
            self._waiting.interrupted(reason, suspect=not self._broken_off)
            waiting = len(self._waiting)
        if error is not None:
            self.lifecycle.emit(Stage.ON_ERROR, where="connection", error=error)
            self._backoff.reset()
            with self._changed:  # before callers are woken and look
                self._state, self._tries, self.gone = State.UNOPENED, 0, True
            self._waiting.fail(error)
        elif waiting and not self._give_up_late():
            self.lifecycle.emit(Stage.BEFORE_RECONNECT, address=self.address, reason=reason, waiting=waiting)

    def _unavailable(self, seconds: float) -> IsthmusError:
        """Return the error for a request that has waited ``seconds``."""
        if self._refused is not None:
            return Disagreement(f"{self._refused} (what differs was still being looked at after {seconds:.1f} s)")
        tries = f"{self._tries} attempt{'' if self._tries == 1 else 's'}"
        return ServerUnavailable(
            f"no server at {self.address} for {seconds:.1f} s, {tries} (last: {self._last_reason})"
        )
