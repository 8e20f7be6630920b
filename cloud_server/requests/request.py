"""One request on the server: announced, received, waiting, running, answered."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Protocol

from cloud_server import wire
from cloud_server.access import Caller
from cloud_server.decoding import StepWork
from cloud_server.models import FILE, Batching, BatchKey, Computed, Engine, FileRead, PartEnd, inexact
from cloud_server.scheduling import Payer, Task
from protos.frames import ChunkFrame
from protos.isthmus.v1 import split_pb2
from shared_hooks import Crossing
from shared_hooks.crossing import read_header
from shared_hooks.errors import BadFrame, IsthmusError, ModelFailed, TooLarge
from shared_hooks.lifecycle import About
from shared_hooks.sharing import Owner

# The answer to a request: its result or its failure, and its request.


Key = tuple[str, str, int]
"""(account, client id, request id), unique on a server."""


@dataclass(frozen=True)
class ServerAnswer:
    """A reply or a failure, which can be sent repeatedly."""

    key: Key
    fingerprint: bytes
    """The `fingerprint` of the request that it answers: an id that comes again with other content is not answered."""
    reply: split_pb2.ReplyHeader | None = None
    buffers: tuple[memoryview, ...] = ()
    failed: split_pb2.RequestFailed | None = None
    about: About | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.reply is None else self.reply.payload_bytes

    @property
    def held_bytes(self) -> int:
        """The bytes of memory that it takes; messages are objects, about twice as large as their bytes."""
        message = self.reply or self.failed
        inline = 0 if self.reply is None else len(self.reply.payload)
        besides = 0 if message is None else message.ByteSize() - inline
        return OVERHEAD + self.nbytes + 2 * besides


MAX_TABLES = 16
"""The maximum number of tables of layers that a request may name; there is one for each part of a chain."""
MOST_UNDER_WAY_NS = 600 * 10**9
"""A client's claim that its first byte left longer ago than this is ignored."""
OVERHEAD = 1 << 10
"""The bytes that an answer takes besides its content."""


# Where answers go: the part of a stream that requests and their table need.


class Outlet(Protocol):
    """One client's stream, as seen by what runs for it; implemented by `session.StreamSession`."""

    @property
    def client_id(self) -> str: ...

    @property
    def caller(self) -> Caller:
        """The stream's caller."""
        ...

    @property
    def owner(self) -> Owner:
        """The account and client that memory held for the stream is charged to."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing is received or sent any more."""
        ...

    @property
    def inline_bytes(self) -> int:
        """Answers up to this size are sent inside their header."""
        ...

    @property
    def undelivered(self) -> int:
        """The number of answers that the client has not begun to fetch."""
        ...

    @property
    def stuck_seconds(self) -> float:
        """How long the client has not fetched what is being sent; 0 if nothing is."""
        ...

    def withdraw(self, answer: ServerAnswer, failure: split_pb2.RequestFailed) -> bool:
        """Replace a queued answer by ``failure``; returns False if it is being sent already."""
        ...

    def drop(self, error: IsthmusError) -> None:
        """End the stream at once, without what is queued."""
        ...

    def send(self, item: split_pb2.ServerFrame | ServerAnswer) -> None:
        """Queue a frame or an answer; never blocks. After the end of the stream it is dropped."""
        ...


TRACEPARENT = 55
"""The length of a W3C traceparent, in characters."""
OPEN_HEADER_BYTES = 64 << 10
"""Room for the header of an open request; longer ones must be announced at once."""


class Readable(Protocol):
    """Memory in which payloads may lie (`streams.Area`)."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into``. Raises BadFrame."""


class RequestState(Enum):
    RECEIVING = "receiving"  # announced; its payload is still arriving
    QUEUED = "queued"  # complete, waiting for a worker
    RUNNING = "running"  # its tail is being computed, which cannot be interrupted
    FORWARDED = "handed on"  # its part is computed, and the next server of its chain computes the rest
    OVER = "over"  # answered, failed, cancelled or abandoned


