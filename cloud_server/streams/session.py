"""One stream of one client: what it may send and when, and what waits to be sent to it."""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Protocol

from cloud_server import wire
from cloud_server.access import Caller
from cloud_server.decoding import Sessions, SessionStep
from cloud_server.limits import Limits
from cloud_server.models import FILE, Engine, check_open
from cloud_server.requests import Outlet, Request, RequestState, RequestTable, ServerAnswer, about
from cloud_server.requests.request_table import answer_frames
from cloud_server.scheduling import Payer
from cloud_server.streams.handshake import CrossingCache, agree, check_form
from cloud_server.streams.probe import AccountPace
from protos.frames import ChunkFrame, ClientFrame, HeadedRequest, request_of
from protos.isthmus.v1 import split_pb2
from shared_hooks.codecs import CODECS
from shared_hooks.errors import (
    AccessRefused,
    BadFrame,
    Cancelled,
    DeadlineExceeded,
    Disagreement,
    IsthmusError,
    ObserverRefused,
    ServerUnavailable,
    TooLarge,
)
from shared_hooks.generation import StepLink
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.sharing import Owner

# What all streams share, as seen by one stream.


class Hub(Protocol):
    """What a session and its uploads need of the server; implemented by `core.Core`. Thread-safe."""

    @property
    def limits(self) -> Limits: ...

    def engines_for(self, caller: Caller) -> Mapping[str, Engine]:
        """Return the served models that ``caller`` may use, by id."""
        ...

    @property
    def crossings(self) -> CrossingCache: ...

    @property
    def pace(self) -> AccountPace: ...

    @property
    def requests(self) -> RequestTable: ...

    @property
    def decoding(self) -> Sessions: ...

    @property
    def observers(self) -> frozenset[str]:
        """The observers that clients may ask for."""
        ...

    @property
    def lifecycle(self) -> Lifecycle: ...

    @property
    def draining(self) -> bool: ...

    def check_open(self) -> None:
        """Raise ServerUnavailable while draining."""
        ...

    def check_next(self, server: str) -> None:
        """Raise AccessRefused if this server passes nothing on to a server of that name or address."""
        ...

    def link_onward(self, engine: Engine, caller: Caller, route: Sequence[split_pb2.Hop]) -> StepLink:
        """Return the connection over which a generation's steps are passed to the next server of a route that
        `check_next` accepts.
        """
        ...

    def turned_away(self, payer: Payer) -> None:
        """Charge a payer for a request that was refused because the server is too busy."""
        ...

    def submit(self, request: Request) -> None:
        """Let a request whose payload is complete wait for a worker."""
        ...


# What one client does on one stream: requests announced, received in chunks, passed to the core, cancelled.


# A client's memory on this machine, from which its payloads are read instead of from the stream.
#
# Ownership: the client names a file of its own process, and the system decides whether this process may open it. It
# is used only if it is memory (not a file that could block, or have side effects when read) and begins with the nonce
# of the greeting, which distinguishes it from a process of the same number on another machine or in another
# container.
#
# It is read by a system call, never mapped: the client may shrink it, punch holes into it or write to it at any time.
# A short read fails its request, holes are harmless, and what was read is a copy.


NONCE_BYTES = 16
MOST = 1 << 40
LOCAL = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")
"""Prefixes of gRPC's names for peers on this machine."""
NAME = "/memfd:isthmus-area"
"""The area's name. No server's own memory has it, nor that of an earlier version ("isthmus")."""


