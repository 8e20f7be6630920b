"""The engine of a server with worker processes: what needs no model is checked here, the rest is done by a worker."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from cloud_server.limits import Limits
from cloud_server.models import Computed, EngineSession, FileRead, Following, Identity, PartEnd, Progress, inexact
from cloud_server.models.admission import check_file, check_frontier, check_step
from cloud_server.processes.channel import (
    MAX_BYTES,
    Lost,
    ManifestTask,
    ProfileTask,
    RequestTask,
    RestTask,
    SessionTask,
    SharedMemory,
    StepRequest,
    StepTask,
)
from cloud_server.processes.crew import Crew
from cloud_server.processes.worker_process import ALL, WorkerProcess, WorkerShare
from shared_hooks import Crossing, Parcel
from shared_hooks.errors import (
    BadFrame,
    IsthmusError,
    QuotaExceeded,
    ServerUnavailable,
    SessionLost,
    TooLarge,
    WorkerLost,
)
from shared_hooks.generation import StepLink, StepReply
from shared_hooks.lifecycle import About, Lifecycle
from shared_hooks.modules.manifest import Manifest, decode
from shared_hooks.tail import payer

# Requests, each in whichever worker is idle, and what happens when a worker dies.
#
# Such a request is run again in another worker, as often as a worker dies before it has begun with it. If a tail had
# begun to write to its payload, the next worker finds a wrong checksum, and the client is asked to send it again.
# After two deaths it fails with `WorkerLost`.

# Which accounts crashed workers lately: crashing one costs the sender nothing, and the server a process start.

MINUTE = 60.0


class Crashes:
    """Crashes within the last minute by account, at most ``most`` each. Thread-safe."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._lately: deque[tuple[float, str]] = deque()

    def add(self, account: str) -> None:
        with self._lock:
            self._lately.append((self._clock(), account))

    def check(self, account: str) -> None:
        """Raise QuotaExceeded, with the time when the account may continue."""
        if not self._lately:
            return
        with self._lock:
            now = self._clock()
            while self._lately and self._lately[0][0] <= now - MINUTE:
                self._lately.popleft()
            own = [when for when, who in self._lately if who == account]
        if len(own) >= self._most:
            raise QuotaExceeded(
                f"requests of this account have ended {len(own)} workers within a minute, which is the limit "
                f"(worker_crashes_per_minute); it may go on in {own[-self._most] + MINUTE - now:.0f} s"
            )


DEATHS = 2
"""The number of workers that may end during one request."""
HANG_SECONDS = 10.0
"""Seconds beyond `Limits.max_compute_seconds`; until then the worker ends Python code itself, so a kernel is
running.
"""
REMEMBERED = 4096
"""The number of remembered requests during which a worker ended, and which may be repeated."""


def payload_memory(limits: Limits) -> SharedMemory:
    """Shared memory for all payloads and answers. It is sparse, so it can be generous, because free memory is
    fragmented.
    """
    return SharedMemory(2 * (limits.max_pending_bytes + limits.max_answer_bytes))