class Request:
    """A request and its payload buffer. Its state changes under the core's lock; one thread writes the payload."""

    def __init__(
        self,
        outlet: Outlet,
        engine: Engine,
        crossing: Crossing | None,
        frame: split_pb2.RequestHeader,
        step_task: StepWork | None = None,
    ) -> None:
        """``crossing``: None for a request with an input file, and for a step of a decoding session, which has a
        ``step_task``.
        """
        self.owner = outlet.owner
        self.key: Key = (*self.owner, frame.id)
        self.id = frame.id
        self.outlet: Outlet | None = outlet
        """The stream to answer on; None once it is gone, another one after a reconnect."""
        self.caller = outlet.caller
        self.engine = engine
        self.crossing = crossing
        self.step_task = step_task
        self.about = about(frame, 0, engine, outlet)
        """For hooks; the core numbers it when the request is admitted."""
        self.suffix = frame.file.suffix
        self.header = frame.header
        self.opening = frame if frame.open else None
        """Its announcement, while its client does not yet know all that it will send."""
        self._header_bytes = OPEN_HEADER_BYTES if frame.open else len(frame.header)
        self._room = frame.payload_bytes
        self.payload_bytes = frame.payload_bytes
        self.deadline_ms = frame.deadline_ms
        self.want_metrics = frame.want_metrics
        self.known_tables = frozenset(frame.known_tables[:MAX_TABLES])
        """Tables of layers that its client has (`LayerColumns.table`)."""
        self.route = tuple(frame.route)
        """The parts after this server's."""
        self.together = frame.together
        """Whether its client accepts the last bits as computed in a batch."""
        self.observers = tuple(frame.hooks)
        self.inline_bytes = outlet.inline_bytes
        self.observations = b""
        """The findings of the tail's observers; see `shared_hooks.observers.named`."""
        self.fingerprint = fingerprint(engine, frame)
        self.state = RequestState.RECEIVING
        self.cancelled = False
        self.announced = False
        """Whether hooks have seen it."""
        self.error: IsthmusError | None = None
        self.reply: split_pb2.ReplyHeader | None = None
        """The answer, if it is a result."""
        self.began_ns = time.perf_counter_ns()
        self.complete_ns = self.began_ns
        sent_ns = frame.sent_ns
        earliest = max(0, self.began_ns - MOST_UNDER_WAY_NS)  # 0: unknown, also where the clock is young
        self.sent_ns = sent_ns if earliest < sent_ns < self.began_ns else self.began_ns
        """When its client sent the first byte, by this machine's clock, as far as that is known."""
        self.payload = memoryview(b"")
        self._read: FileRead | None = None
        self.read_ns = 0
        """How long its file was decoded before a worker took it, which is not waiting time."""
        self._unread: IsthmusError | None = None
        self._received = 0
        self._progress_ns = self.began_ns
        self.leave_line: Callable[[], None] = _nothing
        """Removes it from the line in which it waits for a worker."""

    def allocate(self) -> None:
        """Allocate the payload's buffer. Raises ServerUnavailable without the memory."""
        if self.payload_bytes:
            self.payload = self.engine.allocate(self.payload_bytes)

    def read(self, source: Readable, offset: int) -> None:
        """Read the whole payload. Raises BadFrame if there is less."""
        if (payload := self.payload).nbytes:  # otherwise it has ended already
            source.read(offset, payload)
            self._received = payload.nbytes

    def write(self, chunk: ChunkFrame) -> bool:
        """Append the next chunk; returns whether it was the last. Raises BadFrame for gaps and overruns."""
        payload, due, nbytes = self.payload, self._received, chunk.nbytes
        if not payload.nbytes:
            return False  # it has ended since the caller looked; the next chunk reports that
        if chunk.offset != due:
            raise BadFrame(
                f"chunk at offset {chunk.offset}, where {due} was due: chunks come in order and without gaps"
            )
        if not nbytes:
            raise BadFrame(f"chunk at offset {due} is empty")
        if due + nbytes > self.payload_bytes:
            raise BadFrame(f"chunk of {nbytes} bytes at offset {due} overruns a payload of {self.payload_bytes} bytes")
        for piece in chunk.pieces:
            payload[due : due + piece.nbytes] = piece
            due += piece.nbytes
        self._received = due
        self._progress_ns = time.perf_counter_ns()
        return self.opening is None and due == self.payload_bytes

    def close(self, header: bytes, payload_bytes: int) -> None:
        """Complete an open request, whose client knows only now what it has sent. Raises BadFrame and TooLarge."""
        if self.opening is None:
            raise BadFrame(f"request {self.id} is closed, and was not open")
        if len(header) > OPEN_HEADER_BYTES:
            raise TooLarge(f"a header of {len(header)} bytes closes a request; at most {OPEN_HEADER_BYTES} are taken")
        if payload_bytes != self._received:
            raise BadFrame(f"request {self.id} is closed with {payload_bytes} bytes, and {self._received} have come")
        opening, self.opening = self.opening, None
        opening.header, opening.payload_bytes, opening.open = header, payload_bytes, False
        self.header, self.payload_bytes = header, payload_bytes
        self.payload = self.payload[:payload_bytes]
        self.fingerprint = fingerprint(self.engine, opening)

    @property
    def received_bytes(self) -> int:
        """The bytes of the payload received so far."""
        return self._received

    def waiting_since_ns(self, server_limit: float) -> int | None:
        """Since when its upload waits for the client (`time.perf_counter_ns`); None once it is complete.

        That is since the last chunk, or since the beginning if at this pace it would miss its deadline.
        """
        if self.state is not RequestState.RECEIVING:
            return None
        late = self._received * self.deadline_seconds(server_limit) < self.payload_bytes * self.age_seconds
        return self.began_ns if late else self._progress_ns

    def idle_seconds(self, server_limit: float) -> float:
        """Return how long its upload has waited for the client; 0 once it is complete."""
        since = self.waiting_since_ns(server_limit)
        return 0.0 if since is None else (time.perf_counter_ns() - since) / 1e9

    @property
    def held_bytes(self) -> int:
        """The bytes of memory that it takes while it waits."""
        return self._room + self._header_bytes

    def release(self) -> None:
        """Free its memory: queues and streams may still refer to it after its end."""
        self.payload, self.header, self._read = memoryview(b""), b"", None

    def completed(self) -> None:
        self.complete_ns = time.perf_counter_ns()

    @property
    def is_file(self) -> bool:
        """Whether its payload is an input file."""
        return self.crossing is None and self.step_task is None

    def read_file(self, max_bytes: int) -> None:
        """Decode the input file, if that needs no worker; an error is reported when the request is computed."""
        if not self.payload.nbytes:
            return  # it has ended
        began = time.perf_counter_ns()
        try:
            self._read = self.engine.read_file(self.suffix, self.header, self.payload, max_bytes)
        except IsthmusError as error:
            self._unread = error
        except Exception as error:  # its payload was released: the request is no longer waited for
            self._unread = ModelFailed(f"{type(error).__name__}: {error}")
        self.read_ns = time.perf_counter_ns() - began

    def compute(self, max_bytes: int) -> Computed:
        """Compute the engine's answer to the complete payload. ``max_bytes``: the limit of a decoded file."""
        inexact.set(self.together)  # belongs to this thread, which computes one request after the other
        if not self.observers:
            return self._compute(max_bytes)
        with self.engine.observing(self.observers) as found:
            computed = self._compute(max_bytes)
            self.observations = found()
        return computed

    def _compute(self, max_bytes: int) -> Computed:
        if self.step_task is not None:
            return self.step_task.compute(self.header, self.payload)
        if self.crossing is None:
            if self._unread is not None:
                raise self._unread
            header, read = self.header, self._read
            return self.engine.compute_file(self.suffix, header, self.payload, self.want_metrics, max_bytes, read)
        end = self.end
        return self.engine.compute(self.crossing, self.header, self.payload, self.want_metrics, end)

    @property
    def split(self) -> str:
        """The name of the cut."""
        if self.step_task is not None:
            return self.step_task.step.cut
        return FILE if self.crossing is None else self.crossing.name

    @cached_property
    def payer(self) -> Payer:
        """The account and client that a worker's time is charged to."""
        return Payer(self.key[0], self.key[1], self.caller.policy.weight)

    def task(self, server_limit: float) -> Task:
        """Return the scheduler's task. ``server_limit``: the server's time limit for any request, in seconds."""
        task, key, batching = Task(self, self.payer), self.batch_key, self.batching
        if key is not None:
            task.batch_key, task.rows = key.key, key.rows
            task.wanted_rows = 0 if self.step_task is None else self.step_task.step.together
        if batching is not None and self.crossing is not None:
            task.compatible_keys, task.nbytes = batching.compatible_keys, self.crossing.storage_bytes
            task.seconds_left = partial(self.seconds_left, server_limit) if self.deadline_ms else None
        return task

    @property
    def batch_key(self) -> BatchKey | None:
        """Equal for requests that may be computed together; None: compute it alone.

        The clients must allow it. Requests share a batch at a cut that is known to take batches, small steps behind one
        cut.
        """
        if self.observers:
            return None
        if self.step_task is None:
            batching = self.batching
            return None if batching is None or self.crossing is None else batching.batch_key(self.crossing, self.end)
        step = self.step_task.step
        if self.engine.step_batching is None or not step.together or step.close or step.number == 0 or step.route:
            return None
        if not self.header or max(self.payload_bytes, read_header(self.header)[1].raw_bytes) > wire.INLINE_BYTES:
            return None
        return BatchKey((self.engine.identity.model_id, step.cut), 1)

    @property
    def end(self) -> PartEnd | None:
        """Where this server's part ends; None: at the model's end."""
        return PartEnd(self.route[0].cut, self.route[0].codec or "raw") if self.route else None

    @property
    def batching(self) -> Batching | None:
        """Computes the request together with others; None if it is computed alone."""
        alone = not self.together or self.crossing is None or self.step_task is not None
        return None if alone else self.engine.batching

    @property
    def age_seconds(self) -> float:
        """Seconds since the request was announced."""
        return (time.perf_counter_ns() - self.began_ns) / 1e9

    def seconds_left(self, server_limit: float) -> float:
        """Return seconds until the request must not be started any more."""
        return self.deadline_seconds(server_limit) - self.age_seconds

    def deadline_seconds(self, server_limit: float) -> float:
        """Return the age in seconds from which the request must not be started any more."""
        return min(self.deadline_ms / 1e3, server_limit) if self.deadline_ms else server_limit