class ReceiveArea:
    """Shared memory in which a client on this machine puts payloads; see `opened`. Not thread-safe."""

    def __init__(self, file: int, nbytes: int) -> None:
        self._file = file
        self._nbytes = nbytes

    @classmethod
    def opened(cls, reported: split_pb2.Area, peer: str) -> ReceiveArea | None:
        """Open the area that a client on ``peer`` described, or return None if it cannot be used; payloads then come as
        chunks.
        """
        if sys.platform != "linux" or not peer.startswith(LOCAL) or len(reported.nonce) != NONCE_BYTES:
            return None
        if not NONCE_BYTES < reported.nbytes <= MOST:
            return None
        path = f"/proc/{reported.pid}/fd/{reported.fd}"
        try:
            if not os.readlink(path).startswith(NAME):  # checked before opening, which may have side effects
                return None
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            fcntl.fcntl(file, fcntl.F_GET_SEALS)  # fails for anything but memory
            if hmac.compare_digest(os.pread(file, NONCE_BYTES, 0), reported.nonce):
                return cls(file, reported.nbytes)
        except OSError:
            pass
        os.close(file)
        return None

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from the area. Raises BadFrame if it ends before that."""
        if offset + into.nbytes > self._nbytes:
            raise BadFrame(f"{into.nbytes} bytes at {offset} of an area of {self._nbytes}")
        done = 0
        while done < into.nbytes:
            try:
                count = os.preadv(self._file, [into[done:]], offset + done)
            except OSError as error:
                raise BadFrame(f"the client's area cannot be read: {error.strerror}") from error
            if count <= 0:
                raise BadFrame(f"the client's area ends after {offset + done} bytes")
            done += count

    def close(self) -> None:
        """Close the file; its number may be reused from now on."""
        os.close(self._file)
        self._file = -1


_SKIPPED = 1024  # ids whose chunks may still be in transit; far above any client's requests in flight
MAX_HOPS = 16
"""The maximum number of parts behind a server's own, which keeps routes finite."""
MAX_OBSERVERS = 64
"""The maximum number of observers of one request; there are fewer kinds."""


