"""One worker process as the server sees it: started, given tasks, watched, ended.

| the server sends | with | the worker answers |
|---|---|---|
| | | warm: identities; or refused: what its start failed by |
| compute, file | where the payload lies, the parcel's header | reply, failure; before it perhaps cut? or room? |
| cut | a cut's description | (continues) |
| room | where there is room for an answer | (continues) |
| step | as compute, and which session | reply, with what the session holds; failure |
| rest | of which session, and what the next server answered | as step; or next?, a question to it |
| forget | sessions | |
| session | a number; a cut, or which one to copy | answer or failure |
| profile | settings | progress (the server: go on, or not), and at last answer or failure |
| manifest | | answer or failure |

A reply or a failure is a message of the wire, as far as the worker knows it. A worker that ends, or says anything else,
is `Lost`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import psutil
from google.protobuf.message import DecodeError

from cloud_server.models import Computed, Identity, Progress
from cloud_server.processes.channel import (
    Lost,
    ManifestTask,
    ProcessChannel,
    ProfileTask,
    RequestTask,
    RestTask,
    SessionTask,
    SharedMemory,
    StepRequest,
)
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError, ServerUnavailable, by_name

Part = tuple[int, int]
"""(number of a model's part from 0, how many there are)."""


class WorkerShare(NamedTuple):
    """The part of the server's configuration for a worker: its device (empty: as configured), and models (None: all);
    ``parts``: the part of each, None: the whole.
    """

    device: str = ""
    models: tuple[str, ...] | None = None
    parts: tuple[Part | None, ...] = ()


ALL = WorkerShare()
END_SECONDS = 2.0
"""How long a worker may take to end after the server has hung up."""


HELLO_SECONDS = 10.0
"""From the first byte of a worker's first message to its last."""


class WorkerState(Enum):
    STARTING = "starting"  # loads its models
    IDLE = "idle"  # warm, and without a request
    BUSY = "busy"  # has a request, or a profile
    ENDED = "ended"  # its process has ended, or is about to


class RemoteCause(Exception):
    """The cause of a worker's error: its text is the traceback there."""


class WorkerProcess:
    """A worker process. Its state belongs to the pool, under the pool's lock; only the thread that has made it BUSY
    sends it tasks.
    """

    def __init__(self, number: int, words: Sequence[str], memory: SharedMemory, share: WorkerShare = ALL) -> None:
        """Start the process. On Linux it ends with the *thread* that calls this."""
        self.number = number
        self.state = WorkerState.STARTING
        self.leaving = False
        """Whether it is being replaced: it ends after its task."""
        self.began = time.monotonic()
        self.warm_at = 0.0
        self._asked = 0
        self.answered = 0
        self.spent = False
        """Whether it reports that it can no longer use its device."""
        self.why_ended = ""
        """Set if the server ends it."""
        self.sessions = 0
        """The number of its decoding sessions."""
        self.onward: dict[int, int] = {}
        """Its sessions at the next server of a chain: their numbers there, by the worker's."""
        self.closed: deque[int] = deque()
        """Closed sessions, of which the next task informs the worker."""
        self._memory = memory
        self._kept: dict[int, memoryview] = {}
        """Payloads that something in the worker still references, by their start."""
        self._begun = memory.allocate(8).cast("Q")
        """The number of the last task that it has begun, written by itself."""
        self._begun[0] = 0
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _boot(words, share, theirs.fileno(), memory, self._begun)],
                pass_fds=(theirs.fileno(), memory.fd),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only the server, even while this imports
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.channel = ProcessChannel(ours)
        self.pid = self._process.pid
        self._watched = psutil.Process(self.pid)
        self.pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.pid})"

    # Called by the holder of the worker

    def identities(self) -> list[Identity]:
        """Wait until it is warm; returns what it serves. Raises Lost, TimeoutError, and the error of its start."""
        head, _ = self.channel.receive(HELLO_SECONDS)
        try:
            if head.get("is") == "refused":
                raise by_name(str(head["error"]))(str(head["message"]))
            return [Identity(**one) for one in head["identities"]]
        except (KeyError, TypeError) as error:
            raise Lost(f"no identities: {error}") from error

    def run(self, task: RequestTask, seconds: float) -> Computed | StepRequest:
        """Return the answer to a request; to a `RestTask` perhaps a request to the next server.

        Raises what the worker raises, Lost, and TimeoutError after ``seconds``.
        """
        until = time.monotonic() + seconds
        payload, room = task.payload, memoryview(b"")
        start = self._memory.mapping.offset(payload) if payload.nbytes else 0
        if payload.nbytes:
            self._kept[start] = payload  # stays reserved until the worker has answered, or is dead
        requested = {**self._asking(task), "at": start, "bytes": payload.nbytes}
        more = () if not isinstance(task, RestTask) or task.answered is None else (task.answered[1],)
        self.channel.send(requested, task.header, *more, seconds=seconds)
        while True:
            head, parts = self.channel.receive(max(until - time.monotonic(), 0.001))
            self._check_number(head)
            kind = head.get("is")
            try:
                if kind == "cut?" and task.crossing is not None:
                    self.channel.send({"do": "cut"}, task.crossing.to_bytes(), seconds=seconds)
                elif kind == "room?":
                    room = self._make_room(int(head["bytes"]))
                else:
                    self.answered += 1
                    self._keep(head["kept"])
                    if kind == "next?":
                        fork = None if head["fork"] is None else (int(head["fork"][0]), int(head["fork"][1]))
                        return StepRequest(int(head["session"]), int(head["step"]), fork, parts[0], parts[1])
                    if kind == "reply":
                        return self._computed(head, parts, (payload, room))
                    self.spent = self.spent or bool(head["spent"])
                    raise _failure(parts)
            except (KeyError, IndexError, TypeError, ValueError, DecodeError) as error:
                raise Lost(f"an answer that makes no sense: {error}") from error

    def _asking(self, task: RequestTask | ProfileTask | ManifestTask | SessionTask) -> dict[str, Any]:
        """Return the head of the next message."""
        self._asked += 1
        return {**task.head(), "number": self._asked, "closed": self._forgotten()}

    def _forgotten(self) -> list[int]:
        return [self.closed.popleft() for _ in range(len(self.closed))]

    def forget(self) -> None:
        """Inform the worker of closed sessions, without a task. The pool holds its lock."""
        if self.closed:
            try:
                self.channel.send({"do": "forget", "number": self._asked, "closed": self._forgotten()}, seconds=1.0)
            except (Lost, TimeoutError):
                pass  # it has ended; the next caller notices

    def request_bytes(
        self, task: ProfileTask | ManifestTask | SessionTask, seconds: float, on_progress: Progress
    ) -> bytes:
        """As `run`, for an answer that is bytes; ``seconds``: between two progress messages.

        An error raised by ``on_progress`` ends it.
        """
        self.channel.send(self._asking(task))
        stopped: BaseException | None = None
        while True:
            head, parts = self.channel.receive(seconds)
            self._check_number(head)
            try:
                if head.get("is") == "progress":
                    try:
                        on_progress(int(head["done"]), int(head["total"]), str(head["what"]))
                    except BaseException as error:
                        stopped = error
                    self.channel.send({"do": "go on" if stopped is None else "stop"})
                    continue
                self._keep(head["kept"])
                if stopped is not None:
                    raise stopped
                if head.get("is") == "answer":
                    return parts[0]
                self.spent = self.spent or bool(head["spent"])
                raise _failure(parts)
            except (KeyError, IndexError, TypeError, ValueError, DecodeError) as error:
                raise Lost(f"an answer that makes no sense: {error}") from error

    def _check_number(self, head: dict[str, Any]) -> None:
        """Check the number of an answer: that to an earlier task would be another client's."""
        if head.get("number") != self._asked:
            raise Lost(f"an answer to question {head.get('number')!r:.20}, not {self._asked}")

    def _make_room(self, nbytes: int) -> memoryview:
        if nbytes < 0:
            raise ValueError(f"room for {nbytes} bytes")
        try:
            room = self._memory.allocate(nbytes)
        except ServerUnavailable as error:
            self.channel.send({"do": "room", "at": -1, "message": str(error)})
            return memoryview(b"")
        self.channel.send({"do": "room", "at": self._memory.mapping.offset(room)})
        return room

    def _keep(self, starts: list[int]) -> None:
        self._kept = {start: view for start, view in self._kept.items() if start in starts}

    def _computed(self, head: dict[str, Any], parts: list[bytes], blocks: tuple[memoryview, ...]) -> Computed:
        reply = split_pb2.ReplyHeader.FromString(parts[0])
        buffers = (
            (memoryview(parts[2]),)
            if len(parts) > 2
            else tuple(self._view(at, nbytes, blocks) for at, nbytes in head["places"])
        )
        if sum(buffer.nbytes for buffer in buffers) != reply.payload_bytes:
            raise ValueError("the size of an answer differs from its header")
        cut = (str(head["cut"]), parts[1]) if head["cut"] else None
        made = Computed(reply, buffers, int(head["session_bytes"]), bool(head["is_done"]), cut)
        return replace(made, rest=_no_rest) if head["rest"] else made

    def _view(self, at: int, nbytes: int, blocks: tuple[memoryview, ...]) -> memoryview:
        for block in blocks:
            begin = at - self._memory.mapping.offset(block) if block.nbytes else -1
            if begin >= 0 and begin + nbytes <= block.nbytes:
                return block[begin : begin + nbytes]
        raise ValueError("an answer outside of the shared memory")

    # Called by the watching pool

    @property
    def has_news(self) -> bool:
        """Whether a message of it waits."""
        poller = select.poll()
        poller.register(self.channel, select.POLLIN)
        return bool(poller.poll(0))

    @property
    def has_begun(self) -> bool:
        """Whether it had begun its last task; otherwise that did not end it, and the payload is untouched."""
        return self._begun[0] == self._asked

    @property
    def is_warm(self) -> bool:
        """Whether it has loaded its models, and is not about to end."""
        return self.state in (WorkerState.IDLE, WorkerState.BUSY)

    @property
    def gone(self) -> bool:
        """Whether the process has ended; it is reaped then."""
        return self._process.poll() is not None

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal (SIGSTOP)."""
        try:
            return self._watched.status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    @property
    def own_bytes(self) -> int:
        """Its resident memory, without what it shares with others: payloads, libraries."""
        try:
            found = self._watched.memory_info()
        except psutil.Error:
            return 0
        return int(found.rss - getattr(found, "shared", 0))

    def dismiss(self) -> None:
        """Let it end, because it has nothing to do. The pool holds its lock."""
        self.state = WorkerState.ENDED
        self.channel.hang_up()

    def kill(self, why: str) -> None:
        """Kill it at once; a thread that waits for its answer gets Lost."""
        self.why_ended = self.why_ended or why
        self._process.kill()

    def buried(self, seconds: float) -> bool:
        """Wait for its end and free what it held; False if it has not ended within ``seconds``."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self._kept.clear()
        return True

    def close(self) -> None:
        """Close what remains, with the last call. Log records may still name it, but do not keep its memory."""
        self.channel.close()
        self._begun.release()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    @property
    def has_crashed(self) -> bool:
        """Whether it ended by itself; other processes use no signals but these two."""
        status = self._process.poll()
        return status is not None and -status not in (signal.SIGKILL, signal.SIGTERM)

    @property
    def end(self) -> str:
        """How it ended."""
        status = self._process.poll()
        if self.why_ended:
            return self.why_ended
        if status is None:
            return "does not answer"
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _no_rest() -> Computed:
    """Marks a step that has a second half."""
    raise AssertionError("unreachable: `PooledModel` puts its own there")


def _boot(words: Sequence[str], share: WorkerShare, channel: int, memory: SharedMemory, begun: memoryview) -> str:
    """Return the program of a worker. Modules are found as they are here, independent of the current folder."""
    return (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from cloud_server.processes.worker import main\n"
        f"sys.exit(main({list(words)!r}, {tuple(share)!r}, {os.getpid()}, {channel}, {memory.fd}, "
        f"{memory.nbytes}, {memory.mapping.offset(begun)}))"
    )


def _failure(parts: list[bytes]) -> IsthmusError:
    """Return the worker's error, as one of this process."""
    failed = split_pb2.RequestFailed.FromString(parts[0])
    error = by_name(failed.error)(failed.message)
    if parts[1]:
        error.__cause__ = RemoteCause("\n" + parts[1].decode("utf-8", "replace"))
    return error