def _nothing() -> None:
    """Does nothing: the request is in no line."""


def about(frame: split_pb2.RequestHeader, index: int, engine: Engine, outlet: Outlet) -> About:
    """Return the request as hooks see it. A client's trace context is kept only if it has the right size."""
    carrier = {"traceparent": frame.traceparent} if len(frame.traceparent) == TRACEPARENT else {}
    model_id, caller = engine.identity.model_id, outlet.caller
    return About(frame.id, index, None, model_id, outlet.client_id, caller.identity, caller.account, carrier)


def fingerprint(engine: Engine, frame: split_pb2.RequestHeader) -> bytes:
    """Return a digest by which a repeated request is distinguished from another with the same id; the header has the
    payload's checksums.
    """
    digest = hashlib.blake2b(digest_size=16)
    file = frame.file.SerializeToString(deterministic=True)
    step = b"%d %d " % (frame.session_id, frame.step) + frame.decoding.SerializeToString(deterministic=True)
    for part in (engine.identity.model_id.encode(), frame.cut_digest.encode(), frame.header, file, step):
        digest.update(len(part).to_bytes(8, "little") + part)
    digest.update(frame.payload_bytes.to_bytes(8, "little") + bytes([frame.want_metrics]))
    digest.update("\0".join(frame.hooks).encode())
    for hop in frame.route:
        digest.update(b"\0" + hop.SerializeToString(deterministic=True))
    return digest.digest()
