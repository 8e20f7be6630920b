"""The engine of a server with worker processes: what needs no model is checked here, the rest is a worker's."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from cloud_server.models import Computed, EngineSession, FileRead, Identity, Progress, inexact
from cloud_server.models.admission import check_file, check_frontier, check_step
from cloud_server.processes.pool import Pool
from cloud_server.processes.task import ManifestTask, ProfileTask, SessionTask, StepTask, Task
from cloud_server.processes.worker_process import WorkerProcess
from shared_hooks import Crossing
from shared_hooks.lifecycle import About, Lifecycle
from shared_hooks.modules.manifest import Manifest, decode
from shared_hooks.tail import payer

_numbers = itertools.count(1)
"""Of decoding sessions, over all workers."""


class PooledModel:
    """One model of a pool: an `Engine`."""

    def __init__(self, pool: Pool, identity: Identity, lifecycle: Lifecycle) -> None:
        """``lifecycle`` knows which request a thread works for."""
        self.identity = identity
        self.company = self.batching = None
        """A worker takes one request at a time."""
        self.residence = None
        self._pool = pool
        self._lifecycle = lifecycle
        self._thread = threading.local()

    @cached_property
    def _manifest(self) -> Manifest:
        return decode(self._pool.ask(ManifestTask(self.identity.model_id)))

    def manifest(self) -> Manifest:
        """Of a worker's model; they are all alike."""
        return self._manifest

    def allocate(self, nbytes: int) -> memoryview:
        """Memory that all workers see."""
        return self._pool.memory.allocate(nbytes)

    def admit(self, crossing: Crossing, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """Checks that header and cut speak of the same bytes. The worker asks the plan before it computes."""
        check_frontier(crossing, header, payload_bytes, max_bytes)

    def compute(self, crossing: Crossing, header: bytes, payload: memoryview, want_metrics: bool) -> Computed:
        """In a worker. The payload must be a block of `allocate`."""
        return self._run(crossing, "", header, payload, want_metrics)

    def admit_file(
        self, suffix: str, preprocess_digest: str, header: bytes, payload_bytes: int, max_bytes: int
    ) -> None:
        """As in one process: nothing of it needs the model."""
        check_file(self.identity, suffix, preprocess_digest, header, payload_bytes, max_bytes)

    def read_file(self, suffix: str, header: bytes, payload: memoryview, max_bytes: int) -> FileRead | None:
        """A worker does: others answer meanwhile."""
        return None

    def compute_file(
        self,
        suffix: str,
        header: bytes,
        payload: memoryview,
        want_metrics: bool,
        max_bytes: int,
        read: FileRead | None = None,
    ) -> Computed:
        """In a worker, which has the same ``max_bytes`` from its own configuration."""
        return self._run(None, suffix, header, payload, want_metrics)

    def admit_step(self, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """As in one process."""
        check_step(header, payload_bytes, max_bytes)

    def open_session(self, cut: str) -> EngineSession:
        """In the worker that has the fewest, where it stays. Raises what the worker raises, and ServerUnavailable."""
        worker, number = self._pool.crew.roomiest(), next(_numbers)
        self._pool.begin(SessionTask(self.identity.model_id, number, cut=cut), payer.get().account, worker)
        return PooledSession(self, worker, number)

    def begin_copy(self, of: int, worker: WorkerProcess) -> EngineSession:
        """A copy of a session of that worker, beside it."""
        number = next(_numbers)
        self._pool.begin(SessionTask(self.identity.model_id, number, of=of), payer.get().account, worker)
        return PooledSession(self, worker, number)

    def step(self, session: int, worker: WorkerProcess, header: bytes, payload: memoryview) -> Computed:
        """Of a session of that worker. The payload must be a block of `allocate`, or empty."""
        return self._pool.step(StepTask(**vars(self._task(None, "", header, payload, False)), session=session), worker)

    def has(self, worker: WorkerProcess) -> bool:
        """Whether it has not ended."""
        return self._pool.crew.has(worker)

    def _run(
        self, crossing: Crossing | None, suffix: str, header: bytes, payload: memoryview, want_metrics: bool
    ) -> Computed:
        return self._pool.run(self._task(crossing, suffix, header, payload, want_metrics))

    def _task(
        self, crossing: Crossing | None, suffix: str, header: bytes, payload: memoryview, want_metrics: bool
    ) -> Task:
        """For the request that this thread works for."""
        model_id, about = self.identity.model_id, self._lifecycle.current or About(0, -1)
        observers = getattr(self._thread, "observers", ())
        account, allowed = payer.get().account, inexact.get()
        return Task(model_id, about, account, crossing, suffix, header, payload, want_metrics, observers, allowed)

    @contextmanager
    def observing(self, observers: tuple[str, ...]) -> Iterator[Callable[[], bytes]]:
        """The worker observes; what it found is in the reply already."""
        self._thread.observers = observers
        try:
            yield bytes
        finally:
            self._thread.observers = ()

    profile_gives_way = False
    """Its worker waits meanwhile; others compute."""

    def profile(
        self, warmup: int, repetitions: int, seconds: float, on_progress: Progress, codecs: Sequence[str] = ()
    ) -> dict[str, Any]:
        """In a worker, whose turn it takes."""
        task = ProfileTask(self.identity.model_id, warmup, repetitions, seconds, tuple(codecs))
        found: dict[str, Any] = json.loads(self._pool.ask(task, on_progress))
        return found


class PooledSession:
    """A decoding session in one worker: an `EngineSession`."""

    def __init__(self, model: PooledModel, worker: WorkerProcess, number: int) -> None:
        self._model = model
        self._worker = worker
        self._number = number
        worker.sessions += 1

    @property
    def lost(self) -> str:
        """It ends with its worker."""
        return "" if self._model.has(self._worker) else f"its worker process {self._worker.end}"

    def step(self, header: bytes, payload: memoryview) -> Computed:
        """Raises what the worker raises, SessionLost when that has ended, and ServerUnavailable when it is not free."""
        return self._model.step(self._number, self._worker, header, payload)

    def fork(self) -> EngineSession:
        """In the same worker."""
        return self._model.begin_copy(self._number, self._worker)

    def close(self) -> None:
        """The worker hears of it with the next that it is asked."""
        self._worker.sessions -= 1
        self._worker.closed.append(self._number)
