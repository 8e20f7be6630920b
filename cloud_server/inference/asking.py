"""One request of the Open Inference Protocol, as a stream of its own in this process.

It has one of the server's places (`max_clients`), waits for its account's turn before its message is read, and from
then on it is a request like any other: it speaks the native protocol's frames, without the wire.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from cloud_server.access import Caller
from cloud_server.core import Core
from cloud_server.inference.sending import Sending
from cloud_server.streams import InFrame
from protos.chunks import ChunkFrame
from protos.headed import HeadedReply, HeadedRequest
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import Cancelled, InputMismatch, IsthmusError, ServerUnavailable, by_name
from shared_hooks.sharing import Party

T = TypeVar("T")

MOST_MS = 2**32 - 1
INLINE_BYTES = 64 << 10
_SECRET = secrets.token_hex(8)
_ids = itertools.count(1)


class Asking:
    """One request of ``caller``, as a context manager: entered for a place, left when its answer was fetched.

    ``on_drop`` ends the transport's call, from any thread, without waiting. Raises ServerUnavailable without a place.
    """

    def __init__(self, core: Core, caller: Caller, on_drop: Callable[[], object]) -> None:
        self.caller = caller
        self._core = core
        self._session = core.open(caller, brief=True)
        self._session.on_drop = on_drop
        self._id = next(_ids)
        # one connection is one client, as natively, by a name that nobody else of its account can say
        self._client = f"inference {caller.peer} {_SECRET}"
        self._frames = self._session.frames()
        self._answered = False

    def __enter__(self) -> Asking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        key = (*self.party, self._id)
        if self._answered and kind is None:
            self._session.finish()
            for _ in self._frames:  # hooks hear that the answer went
                pass
        self._core.requests.cancel(key)
        self._core.requests.forget([key])
        self._session.disconnect()

    @property
    def party(self) -> Party:
        """On whom it counts what is held for it."""
        return Party(self.caller.account, self._client)

    def refuse(self, error: IsthmusError) -> None:
        """Ends it with an error, from any thread."""
        self._session.end(error)

    def gone(self) -> None:
        """The caller left: whoever waits here waits no more. Any thread may call; nothing is done that takes time."""
        self._session.gone()

    def read(self, reading: Callable[[], T]) -> T:
        """What ``reading`` makes of a message, in its account's turn and at its account's cost (`streams.pace`)."""
        self._session.wait_turn()
        began = time.thread_time()
        try:
            with self._session.turn:
                return reading()
        finally:
            self._session.spent(time.thread_time() - began)

    def answer(self, sending: Sending, deadline_seconds: float | None) -> tuple[split_pb2.ReplyHeader, memoryview]:
        """The reply, and its payload. Raises what the request fails by."""
        began = time.thread_time()
        self._send(sending, deadline_seconds)
        self._session.spent(time.thread_time() - began)
        return self._receive()

    def _send(self, sending: Sending, deadline_seconds: float | None) -> None:
        hello = split_pb2.Hello()
        hello.CopyFrom(sending.hello)
        hello.client_id, hello.heartbeat_ms = self._client, 0
        hello.inline_bytes, hello.message_bytes = INLINE_BYTES, self._core.limits.max_message_bytes
        self._take(split_pb2.ClientFrame(hello=hello))
        upload = split_pb2.CutUpload(digest=sending.cut_digest, data=sending.cut)
        self._take(split_pb2.ClientFrame(cut=upload))
        if sending.split is not None:
            self._check_split(sending)
        milliseconds = 0 if deadline_seconds is None else min(MOST_MS, max(1, int(1000 * deadline_seconds)))
        header = split_pb2.RequestHeader(
            id=self._id,
            cut_digest=sending.cut_digest,
            header=sending.header,
            payload_bytes=sending.nbytes,
            deadline_ms=milliseconds,
        )
        self._take(HeadedRequest(header, tuple(buffer.cast("B") for buffer in sending.buffers if buffer.nbytes)))

    def _take(self, frame: InFrame) -> None:
        """What is wrong with the stream as a whole ends it, and is raised by whoever receives."""
        self._session.receive(frame)

    def _check_split(self, sending: Sending) -> None:
        crossing = self._core.crossings.get(sending.cut_digest, self._session.party)
        if crossing is not None and crossing.layer_name != sending.split:
            raise InputMismatch(
                f"isthmus_split is {(sending.split or '')[:80]!r}, and what crosses was cut after "
                f'"{crossing.layer_name}"'
            )

    def _receive(self) -> tuple[split_pb2.ReplyHeader, memoryview]:
        reply: split_pb2.ReplyHeader | None = None
        pieces: list[memoryview] = []
        missing = 0
        for frame in self._frames:
            if isinstance(frame, HeadedReply):
                reply = frame.header
                missing += reply.payload_bytes
            if isinstance(frame, HeadedReply | ChunkFrame):
                pieces += frame.pieces
                missing -= frame.nbytes
            elif frame.HasField("failed"):
                raise _error(frame.failed)
            elif frame.HasField("reply"):
                reply = frame.reply
                missing = 0 if reply.payload else reply.payload_bytes
            if reply is not None and missing <= 0:
                self._answered = True
                payload = reply.payload if reply.payload else b"".join(pieces)
                return reply, memoryview(payload)
        raise Cancelled("the caller left")


def _error(failed: split_pb2.RequestFailed) -> IsthmusError:
    """As it was raised on this side, but for its cause."""
    kind = by_name(failed.error)
    error = kind(failed.message)
    if failed.retry_after_ms:
        error.retry_after_seconds = failed.retry_after_ms / 1e3
    elif failed.retry and not isinstance(error, ServerUnavailable):
        error.retry_after_seconds = 1.0
    return error