class Pool:
    """``count`` workers with the command line ``words``. Use it as a context manager. Thread-safe."""

    def __init__(
        self,
        words: Sequence[str],
        count: int,
        limits: Limits,
        hang_seconds: float = HANG_SECONDS,
        *,
        share: WorkerShare = ALL,
        memory: SharedMemory | None = None,
    ) -> None:
        """``share``: the part of the configuration for these workers. ``memory``: for payloads, owned by the caller."""
        self._owns_memory = memory is None
        self.memory = payload_memory(limits) if memory is None else memory
        self.crew = Crew(words, count, limits, self.memory, share)
        self._patience = limits.max_compute_seconds + hang_seconds
        self._crashes = Crashes(limits.worker_crashes_per_minute)
        self._lock = threading.Lock()
        self._struck: OrderedDict[tuple[str, str, int], int] = OrderedDict()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, with what they compute."""
        self.crew.close()
        if self._owns_memory:
            self.memory.close()

    def start(self) -> list[Identity]:
        """Start the workers and wait until all are warm; returns what they serve. Raises the error of a
        worker's start.
        """
        return self.crew.start()

    def run(self, task: RequestTask) -> Computed:
        """Run a request in a worker. Raises what the model raises, WorkerLost, TooLarge, QuotaExceeded,
        ServerUnavailable.
        """
        self._crashes.check(task.account)
        before = deaths = self._struck.pop(task.key, 0)
        while True:
            try:
                with self._taken(task.account) as worker:
                    computed = worker.run(task, self._patience)
                    assert isinstance(computed, Computed)
                    return computed
            except _Ended as ended:
                deaths += ended.begun
                if deaths >= DEATHS:
                    raise WorkerLost(f"{deaths} workers ended under this request; the last one {ended}") from None
            except BadFrame as error:
                if deaths == before:
                    raise
                self._remember(task.key, deaths)
                text = "a worker ended under this request after it had begun to write to what came; send it again"
                raise ServerUnavailable(text) from error

    def step(self, task: StepTask, worker: WorkerProcess) -> Computed | StepRequest:
        """Run a step, or the rest of one, in the worker that has its session. Raises as `run`, and SessionLost if that
        has ended.
        """
        self._crashes.check(task.account)
        with self._of_session(task.account, worker):
            return worker.run(task, self._patience)

    def begin(self, task: SessionTask, account: str, worker: WorkerProcess) -> None:
        """Open a session in a worker. Raises as `step`."""
        self._crashes.check(account)
        with self._of_session(account, worker):
            worker.request_bytes(task, self._patience, lambda *_: None)

    @contextmanager
    def _of_session(self, account: str, worker: WorkerProcess) -> Iterator[None]:
        try:
            with self._taken(account, worker):
                yield
        except (_Ended, Lost) as ended:
            raise SessionLost(f"its worker process {ended}") from None

    def request_bytes(self, task: ProfileTask | ManifestTask, on_progress: Progress = lambda *_: None) -> bytes:
        """Get bytes from a worker: a profile as JSON, or a manifest. Raises as `run`; it is not repeated."""
        try:
            with self._taken("") as worker:
                return worker.request_bytes(task, self._patience, on_progress)
        except _Ended as ended:
            raise WorkerLost(f"the worker that was asked {ended}") from None

    @contextmanager
    def _taken(self, account: str, wanted: WorkerProcess | None = None) -> Iterator[WorkerProcess]:
        """Take an idle worker (or ``wanted``) for the block. Raises _Ended if it ends, and TooLarge if it does not
        return.
        """
        worker = self.crew.take(wanted)
        try:
            yield worker
        except IsthmusError:
            raise  # it has answered
        except TimeoutError:
            self.crew.lost(worker, f"did not come back within {self._patience:g} s, and was ended")
            self._crashes.add(account)
            text = f"the model computed for more than {self._patience:g} s without coming back to Python"
            raise TooLarge(text) from None
        except BaseException as error:
            # The worker is gone, or something failed here: what it would send next is unknown.
            self.crew.lost(worker, f"was ended after {type(error).__name__}: {error}")
            if worker.has_begun and worker.has_crashed:
                self._crashes.add(account)
            if isinstance(error, Lost):
                raise _Ended(worker) from None
            raise
        finally:
            self.crew.release(worker)

    def _remember(self, key: tuple[str, str, int], deaths: int) -> None:
        with self._lock:
            self._struck[key] = deaths
            while len(self._struck) > REMEMBERED:
                self._struck.popitem(last=False)


class _Ended(Exception):
    """A worker ended; the text says how. ``begun``: it was working on this request."""

    def __init__(self, worker: WorkerProcess) -> None:
        super().__init__(worker.end)
        self.begun = worker.has_begun


_numbers = itertools.count(1)
"""The numbers of decoding sessions, unique over all workers."""


class PooledModel:
    """One model of a pool: an `Engine`."""

    def __init__(self, pool: Pool, identity: Identity, lifecycle: Lifecycle) -> None:
        """``lifecycle`` knows which request a thread works for."""
        self.identity = identity
        self.step_batching = self.batching = None
        """None: a worker takes one request at a time."""
        self.residence = None
        self._pool = pool
        self._lifecycle = lifecycle
        self._thread = threading.local()

    @cached_property
    def _manifest(self) -> Manifest:
        return decode(self._pool.request_bytes(ManifestTask(self.identity.model_id)))

    def manifest(self) -> Manifest:
        """Return the manifest of the workers' model."""
        return self._manifest

    def allocate(self, nbytes: int) -> memoryview:
        """Memory that all workers see."""
        return self._pool.memory.allocate(nbytes)

    def admit(self, crossing: Crossing, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """Check that header and cut agree on the payload. The worker compares it with the plan before it computes."""
        check_frontier(crossing, header, payload_bytes, max_bytes)

    def compute(
        self, crossing: Crossing, header: bytes, payload: memoryview, want_metrics: bool, end: PartEnd | None = None
    ) -> Computed:
        """Compute in a worker. The payload must be a block of `allocate`."""
        return self._run(crossing, "", header, payload, want_metrics, end)

    def admit_file(
        self, suffix: str, preprocess_digest: str, header: bytes, payload_bytes: int, max_bytes: int
    ) -> None:
        """As in one process: this needs no model."""
        check_file(self.identity, suffix, preprocess_digest, header, payload_bytes, max_bytes)

    def read_file(self, suffix: str, header: bytes, payload: memoryview, max_bytes: int) -> FileRead | None:
        """None: a worker reads the file, while others answer."""
        return None

    def compute_file(
        self,
        suffix: str,
        header: bytes,
        payload: memoryview,
        want_metrics: bool,
        max_bytes: int,
        read: FileRead | None = None,
        end: PartEnd | None = None,
    ) -> Computed:
        """Compute in a worker, which has the same ``max_bytes`` from its own configuration."""
        return self._run(None, suffix, header, payload, want_metrics, end)

    def admit_step(self, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """As in one process."""
        check_step(header, payload_bytes, max_bytes)

    def open_session(self, cut: str, following: Following | None = None) -> EngineSession:
        """Open a session in the worker that has the fewest, where it stays. Raises what the worker raises, and
        ServerUnavailable.
        """
        end, link = following or ("", None)
        worker, number = self._pool.crew.roomiest(), next(_numbers)
        self._pool.begin(SessionTask(self.identity.model_id, number, cut=cut, end=end), payer.get().account, worker)
        return PooledSession(self, worker, number, link)

    def begin_copy(self, of: int, worker: WorkerProcess, link: StepLink | None) -> EngineSession:
        """Copy a session within its worker."""
        number = next(_numbers)
        self._pool.begin(SessionTask(self.identity.model_id, number, of=of), payer.get().account, worker)
        return PooledSession(self, worker, number, link)

    def step(self, session: PooledSession, header: bytes, payload: memoryview) -> Computed:
        """Make one step of a session. The payload must be a block of `allocate`, or empty."""
        known = vars(self._task(None, "", header, payload, False))
        computed = self._pool.step(StepTask(**known, session=session.number), session.worker)
        assert isinstance(computed, Computed)
        if computed.rest is None:
            return computed
        rest = RestTask(**{**known, "header": b"", "payload": memoryview(b"")}, session=session.number)
        return replace(computed, rest=partial(self._rest, session, rest))

    def _rest(self, session: PooledSession, task: RestTask) -> Computed:
        """Run the second half of a step: the worker computes and this thread sends its requests to the next server,
        in turns.
        """
        while True:
            found = self._pool.step(task, session.worker)
            if isinstance(found, Computed):
                return found
            try:
                reply = session.send(found)
            except IsthmusError as error:
                task = replace(task, answered=({"error": type(error).__name__, "message": str(error)}, b""))
                continue
            parcel = Parcel.of_tensors(reply.header, reply.tensors)
            answered = {"up": reply.bytes_up, "down": reply.bytes_down}, b"".join(parcel.buffers)
            task = replace(task, header=parcel.header, answered=answered)

    def has(self, worker: WorkerProcess) -> bool:
        """Return whether the worker has not ended."""
        return self._pool.crew.has(worker)

    def _run(
        self,
        crossing: Crossing | None,
        suffix: str,
        header: bytes,
        payload: memoryview,
        want_metrics: bool,
        end: PartEnd | None = None,
    ) -> Computed:
        return self._pool.run(self._task(crossing, suffix, header, payload, want_metrics, end))

    def _task(
        self,
        crossing: Crossing | None,
        suffix: str,
        header: bytes,
        payload: memoryview,
        want_metrics: bool,
        end: PartEnd | None = None,
    ) -> RequestTask:
        """Return the task of the request that this thread works for."""
        model_id, about = self.identity.model_id, self._lifecycle.current or About(0, -1)
        observers = getattr(self._thread, "observers", ())
        account, allowed = payer.get().account, inexact.get()
        return RequestTask(
            model_id, about, account, crossing, suffix, header, payload, want_metrics, observers, allowed, end
        )

    @contextmanager
    def observing(self, observers: tuple[str, ...]) -> Iterator[Callable[[], bytes]]:
        """Observe in the worker, whose findings are in the reply already."""
        self._thread.observers = observers
        try:
            yield bytes
        finally:
            self._thread.observers = ()

    profile_yields = False
    """No: its worker waits meanwhile; others compute."""

    def profile(
        self, warmup: int, repetitions: int, seconds: float, on_progress: Progress, codecs: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Measure in a worker, whose turn it takes."""
        task = ProfileTask(self.identity.model_id, warmup, repetitions, seconds, tuple(codecs))
        found: dict[str, Any] = json.loads(self._pool.request_bytes(task, on_progress))
        return found


class PooledSession:
    """A decoding session in one worker: an `EngineSession`."""

    def __init__(self, model: PooledModel, worker: WorkerProcess, number: int, link: StepLink | None) -> None:
        """``link``: to the next server of a chain."""
        self._model = model
        self.worker = worker
        self.number = number
        self._link = link
        self._asked: dict[int, int] = {}
        """Sessions at the next server: their numbers there, by the worker's."""
        worker.sessions += 1

    @property
    def lost(self) -> str:
        """Why it is gone: it ends with its worker."""
        return "" if self._model.has(self.worker) else f"its worker process {self.worker.end}"

    def step(self, header: bytes, payload: memoryview) -> Computed:
        """Make a step. Raises what the worker raises, SessionLost if that has ended, and ServerUnavailable if it is not
        free.
        """
        return self._model.step(self, header, payload)

    def send(self, requested: StepRequest) -> StepReply:
        """Send the worker's request to the next server, with a session number that is unique there. Raises as
        `StepLink.step`.
        """
        assert self._link is not None
        known = self.worker.onward
        number = self._asked[requested.session] = known[requested.session] = known.get(requested.session) or next(
            _numbers
        )
        header, tensors = Parcel.tensors(
            requested.header, bytearray(requested.payload), len(requested.payload) + MAX_BYTES
        )
        fork = requested.fork
        if fork is not None:
            if fork[0] not in known:
                raise SessionLost("the session that this one continues was closed")
            fork = known[fork[0]], fork[1]
        return self._link.step(number, requested.step, header, tensors, fork)

    def fork(self) -> EngineSession:
        """Copy the session within its worker."""
        return self._model.begin_copy(self.number, self.worker, self._link)

    def close(self) -> None:
        """Close the session; the worker learns of it with its next task."""
        self.worker.sessions -= 1
        self.worker.closed.append(self.number)
        for session, number in self._asked.items():
            self.worker.onward.pop(session, None)
            if self._link is not None:
                self._link.close(number)
