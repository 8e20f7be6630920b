"""Requests, each in whichever worker is idle, and what becomes of those whose worker ends under them.

Such a request runs once more in another worker, and as often as one ends before it has begun with it. If a tail had
begun to write to its payload, the next one finds a wrong checksum; then the client is asked to send it again. Two
deaths are enough: it fails with `WorkerLost`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cloud_server.limits import Limits
from cloud_server.models import Computed, Identity, Progress
from cloud_server.processes.channel import Lost
from cloud_server.processes.crew import Crew
from cloud_server.processes.memory import SharedMemory
from cloud_server.processes.task import ManifestTask, ProfileTask, SessionTask, StepTask, Task
from cloud_server.processes.worker_process import ALL, Share, WorkerProcess
from shared_hooks.errors import (
    BadFrame,
    IsthmusError,
    QuotaExceeded,
    ServerUnavailable,
    SessionLost,
    TooLarge,
    WorkerLost,
)

# Who has ended workers lately: a request that crashes one costs its sender nothing, and the server a start.

MINUTE = 60.0


class Crashes:
    """Of the last minute, by account; at most ``most`` of each. Any thread may call."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._lately: deque[tuple[float, str]] = deque()

    def add(self, account: str) -> None:
        with self._lock:
            self._lately.append((self._clock(), account))

    def check(self, account: str) -> None:
        """Raises QuotaExceeded, saying when it may go on."""
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
"""Workers that may end under one request."""
HANG_SECONDS = 10.0
"""Beyond `Limits.max_compute_seconds`, after which the worker ends Python code itself: what goes on is a kernel."""
REMEMBERED = 4096
"""Requests that a worker has ended under, and that may come again."""


def payload_memory(limits: Limits) -> SharedMemory:
    """For all payloads and answers there may be. Sparse, so it may be generous: room that is free is in pieces, too."""
    return SharedMemory(2 * (limits.max_pending_bytes + limits.max_answer_bytes))


class Pool:
    """``count`` workers for the command line ``words``. Use as a context manager. Any thread may call."""

    def __init__(
        self,
        words: Sequence[str],
        count: int,
        limits: Limits,
        hang_seconds: float = HANG_SECONDS,
        *,
        share: Share = ALL,
        memory: SharedMemory | None = None,
    ) -> None:
        """``share``: what of the configuration is these workers'. ``memory``: of payloads, and the caller's."""
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
        """Ends the workers; what they still compute is lost."""
        self.crew.close()
        if self._owns_memory:
            self.memory.close()

    def start(self) -> list[Identity]:
        """Waits until all workers are warm; what they serve. Raises what a worker's start failed by."""
        return self.crew.start()

    def run(self, task: Task) -> Computed:
        """Runs a request. Raises what the model raises, WorkerLost, TooLarge, QuotaExceeded, ServerUnavailable."""
        self._crashes.check(task.account)
        before = deaths = self._struck.pop(task.key, 0)
        while True:
            try:
                with self._taken(task.account) as worker:
                    return worker.run(task, self._patience)
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

    def step(self, task: StepTask, worker: WorkerProcess) -> Computed:
        """Runs a step in the worker that has its session. Raises as `run`, and SessionLost when that has ended."""
        self._crashes.check(task.account)
        with self._of_session(task.account, worker):
            return worker.run(task, self._patience)

    def begin(self, task: SessionTask, account: str, worker: WorkerProcess) -> None:
        """A new session in a worker. Raises as `step`."""
        self._crashes.check(account)
        with self._of_session(account, worker):
            worker.ask(task, self._patience, lambda *_: None)

    @contextmanager
    def _of_session(self, account: str, worker: WorkerProcess) -> Iterator[None]:
        try:
            with self._taken(account, worker):
                yield
        except (_Ended, Lost) as ended:
            raise SessionLost(f"its worker process {ended}") from None

    def ask(self, task: ProfileTask | ManifestTask, on_progress: Progress = lambda *_: None) -> bytes:
        """What is answered with bytes: a profile as JSON, a manifest. Raises as `run`; it is not run again."""
        try:
            with self._taken("") as worker:
                return worker.ask(task, self._patience, on_progress)
        except _Ended as ended:
            raise WorkerLost(f"the worker that was asked {ended}") from None

    @contextmanager
    def _taken(self, account: str, wanted: WorkerProcess | None = None) -> Iterator[WorkerProcess]:
        """An idle worker (``wanted``: this one) for the block. Raises _Ended when it ends in it, and TooLarge when it
        does not come back.
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
            # It is gone. Or something went wrong here: nobody knows what it will say next.
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
    """A worker ended; the text says how. ``begun``: and it was at what it was asked."""

    def __init__(self, worker: WorkerProcess) -> None:
        super().__init__(worker.end)
        self.begun = worker.has_begun
