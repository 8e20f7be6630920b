"""One stream of one client: what it may send when, and what is waiting to be sent to it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING

from cloud_server import wire
from cloud_server.answers import Answer
from cloud_server.engine import Engine
from cloud_server.handshake import agree
from cloud_server.request import Request, State
from protos.chunks import ChunkFrame
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import (
    BadFrame,
    Cancelled,
    DeadlineExceeded,
    Disagreement,
    HookRefused,
    IsthmusError,
    ServerUnavailable,
    TooLarge,
)
from shared_hooks.lifecycle import About, Stage

if TYPE_CHECKING:
    from cloud_server.core import Core

InFrame = split_pb2.ClientFrame | ChunkFrame

MAX_INLINE_BYTES = 64 << 10  # a header is copied more often than a chunk

_SKIPPED = 1024  # ids whose chunks may still be on their way; far above any client's requests in flight


class Phase(Enum):
    GREETING = "greeting"  # the first frame, Hello, is due
    OPEN = "open"
    FINISHED = "finished"  # the client sends nothing more; what it asked for is still answered
    OVER = "over"  # nothing is taken or sent any more


class Session:
    """One stream. One thread calls `receive`, another iterates `frames`; the core calls the rest from any thread."""

    def __init__(self, core: Core, peer: str) -> None:
        self.peer = peer
        self.client_id = ""
        self.inline_bytes = 0
        """Answers up to this size go in their header."""
        self._core = core
        self._engine: Engine | None = None
        self._phase = Phase.GREETING
        self._opened = time.monotonic()
        self._receiving: dict[int, Request] = {}
        self._skipped: OrderedDict[int, None] = OrderedDict()
        # Its lock guards phase, error, left and outbox. Who holds it does not ask for the core's lock.
        self._ready = threading.Condition()
        self._error: IsthmusError | None = None
        self._left = False
        self._outbox: deque[split_pb2.ServerFrame | Answer] = deque()
        self.undelivered = 0
        """Answers that the client has not begun to fetch."""
        self._told = False  # that the server drains
        self._room = 2 * core.limits.max_in_flight + 64

    # From the client

    def receive(self, frame: InFrame) -> bool:
        """Takes one frame; False when the stream takes no more. What is wrong fails its request, or ends the stream.

        Blocks while the client does not fetch what is sent to it.
        """
        with self._ready:
            self._ready.wait_for(lambda: len(self._outbox) < self._room or self._phase is Phase.OVER)
            if self._phase is Phase.OVER or self._error is not None:
                return False
        try:
            if isinstance(frame, ChunkFrame):
                self._on_chunk(frame)
            else:
                self._on_frame(frame)
        except IsthmusError as error:
            self.broke(error)
            return False
        except Exception as error:
            failure = IsthmusError("the server failed while it handled a frame; its log says how")
            failure.__cause__ = error
            self.broke(failure)
            return False
        return True

    def _on_frame(self, frame: split_pb2.ClientFrame) -> None:
        kind = frame.WhichOneof("frame")
        if (kind == "hello") is not (self._engine is None):
            raise BadFrame(f"the stream's first frame must be hello, and no other: found {kind or 'an unknown frame'}")
        if kind == "hello":
            self._on_hello(frame.hello)
        elif kind == "recipe":
            self._on_recipe(frame.recipe)
        elif kind == "request":
            self._on_request(frame.request)
        elif kind == "acknowledge":
            self._core.books.forget([(self.client_id, id) for id in frame.acknowledge.ids])
        elif kind == "cancel":
            self._on_cancel(frame.cancel.id)
        else:
            raise BadFrame("a frame of a kind that this protocol version does not have")

    def _on_hello(self, hello: split_pb2.Hello) -> None:
        self._core.lifecycle.emit(Stage.BEFORE_HANDSHAKE, hello=hello, peer=self.peer)
        self._core.check_open()
        self._engine = agree(hello, self._core.engines)
        self.client_id = hello.client_id
        self.inline_bytes = min(hello.inline_bytes, MAX_INLINE_BYTES)
        self.send(wire.welcome(self._core.limits, self._engine.identity))
        with self._ready:
            if self._phase is Phase.GREETING:
                self._phase = Phase.OPEN
        if self._core.draining:  # since the question above: `drain` came too early for this stream
            self.drain()
        self._core.lifecycle.emit(Stage.AFTER_HANDSHAKE, client=self.client_id, peer=self.peer, model_id=hello.model_id)

    def _on_recipe(self, upload: split_pb2.RecipeUpload) -> None:
        self._core.recipes.add(upload.digest, upload.data)

    def _on_request(self, frame: split_pb2.RequestHeader) -> None:
        self._skipped.pop(frame.id, None)
        try:
            request = self._announce(frame)
            answer = self._core.books.admit(request)
        except IsthmusError as error:
            unfinished = self._receiving.pop(frame.id, None)
            if unfinished is None or unfinished.state is State.OVER:
                self._tell(frame.id, error)
            else:
                self._core.books.abandon(unfinished, error)
            missing = (
                isinstance(error, Disagreement)
                and not frame.HasField("file")
                and self._core.recipes.get(frame.recipe_digest) is None
            )
            self._fail(frame.id, error, retry=True if missing else None)
            return
        if answer is not None:
            self.send(answer)
        if request.state is State.OVER:
            self._skip(frame.id)
            return
        try:
            self._prepare(request)
        except IsthmusError as error:
            self._core.books.abandon(request, error)
            self._fail(frame.id, error)
            return
        if request.payload_bytes == 0:
            self._submit(request)
        else:
            self._receiving[frame.id] = request

    def _prepare(self, request: Request) -> None:
        """Raises HookRefused, and ServerUnavailable without the memory that the payload takes."""
        self._core.books.begin(request)
        self._core.lifecycle.emit(Stage.BEFORE_RECEIVE, request.about, nbytes=request.payload_bytes)
        try:
            request.allocate()
        except (MemoryError, RuntimeError) as error:  # torch reports a lack of memory by RuntimeError
            raise ServerUnavailable(f"no memory for {request.payload_bytes} bytes: {error}") from error

    def _submit(self, request: Request) -> None:
        self._core.lifecycle.emit(Stage.AFTER_RECEIVE, request.about, nbytes=request.payload_bytes)
        self._core.submit(request)

    def _announce(self, frame: split_pb2.RequestHeader) -> Request:
        """The request of a header, checked as far as it can be before its payload comes; nothing is allocated yet."""
        assert self._engine is not None
        if frame.session_id or frame.step:
            raise BadFrame("session_id and step are reserved and must be 0")
        for name in frame.hooks:
            if name not in self._core.hooks:
                allowed = ", ".join(sorted(self._core.hooks)) or "none"
                raise HookRefused(f'the observer "{name[:80]}" is not allowed on this server; allowed: {allowed}')
        limit = self._core.limits.max_request_bytes
        if frame.payload_bytes > limit:
            raise TooLarge(f"a payload of {frame.payload_bytes} bytes is announced; at most {limit} are accepted")
        if frame.HasField("file"):
            file = frame.file
            self._engine.admit_file(file.suffix, file.preprocess_digest, frame.header, frame.payload_bytes, limit)
            return Request(self, self._engine, None, frame)
        recipe = self._core.recipes.get(frame.recipe_digest)
        if recipe is None:
            raise Disagreement(f'no recipe "{frame.recipe_digest[:80]}" is held here; upload it, then ask again')
        if recipe.payload_bytes > limit:
            raise TooLarge(f"a frontier of {recipe.payload_bytes} bytes is announced; at most {limit} are accepted")
        self._engine.admit(recipe, frame.header, frame.payload_bytes, limit)
        return Request(self, self._engine, recipe, frame)

    def _on_chunk(self, chunk: ChunkFrame) -> None:
        request = self._receiving.get(chunk.id)
        if request is None:
            if chunk.id not in self._skipped:
                raise BadFrame(f"a chunk of payload {chunk.id}, which was not announced or is complete")
            return
        if request.state is not State.RECEIVING:  # cancelled, expired, or taken over by a newer stream
            del self._receiving[chunk.id]
            self._skip(chunk.id)
            return
        try:
            complete = request.write(chunk)
        except BadFrame as error:
            del self._receiving[chunk.id]
            self._core.books.abandon(request, error)
            self._fail(chunk.id, error)
            return
        if complete:
            del self._receiving[chunk.id]
            self._submit(request)

    def _on_cancel(self, id: int) -> None:
        if self._receiving.pop(id, None) is not None:
            self._skip(id)
        self._core.books.cancel((self.client_id, id))

    def _fail(self, id: int, error: IsthmusError, retry: bool | None = None) -> None:
        """Reports a request that goes no further; chunks of it that still come are no mistake."""
        self._skip(id)
        self.send(split_pb2.ServerFrame(failed=wire.failed(id, error, retry)))

    def _tell(self, id: int, error: IsthmusError) -> None:
        """Hooks hear of a request that was not taken in."""
        assert self._engine is not None
        about = About(id, -1, None, self._engine.identity.model_id, self.client_id)
        self._core.lifecycle.emit(Stage.ON_ERROR, about, where="request", error=error)

    def _skip(self, id: int) -> None:
        self._skipped[id] = None
        self._skipped.move_to_end(id)
        if len(self._skipped) > _SKIPPED:
            self._skipped.popitem(last=False)

    def finish(self) -> None:
        """The client has sent its last frame and still waits for its answers."""
        for request in self._receiving.values():
            self._core.books.abandon(request, Cancelled("the client ended its stream before the payload was complete"))
        with self._ready:
            if self._phase is not Phase.OVER:
                self._phase = Phase.FINISHED
            self._ready.notify_all()

    # To the client

    def send(self, item: split_pb2.ServerFrame | Answer) -> None:
        """Puts a frame or an answer in line; never blocks. After the end it is dropped."""
        with self._ready:
            if self._phase is not Phase.OVER:
                self._outbox.append(item)
                self.undelivered += isinstance(item, Answer)
                self._ready.notify_all()

    def frames(self) -> Iterator[wire.OutFrame]:
        """Everything to be sent, until the stream is over; raises the error that ended it, if one did."""
        while (item := self._next()) is not None:
            if isinstance(item, Answer):
                self._core.lifecycle.emit(Stage.BEFORE_SEND, item.about, nbytes=item.nbytes)
                yield from wire.frames(item, self._core.limits.chunk_bytes)
                self._core.lifecycle.emit(Stage.AFTER_SEND, item.about, nbytes=item.nbytes)
            else:
                yield item
        if self._error is not None:
            raise self._error

    def _next(self) -> split_pb2.ServerFrame | Answer | None:
        """What to send next, waiting for it; None at the end."""
        while True:
            # Asked for without the lock, and before the outbox is looked at: what was answered until then is in it.
            done = self._phase is Phase.FINISHED and not self._core.books.waits_for(self)
            with self._ready:
                if self._phase is Phase.OVER:
                    return None
                if self._outbox:
                    self._ready.notify_all()  # there is room again
                    item = self._outbox.popleft()
                    self.undelivered -= isinstance(item, Answer)
                    return item
                if done or self._error is not None:
                    return None
                if self._phase is not Phase.GREETING:
                    self._ready.wait()
                    continue
                patience = self._core.limits.hello_seconds
                left = self._opened + patience - time.monotonic()
                if left <= 0:
                    self._error = DeadlineExceeded(f"no hello came within {patience:g} s")
                else:
                    self._ready.wait(left)

    # The end

    def drain(self) -> None:
        """Tells the client that the server goes away, once; one that was not welcomed yet is refused at its hello."""
        with self._ready:
            if self._phase is Phase.GREETING or self._told:
                return
            self._told = True
        self.send(wire.draining())

    def broke(self, error: IsthmusError) -> None:
        """Ends the stream for something that went wrong on it."""
        self._core.lifecycle.emit(Stage.ON_ERROR, where=f"stream of {self.client_id or self.peer}", error=error)
        self.end(error)

    def end(self, error: IsthmusError) -> None:
        """Ends the stream with ``error`` once everything in line is sent; the first call counts."""
        with self._ready:
            if self._error is None:
                self._error = error
            self._ready.notify_all()

    def gone(self) -> None:
        """The stream is gone; whatever was in line for it stays in the core's store.

        gRPC says so in the one thread that serves every stream: nothing is done here that takes time, and no hook is
        called. `disconnect` follows in the stream's own thread.
        """
        with self._ready:
            self._phase = Phase.OVER
            self._outbox.clear()
            self._ready.notify_all()

    def disconnect(self) -> None:
        """Leaves the core, once; may be called again."""
        self.gone()
        with self._ready:
            if self._left:
                return
            self._left = True
        self._core.left(self, "" if self._error is None else f"{type(self._error).__name__}: {self._error}")