class Uploads:
    """The requests that arrive on ``outlet``, all for ``engine``. Used by one thread."""

    def __init__(self, hub: Hub, outlet: Outlet, engine: Engine, area: ReceiveArea | None = None) -> None:
        """``area``: shared memory in which payloads may lie."""
        self._area = area
        self._hub = hub
        self._outlet = outlet
        self._engine = engine
        self._payer = Payer(outlet.caller.account, outlet.client_id, outlet.caller.policy.weight)
        self._receiving: dict[int, Request] = {}
        self._skipped: OrderedDict[int, None] = OrderedDict()

    def announce(self, headed: HeadedRequest) -> None:
        """Process a request's header, with none, some or all of its payload: it is accepted, recognised as a known
        request that was sent again, or refused.
        """
        frame = headed.header
        self._skipped.pop(frame.id, None)
        try:
            self._hub.requests.check_place(frame.id, self._outlet)
            area = self._area_of(headed)
            request = self._checked(frame, headed.nbytes)
            is_new = self._hub.requests.admit(request)
        except IsthmusError as error:
            if isinstance(error, ServerUnavailable):
                self._hub.turned_away(self._payer)
            unfinished = self._receiving.pop(frame.id, None)
            if unfinished is None or unfinished.state is RequestState.OVER:
                self._report_refused(frame, error)
            else:
                self._hub.requests.abandon(unfinished, error)
            missing = (
                isinstance(error, Disagreement)
                and not frame.HasField("file")
                and frame.cut_digest not in self._hub.crossings
            )
            self._fail(frame.id, error, retry=True if missing else None)
            return
        if not is_new:
            self._skip(frame.id)
            return
        try:
            self._prepare(request)
            if area is not None:
                request.read(area, frame.area_offset)
        except IsthmusError as error:
            self._hub.requests.abandon(request, error)
            self._fail(frame.id, error)
            return
        if request.state is RequestState.OVER:  # cancelled or evicted meanwhile: its allocation is released
            request.release()
            self._skip(frame.id)
        elif (request.received_bytes == request.payload_bytes and not request.opening) or (
            headed.pieces and request.write(ChunkFrame(frame.id, 0, headed.pieces))
        ):
            self._submit(request)
        else:
            self._forget_ended()
            self._receiving[frame.id] = request

    def _area_of(self, headed: HeadedRequest) -> ReceiveArea | None:
        """Return the shared memory that holds the payload; None if it comes on the stream."""
        if not headed.header.HasField("area_offset"):
            return None
        if self._area is None or headed.pieces:
            raise BadFrame("a payload refers to an area, and there is none, or it was sent with the header, too")
        return self._area

    def _forget_ended(self) -> None:
        """Forget uploads that were cancelled or have expired, if none of their chunks came since."""
        if len(self._receiving) >= self._hub.limits.max_in_flight:
            for id in [id for id, request in self._receiving.items() if request.state is not RequestState.RECEIVING]:
                del self._receiving[id]
                self._skip(id)

    def _prepare(self, request: Request) -> None:
        """Admit a request. Raises HookRefused, and ServerUnavailable if there is no memory for its payload."""
        self._hub.requests.begin(request)
        self._hub.lifecycle.emit(Stage.BEFORE_RECEIVE, request.about, nbytes=request.payload_bytes)
        request.allocate()

    def _submit(self, request: Request) -> None:
        self._hub.lifecycle.emit(Stage.AFTER_RECEIVE, request.about, nbytes=request.payload_bytes)
        self._hub.submit(request)

    def _checked(self, frame: split_pb2.RequestHeader, come: int) -> Request:
        """Return the request of a header, checked as far as possible before anything is allocated.

        ``come``: bytes of the payload that came with the header.
        """
        step = SessionStep.of(frame)
        if frame.open and (step is not None or frame.HasField("file") or frame.HasField("area_offset")):
            raise BadFrame("only a request that is cut, and whose payload comes in chunks, may be open")
        if come > frame.payload_bytes:
            raise BadFrame(f"{frame.payload_bytes} bytes are announced, and {come} came with the header")
        self._check_observers(frame.hooks)
        if frame.route:
            self._check_route(frame)
        limit = self._outlet.caller.max_request_bytes(self._hub.limits)
        if frame.payload_bytes > limit:
            most = f"at most {limit} are accepted (max_request_bytes)"
            raise TooLarge(f"a payload of {frame.payload_bytes} bytes is announced; {most}")
        if step is not None:
            self._check_cut(step.cut)
            self._engine.admit_step(frame.header, frame.payload_bytes, limit)
            link = self._hub.link_onward(self._engine, self._outlet.caller, frame.route) if frame.route else None
            step_task = self._hub.decoding.task(self._engine, self._outlet.owner, step, link)
            return Request(self._outlet, self._engine, None, frame, step_task)
        if frame.HasField("file"):
            file = frame.file
            self._check_cut(FILE)
            self._engine.admit_file(file.suffix, file.preprocess_digest, frame.header, frame.payload_bytes, limit)
            return Request(self._outlet, self._engine, None, frame)
        crossing = self._hub.crossings.get(frame.cut_digest, self._outlet.owner)
        if crossing is None:
            raise Disagreement(f"no cut {frame.cut_digest[:80]!r} is held here; upload it, then ask again")
        self._check_cut("input" if crossing.layer_id < 0 else crossing.layer_name)
        if crossing.later and self._outlet.caller.policy.cuts is not None:
            # a server without a plan of such inputs relies on the client for which calls these are
            raise AccessRefused(f'identity "{self._outlet.caller.identity}" may use single cuts, none along branches')
        if crossing.payload_bytes > limit:
            most = f"at most {limit} are accepted (max_request_bytes)"
            raise TooLarge(f"a frontier of {crossing.payload_bytes} bytes is announced; {most}")
        if frame.open:
            check_open(crossing, frame.header, frame.payload_bytes)
        else:
            self._engine.admit(crossing, frame.header, frame.payload_bytes, limit)
        return Request(self._outlet, self._engine, crossing, frame)

    def _check_observers(self, names: Sequence[str]) -> None:
        if len(names) > MAX_OBSERVERS:
            raise TooLarge(f"{len(names)} observers are asked for; at most {MAX_OBSERVERS} are taken")
        mine = self._outlet.caller.policy.observers
        allowed = sorted(one for one in self._hub.observers if mine is None or one in mine)
        for name in names:
            if name not in allowed:
                text = ", ".join(allowed) or "none"
                where = f'to "{self._outlet.caller.identity}"' if name in self._hub.observers else "on this server"
                key = "[observers] allow" if name not in self._hub.observers else "observers of the identity"
                raise ObserverRefused(
                    f"the observer {json.dumps(name[:80])} is not allowed {where}; allowed: {text}. It is allowed by "
                    f"{key} in the server's configuration (docs/observers.md)"
                )

    def _check_route(self, frame: split_pb2.RequestHeader) -> None:
        """Check the route behind this server, as far as possible."""
        if frame.HasField("file"):
            raise BadFrame("a chain computes requests that are cut, and no input files")
        if len(frame.route) > MAX_HOPS:
            raise TooLarge(f"a chain of {len(frame.route)} more servers is asked for; at most {MAX_HOPS} are taken")
        cuts = [hop.cut for hop in frame.route]
        if twice := [cut for cut in cuts if cuts.count(cut) > 1]:
            raise BadFrame(f"a chain that goes round: two of its parts begin after {twice[0][:256]!r}")
        for hop in frame.route:
            self._check_cut(hop.cut)
            if hop.codec not in ("", *CODECS):
                raise BadFrame(f"no codec is called {hop.codec[:80]!r} here")
        self._hub.check_next(frame.route[0].server)

    def _check_cut(self, name: str) -> None:
        """Check that the caller may use this cut. A client that lies about the cut's name is found out by the
        rehearsal.
        """
        allowed = self._outlet.caller.policy.cuts
        if allowed is not None and name not in allowed:
            raise AccessRefused(
                f'identity "{self._outlet.caller.identity}" may not use the cut "{name[:256]}"; it may use: '
                f"{', '.join(allowed) or 'none'}"
            )

    def chunk(self, chunk: ChunkFrame) -> None:
        """Process a piece of a payload. Raises BadFrame if it was not announced."""
        request = self._receiving.get(chunk.id)
        if request is None:
            if chunk.id not in self._skipped:
                raise BadFrame(f"a chunk of payload {chunk.id}, which was not announced or is complete")
            return
        if request.state is not RequestState.RECEIVING:  # cancelled, expired, or taken over by a newer stream
            del self._receiving[chunk.id]
            self._skip(chunk.id)
            return
        try:
            complete = request.write(chunk)
        except BadFrame as error:
            del self._receiving[chunk.id]
            self._hub.requests.abandon(request, error)
            self._fail(chunk.id, error)
            return
        if complete:
            del self._receiving[chunk.id]
            self._submit(request)

    def close(self, closing: split_pb2.Closing) -> None:
        """Process the end of an open request. Raises BadFrame if it was not announced."""
        request = self._receiving.pop(closing.id, None)
        if request is None:
            if closing.id not in self._skipped:
                raise BadFrame(f"request {closing.id} is closed, which was not announced or is complete")
            return
        self._skip(closing.id)
        if request.state is not RequestState.RECEIVING:  # cancelled, expired, or taken over by a newer stream
            return
        assert request.crossing is not None
        try:
            request.close(closing.header, closing.payload_bytes)
            limit = self._outlet.caller.max_request_bytes(self._hub.limits)
            self._engine.admit(request.crossing, closing.header, closing.payload_bytes, limit)
        except IsthmusError as error:
            self._hub.requests.abandon(request, error)
            self._fail(closing.id, error)
            return
        self._submit(request)

    def cancel(self, id: int) -> None:
        """Cancel a request at its client's wish."""
        if self._receiving.pop(id, None) is not None:
            self._skip(id)
        self._hub.requests.cancel((self._outlet.caller.account, self._outlet.client_id, id))

    def _fail(self, id: int, error: IsthmusError, retry: bool | None = None) -> None:
        """Report a request as failed; chunks of it may still arrive."""
        self._skip(id)
        self._outlet.send(split_pb2.ServerFrame(failed=wire.failed(id, error, retry)))

    def _report_refused(self, frame: split_pb2.RequestHeader, error: IsthmusError) -> None:
        """Run the error hooks for a request that was not accepted."""
        self._hub.lifecycle.emit(
            Stage.ON_ERROR, about(frame, -1, self._engine, self._outlet), where="request", error=error
        )

    def _skip(self, id: int) -> None:
        self._skipped[id] = None
        self._skipped.move_to_end(id)
        if len(self._skipped) > _SKIPPED:
            self._skipped.popitem(last=False)

    def end(self) -> None:
        """Forget incomplete requests after the client's last frame."""
        for request in self._receiving.values():
            self._hub.requests.abandon(
                request, Cancelled("the client ended its stream before the payload was complete")
            )


