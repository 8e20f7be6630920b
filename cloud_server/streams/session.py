"""One stream of one client: what it may send when, and what is waiting to be sent to it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from cloud_server import wire
from cloud_server.access import Caller
from cloud_server.requests import Answer, replies
from cloud_server.streams.area import Area
from cloud_server.streams.handshake import agree, check_form
from cloud_server.streams.hub import Hub
from cloud_server.streams.uploads import Uploads
from protos.chunks import ChunkFrame
from protos.frames import ClientFrame
from protos.headed import HeadedRequest, request_of
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import (
    BadFrame,
    DeadlineExceeded,
    IsthmusError,
)
from shared_hooks.lifecycle import Stage
from shared_hooks.sharing import Party

InFrame = ClientFrame


class Phase(Enum):
    GREETING = "greeting"  # the first frame, Hello, is due
    OPEN = "open"
    FINISHED = "finished"  # the client sends nothing more; what it asked for is still answered
    OVER = "over"  # nothing is taken or sent any more


class StreamSession:
    """One stream. One thread calls `receive`, another iterates `frames`; the core calls the rest from any thread."""

    def __init__(
        self, hub: Hub, caller: Caller, left: Callable[[StreamSession, str], None], brief: bool = False
    ) -> None:
        """``left`` is called once, with the reason, when the stream is gone. ``brief``: it lives for one request."""
        self.caller = caller
        self.brief = brief
        self.client_id = ""
        self.inline_bytes = 0
        """Answers up to this size go in their header."""
        self._headed = False
        """Whether larger ones begin there."""
        self._hub = hub
        self._on_left = left
        self.turn = hub.pace.turn(caller.account)
        """To be had for what is done with a frame."""
        self._reading = threading.RLock()  # a hook may end the stream whose frame it hears of
        self._uploads: Uploads | None = None
        """What the client asks for; None until it has greeted."""
        self._area: Area | None = None
        """Where payloads may lie of a client on this machine."""
        self._phase = Phase.GREETING
        self._opened = self._heard = self._moved = time.monotonic()
        """When the stream began; when a frame came; when something was fetched, or begun to be sent."""
        self._sending = False  # an answer
        self.on_drop: Callable[[], object] = _nothing
        """Ends the call of the transport, whatever it is doing."""
        # Its lock guards phase, error, left and outbox. Who holds it does not ask for the core's lock.
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)
        self._error: IsthmusError | None = None
        self._left = False
        self._outbox: deque[split_pb2.ServerFrame | Answer] = deque()
        self.undelivered = 0
        """Answers that the client has not begun to fetch."""
        self._drain_said = False  # that the server drains
        self._beat: float | None = None  # seconds of silence after which the client hears that we live; None: never
        self._room = 2 * hub.limits.max_in_flight + 64

    @property
    def party(self) -> Party:
        """On whom it counts what is held for this stream."""
        return Party(self.caller.account, self.client_id)

    @property
    def is_over(self) -> bool:
        """Whether nothing is taken or sent any more."""
        return self._phase is Phase.OVER

    @property
    def stuck_seconds(self) -> float:
        """How long nothing was fetched of what is being sent; 0 where nothing is."""
        return time.monotonic() - self._moved if self._sending else 0.0

    @property
    def silent_seconds(self) -> float:
        """Since the last frame came, or an answer went."""
        return time.monotonic() - max(self._heard, self._moved)

    @property
    def is_greeted(self) -> bool:
        return self._uploads is not None

    @property
    def has_mail(self) -> bool:
        """Whether something waits to be sent, or is being sent."""
        return self._sending or bool(self._outbox)

    # From the client

    def receive(self, frame: InFrame) -> bool:
        """Takes one frame; False when the stream takes no more. What is wrong fails its request, or ends the stream.

        Blocks while the client does not fetch what is sent to it.
        """
        with self._lock:
            self._ready.wait_for(lambda: len(self._outbox) < self._room or self._phase is Phase.OVER)
            if self._phase is Phase.OVER or self._error is not None:
                return False
        self._heard = time.monotonic()
        try:
            with self.turn, self._reading:
                self._take(frame)
        except IsthmusError as error:
            self.broke(error)
            return False
        except Exception as error:
            failure = IsthmusError("the server failed while it handled a frame; its log says how")
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
        """Waits while its account's frames have cost more than they may; see `Pace`."""
        wait = self._hub.pace.wait(self.caller.account)
        if wait:
            with self._lock:
                self._ready.wait_for(lambda: self._phase is Phase.OVER, wait)

    def spent(self, seconds: float) -> None:
        """A thread computed so long on a frame."""
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
            self._hub.crossings.add(frame.cut.digest, frame.cut.data, self.party)
        elif kind == "request":
            self._on_request(request_of(frame.request), uploads)
        elif kind == "acknowledge":
            self._acknowledged(frame.acknowledge.ids)
        elif kind == "cancel":
            uploads.cancel(frame.cancel.id)
        elif kind == "closing":
            uploads.close(frame.closing)
        elif kind == "hello":
            raise BadFrame("only the stream's first frame may be hello")
        else:
            raise BadFrame("a frame of a kind that this protocol version does not have")

    def _on_request(self, frame: HeadedRequest, uploads: Uploads) -> None:
        if frame.header.acknowledge:
            self._acknowledged(frame.header.acknowledge)
        uploads.announce(frame)

    def _acknowledged(self, ids: Sequence[int]) -> None:
        """The client has these answers. Raises BadFrame for more than are ever kept: one frame holds millions."""
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
            self._area = Area.opened(hello.area, self.caller.peer)
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
        if self._hub.draining:  # since the question above: `drain` came too early for this stream
            self.drain()
        client, peer = self.client_id, self.caller.peer
        self._hub.lifecycle.emit(
            Stage.AFTER_HANDSHAKE, client=client, peer=peer, model_id=hello.model_id, brief=self.brief
        )

    def finish(self) -> None:
        """The client has sent its last frame and still waits for its answers."""
        if self._uploads is not None:
            self._uploads.end()
        with self._lock:
            if self._phase is not Phase.OVER:
                self._phase = Phase.FINISHED
            self._ready.notify_all()

    # To the client

    def send(self, item: split_pb2.ServerFrame | Answer) -> None:
        """Puts a frame or an answer in line; never blocks. After the end it is dropped."""
        with self._lock:
            if self._phase is not Phase.OVER:
                self._outbox.append(item)
                self.undelivered += isinstance(item, Answer)
                self._ready.notify_all()

    def frames(self) -> Iterator[wire.OutFrame]:
        """Everything to be sent, until the stream is over; raises the error that ended it, if one did."""
        while (item := self._next()) is not None:
            if isinstance(item, Answer):
                self._hub.lifecycle.emit(Stage.BEFORE_SEND, item.about, nbytes=item.nbytes)
                for frame in replies.frames(item, self._hub.limits.chunk_bytes, self._headed):
                    yield frame
                    self._moved = time.monotonic()
                    if self._phase is Phase.OVER:  # dropped meanwhile
                        break
                else:
                    self._sent(item)
            else:
                yield item
            del item  # an answer would live until the next one comes
        if self._error is not None:
            raise self._error

    def _sent(self, answer: Answer) -> None:
        with self._lock:
            self._sending = False
        self._hub.requests.sent(answer, self)
        self._hub.lifecycle.emit(Stage.AFTER_SEND, answer.about, nbytes=answer.nbytes)

    def withdraw(self, answer: Answer, failure: split_pb2.RequestFailed) -> bool:
        """Takes an answer out of the line, and puts ``failure`` in its place; False when it is being sent."""
        with self._lock:
            if answer not in self._outbox:
                return self._phase is Phase.OVER
            self._outbox[self._outbox.index(answer)] = split_pb2.ServerFrame(failed=failure)
            self.undelivered -= 1
            return True

    def _next(self) -> split_pb2.ServerFrame | Answer | None:
        """What to send next, waiting for it; None at the end."""
        silent = False  # for as long as the client expects that we never are while it waits
        while True:
            # Asked for without the lock, and before the outbox is looked at: what was answered until then is in it.
            finished = self._phase is Phase.FINISHED
            under_way = (finished or silent) and self._hub.requests.waits_for(self)
            done = finished and not under_way
            with self._lock:
                if self._phase is Phase.OVER:
                    return None
                if self._outbox:
                    self._ready.notify_all()  # there is room again
                    item = self._outbox.popleft()
                    self._sending, self._moved = isinstance(item, Answer), time.monotonic()
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

    # The end

    def drain(self) -> None:
        """Tells the client that the server goes away, once; one that was not welcomed yet is refused at its hello."""
        with self._lock:
            if self._phase is Phase.GREETING or self._drain_said:
                return
            self._drain_said = True
        self.send(wire.draining())

    def broke(self, error: IsthmusError) -> None:
        """Ends the stream for something that went wrong on it."""
        self._hub.lifecycle.emit(Stage.ON_ERROR, where=f"stream of {self.client_id or self.caller.peer}", error=error)
        self.end(error)

    def end(self, error: IsthmusError) -> None:
        """Ends the stream with ``error`` once everything in line is sent; the first call counts."""
        with self._lock:
            if self._error is None:
                self._error = error
            self._ready.notify_all()

    def give_up(self, error: IsthmusError) -> None:
        """Ends the stream with ``error``: after what is in line, if the client fetches that."""
        if self.stuck_seconds > self._hub.limits.idle_seconds:
            self.drop(error)
        else:
            self.end(error)

    def drop(self, error: IsthmusError) -> None:
        """Ends the stream at once, with what is in line."""
        self.end(error)
        self.gone()
        self.on_drop()

    def gone(self) -> None:
        """The stream is gone; whatever was in line for it stays in the core's store.

        gRPC says so in the one thread that serves every stream: nothing is done here that takes time, and no hook is
        called. `disconnect` follows in the stream's own thread.
        """
        with self._lock:
            self._phase = Phase.OVER
            self._outbox.clear()
            self._ready.notify_all()

    def disconnect(self) -> None:
        """Leaves the core, once; may be called again."""
        self.gone()
        with self._lock:
            if self._left:
                return
            self._left = True
        self._close_area()
        self._on_left(self, "" if self._error is None else f"{type(self._error).__name__}: {self._error}")

    def _close_area(self) -> None:
        """Now, or by who reads there, once it has: a hook of that frame may wait for the stream's end."""
        if self._area is not None and self._reading.acquire(blocking=False):
            try:
                self._area.close()
            finally:
                self._reading.release()


def _nothing() -> None:
    """No transport has a call under way."""