InFrame = ClientFrame


class Phase(Enum):
    GREETING = "greeting"  # the first frame, Hello, is due
    OPEN = "open"
    FINISHED = "finished"  # the client sends nothing more; its pending requests are still answered
    OVER = "over"  # nothing is received or sent any more


class StreamSession:
    """One stream. One thread calls `receive`, another iterates `frames`; the rest is thread-safe."""

    def __init__(
        self, hub: Hub, caller: Caller, left: Callable[[StreamSession, str], None], brief: bool = False
    ) -> None:
        """``left`` is called once, with the reason, when the stream is gone. ``brief``: it lives for one request."""
        self.caller = caller
        self.brief = brief
        self.client_id = ""
        self.inline_bytes = 0
        """Answers up to this size are sent inside their header."""
        self._headed = False
        """Whether larger answers begin inside their header."""
        self._hub = hub
        self._on_left = left
        self.turn = hub.pace.turn(caller.account)
        """The lock to hold while a frame is processed."""
        self._reading = threading.RLock()  # a hook may end the stream whose frame it is called for
        self._uploads: Uploads | None = None
        """The client's uploads; None before its handshake."""
        self._area: ReceiveArea | None = None
        """Shared memory in which a client on this machine may put payloads."""
        self._phase = Phase.GREETING
        self._opened = self._received_at = self._moved = time.monotonic()
        """When the stream began; when the last frame came; when something was last fetched, or began to be sent."""
        self._sending = False  # an answer
        self.on_drop: Callable[[], object] = _nothing
        """Ends the transport's call, whatever it is doing."""
        # Guards phase, error, left and outbox. A thread that holds it must not take the core's lock.
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)
        self._error: IsthmusError | None = None
        self._left = False
        self._outbox: deque[split_pb2.ServerFrame | ServerAnswer] = deque()
        self.undelivered = 0
        """The number of answers that the client has not begun to fetch."""
        self._drain_announced = False  # whether the client was informed of a drain
        self._beat: float | None = None  # seconds of silence after which a heartbeat is sent; None: never
        self._room = 2 * hub.limits.max_in_flight + 64

    @property
    def owner(self) -> Owner:
        """The account and client that memory held for this stream is charged to."""
        return Owner(self.caller.account, self.client_id)

    @property
    def is_over(self) -> bool:
        """Whether nothing is received or sent any more."""
        return self._phase is Phase.OVER

    @property
    def stuck_seconds(self) -> float:
        """How long the client has not fetched what is being sent; 0 if nothing is."""
        return time.monotonic() - self._moved if self._sending else 0.0

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last frame came, or an answer was fetched."""
        return time.monotonic() - max(self._received_at, self._moved)

    @property
    def is_greeted(self) -> bool:
        return self._uploads is not None

    @property
    def has_mail(self) -> bool:
        """Whether something waits to be sent, or is being sent."""
        return self._sending or bool(self._outbox)

    # From the client

    def receive(self, frame: InFrame) -> bool:
        """Process one frame; returns False if the stream accepts no more. An error fails its request, or ends the
        stream.

        Blocks while the client does not fetch what is sent to it.
        """
        with self._lock:
            self._ready.wait_for(lambda: len(self._outbox) < self._room or self._phase is Phase.OVER)
            if self._phase is Phase.OVER or self._error is not None:
                return False
        self._received_at = time.monotonic()
        try:
            with self.turn, self._reading:
                self._take(frame)
        except IsthmusError as error:
            self.broke(error)
            return False
        except Exception as error:
            failure = IsthmusError("the server failed while it handled a frame; see its log")
            failure.__cause__ = error
            self.broke(failure)
            return False
        finally:
            if self._left:
                self._close_area()
        return True

    def _take(self, frame: InFrame) -> None:
        if self._uploads is None:
            self._on_first(frame)
        elif isinstance(frame, ChunkFrame):
            self._uploads.chunk(frame)
        elif isinstance(frame, HeadedRequest):
            self._on_request(frame, self._uploads)
        else:
            self._on_frame(frame, self._uploads)

    def wait_turn(self) -> None:
        """Wait while the frames of the account have cost more than they may; see `AccountPace`."""
        wait = self._hub.pace.wait(self.caller.account)
        if wait:
            with self._lock:
                self._ready.wait_for(lambda: self._phase is Phase.OVER, wait)

    def spent(self, seconds: float) -> None:
        """Charge the account for ``seconds`` that were spent on a frame."""
        self._hub.pace.spent(self.caller.account, seconds)

    def _on_first(self, frame: InFrame) -> None:
        if not isinstance(frame, split_pb2.ClientFrame) or frame.WhichOneof("frame") != "hello":
            kinds = {ChunkFrame: "chunk", HeadedRequest: "request"}
            kind = kinds.get(type(frame)) if not isinstance(frame, split_pb2.ClientFrame) else frame.WhichOneof("frame")
            raise BadFrame(f"the stream's first frame must be hello: found {kind or 'an unknown frame'}")
        check_form(frame.hello)
        self._on_hello(frame.hello)

    def _on_frame(self, frame: split_pb2.ClientFrame, uploads: Uploads) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "cut":
            self._hub.crossings.add(frame.cut.digest, frame.cut.data, self.owner)
        elif kind == "request":
            self._on_request(request_of(frame.request), uploads)
        elif kind == "acknowledge":
            self._acknowledged(frame.acknowledge.ids)
        elif kind == "cancel":
            uploads.cancel(frame.cancel.id)
        elif kind == "closing":
            uploads.close(frame.closing)
        elif kind == "ping":
            self.send(wire.pong(frame.ping.number))
        elif kind == "hello":
            raise BadFrame("only the stream's first frame may be hello")
        else:
            raise BadFrame("a frame of a kind that this protocol version does not have")

    def _on_request(self, frame: HeadedRequest, uploads: Uploads) -> None:
        if frame.header.acknowledge:
            self._acknowledged(frame.header.acknowledge)
        uploads.announce(frame)

    def _acknowledged(self, ids: Sequence[int]) -> None:
        """Forget answers that the client has. Raises BadFrame for more than are ever kept: one frame could hold
        millions.
        """
        if len(ids) > self._hub.limits.max_answers:
            raise BadFrame(f"{len(ids)} answers are acknowledged; no more than {self._hub.limits.max_answers} are kept")
        self._hub.requests.forget([(self.caller.account, self.client_id, id) for id in ids])

    def _on_hello(self, hello: split_pb2.Hello) -> None:
        self._hub.lifecycle.emit(Stage.BEFORE_HANDSHAKE, hello=hello, peer=self.caller.peer)
        self._hub.check_open()
        agreed = agree(hello, self._hub.engines_for(self.caller))
        engine = agreed.engine
        self.client_id = hello.client_id
        if hello.HasField("area"):
            self._area = ReceiveArea.opened(hello.area, self.caller.peer)
        self._uploads = Uploads(self._hub, self, engine, self._area)
        self.inline_bytes = min(hello.inline_bytes, wire.INLINE_BYTES)
        self._headed = hello.message_bytes > 0
        if hello.heartbeat_ms:
            self._beat = max(hello.heartbeat_ms / 1000, self._hub.limits.heartbeat_seconds)
        reported = agreed.notes, agreed.rounding
        area = self._area is not None
        self.send(wire.welcome(self._hub.limits, self.caller, engine.identity, self._beat, *reported, area))
        with self._lock:
            if self._phase is Phase.GREETING:
                self._phase = Phase.OPEN
        if self._hub.draining:  # draining began since the check above: `drain` came too early for this stream
            self.drain()
        client, peer = self.client_id, self.caller.peer
        self._hub.lifecycle.emit(
            Stage.AFTER_HANDSHAKE, client=client, peer=peer, model_id=hello.model_id, brief=self.brief
        )

    def finish(self) -> None:
        """The client has sent its last frame, and still waits for its answers."""
        if self._uploads is not None:
            self._uploads.end()
        with self._lock:
            if self._phase is not Phase.OVER:
                self._phase = Phase.FINISHED
            self._ready.notify_all()

    # To the client

    def send(self, item: split_pb2.ServerFrame | ServerAnswer) -> None:
        """Queue a frame or an answer; never blocks. After the end of the stream it is dropped."""
        with self._lock:
            if self._phase is not Phase.OVER:
                self._outbox.append(item)
                self.undelivered += isinstance(item, ServerAnswer)
                self._ready.notify_all()

    def frames(self) -> Iterator[wire.OutFrame]:
        """Everything to send, until the stream is over. Raises the error that ended it, if there was one."""
        while (item := self._next()) is not None:
            if isinstance(item, ServerAnswer):
                self._hub.lifecycle.emit(Stage.BEFORE_SEND, item.about, nbytes=item.nbytes)
                for frame in answer_frames(item, self._hub.limits.chunk_bytes, self._headed):
                    yield frame
                    self._moved = time.monotonic()
                    if self._phase is Phase.OVER:  # dropped meanwhile
                        break
                else:
                    self._sent(item)
            else:
                yield item
            del item  # otherwise an answer would live until the next one
        if self._error is not None:
            raise self._error

    def _sent(self, answer: ServerAnswer) -> None:
        with self._lock:
            self._sending = False
        self._hub.requests.sent(answer, self)
        self._hub.lifecycle.emit(Stage.AFTER_SEND, answer.about, nbytes=answer.nbytes)

    def withdraw(self, answer: ServerAnswer, failure: split_pb2.RequestFailed) -> bool:
        """Replace a queued answer by ``failure``; returns False if it is being sent already."""
        with self._lock:
            if answer not in self._outbox:
                return self._phase is Phase.OVER
            self._outbox[self._outbox.index(answer)] = split_pb2.ServerFrame(failed=failure)
            self.undelivered -= 1
            return True

    def _next(self) -> split_pb2.ServerFrame | ServerAnswer | None:
        """Wait for the next item to send; None at the end."""
        silent = False  # for as long as the client expects no heartbeat
        while True:
            # Read without the lock, and before the outbox: answers given until then are in it.
            finished = self._phase is Phase.FINISHED
            under_way = (finished or silent) and self._hub.requests.waits_for(self)
            done = finished and not under_way
            with self._lock:
                if self._phase is Phase.OVER:
                    return None
                if self._outbox:
                    self._ready.notify_all()  # there is room again
                    item = self._outbox.popleft()
                    self._sending, self._moved = isinstance(item, ServerAnswer), time.monotonic()
                    self.undelivered -= self._sending
                    return item
                if done or self._error is not None:
                    return None
                if silent and under_way:
                    return wire.heartbeat()
                if self._phase is not Phase.GREETING:
                    silent = not self._ready.wait(self._beat)
                    continue
                patience = self._hub.limits.hello_seconds
                left = self._opened + patience - time.monotonic()
                if left <= 0:
                    self._error = DeadlineExceeded(f"no hello came within {patience:g} s (hello_seconds)")
                else:
                    self._ready.wait(left)

    # Shutdown

    def drain(self) -> None:
        """Inform the client, once, that the server shuts down; a stream before its handshake is refused there."""
        with self._lock:
            if self._phase is Phase.GREETING or self._drain_announced:
                return
            self._drain_announced = True
        self.send(wire.draining())

    def broke(self, error: IsthmusError) -> None:
        """End the stream because of an error on it."""
        self._hub.lifecycle.emit(Stage.ON_ERROR, where=f"stream of {self.client_id or self.caller.peer}", error=error)
        self.end(error)

    def end(self, error: IsthmusError) -> None:
        """End the stream with ``error`` after everything queued is sent; only the first call counts."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._ready.notify_all()

    def give_up(self, error: IsthmusError) -> None:
        """End the stream with ``error``: after everything queued, unless the client has stopped fetching."""
        if self.stuck_seconds > self._hub.limits.idle_seconds:
            self.drop(error)
        else:
            self.end(error)

    def drop(self, error: IsthmusError) -> None:
        """End the stream at once, without what is queued."""
        self.end(error)
        self.gone()
        self.on_drop()

    def gone(self) -> None:
        """Mark the stream as gone; answers that were queued stay in the core's table.

        gRPC calls this in the one thread that serves every stream, so it must not block or call hooks. `disconnect`
        follows in the stream's own thread.
        """
        with self._lock:
            self._phase = Phase.OVER
            self._outbox.clear()
            self._ready.notify_all()

    def disconnect(self) -> None:
        """Remove the stream from the core. Idempotent."""
        self.gone()
        with self._lock:
            if self._left:
                return
            self._left = True
        self._close_area()
        self._on_left(self, "" if self._error is None else f"{type(self._error).__name__}: {self._error}")

    def _close_area(self) -> None:
        """Close the shared memory now, or when the thread that reads it is done: a hook of that frame may wait for the
        stream's end.
        """
        if self._area is not None and self._reading.acquire(blocking=False):
            try:
                self._area.close()
            finally:
                self._reading.release()


def _nothing() -> None:
    """Does nothing: the default where no transport has a call in progress."""
