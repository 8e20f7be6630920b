"""The worker processes: started, warm before they take work, watched, replaced; requests run in whichever is idle.

A request whose worker ends under it runs once more in another. If the tail had begun to write to its payload, that one
finds a wrong checksum; then the client is asked to send it again. Two deaths are enough: it fails with `WorkerLost`.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from cloud_server.limits import Limits
from cloud_server.models import Computed, Identity, Progress
from cloud_server.processes.channel import Lost
from cloud_server.processes.memory import SharedMemory
from cloud_server.processes.task import ProfileTask, Task
from cloud_server.processes.worker_process import END_SECONDS, State, WorkerProcess
from shared_hooks.errors import BadFrame, Disagreement, IsthmusError, ServerUnavailable, TooLarge, WorkerLost

log = logging.getLogger("cloud_server")

DEATHS = 2
"""Workers that may end under one request."""
HANG_SECONDS = 10.0
"""Beyond `Limits.max_compute_seconds`, after which the worker ends Python code itself: what goes on is a kernel."""
STOPPED_SECONDS = 3.0
"""How long a worker may be stopped (SIGSTOP) until it counts as lost."""
WAIT_SECONDS = 30.0
"""How long a request waits for a warm worker."""
LOOK_SECONDS = 1.0
"""Between two looks at workers of which nothing is heard."""
YOUNG_SECONDS = 10.0
"""A worker that ends earlier without an answer counts as one that cannot serve."""
BACK_OFF = 0.25, 30.0
"""Seconds before the next is started after such a one: first, longest."""
REMEMBERED = 4096
"""Requests that a worker has ended under, and that may come again."""


class _Ended(Exception):
    """A worker ended; the text says how."""


class Pool:
    """``count`` workers for the command line ``words``. Use as a context manager. Any thread may call."""

    def __init__(self, words: Sequence[str], count: int, limits: Limits) -> None:
        self._words = tuple(words)
        self._count = count
        self._limits = limits
        # Sparse, so it may be generous: room that is free is in pieces, too.
        self.memory = SharedMemory(2 * (limits.max_pending_bytes + limits.max_answer_bytes))
        self.identities: list[Identity] = []
        self.deaths = 0
        """Workers that have ended without being told to."""
        self.on_warm: Callable[[bool], None] = _nothing
        """Called with whether any worker is warm, when that changes."""
        self._changed = threading.Condition()
        self._workers: list[WorkerProcess] = []
        self._idle: list[WorkerProcess] = []  # the last used first: its caches are warm
        self._number = 0
        self._failures = 0
        """Workers in a row that ended before they had answered anything."""
        self._start_at = 0.0
        self._refused: IsthmusError | None = None
        self._struck: OrderedDict[tuple[str, str, int], int] = OrderedDict()
        self._stopped_since: dict[int, float] = {}
        self._warm = False
        self._closed = False
        self._wake_end, self._wake = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="isthmus-pool", daemon=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> list[Identity]:
        """Waits until all workers are warm; what they serve. Raises what a worker's start failed by."""
        self._watcher.start()
        with self._changed:
            self._changed.wait_for(lambda: self._refused or self._failures or len(self._idle) == self._count)
            if self._refused is None and self._failures:
                self._refused = WorkerLost("a worker ended while it loaded the models; the log says how")
            if self._refused is not None:
                raise self._refused
            return self.identities

    @property
    def warm(self) -> int:
        """Workers that have their models loaded."""
        with self._changed:
            return sum(one.state in (State.IDLE, State.BUSY) for one in self._workers)

    # Work

    def run(self, task: Task) -> Computed:
        """Runs a request in a worker. Raises what the model raises there, WorkerLost, TooLarge, ServerUnavailable."""
        before = deaths = self._struck.pop(task.key, 0)
        seconds = self._limits.max_compute_seconds + HANG_SECONDS
        while True:
            try:
                with self._taken(seconds) as worker:
                    return worker.run(task, seconds)
            except _Ended as ended:
                deaths += 1
                if deaths >= DEATHS:
                    raise WorkerLost(f"{deaths} workers ended under this request; the last one {ended}") from None
            except BadFrame as error:
                if deaths == before:
                    raise
                self._remember(task.key, deaths)
                text = "a worker ended under this request after it had begun to write to what came; send it again"
                raise ServerUnavailable(text) from error

    def profile(self, task: ProfileTask, on_progress: Progress) -> bytes:
        """A profile by a worker, as JSON. Raises as `run`; it is not run again."""
        seconds = self._limits.max_compute_seconds + HANG_SECONDS
        try:
            with self._taken(seconds) as worker:
                return worker.profile(task, seconds, on_progress)
        except _Ended as ended:
            raise WorkerLost(f"the worker that measured {ended}") from None

    @contextmanager
    def _taken(self, seconds: float) -> Iterator[WorkerProcess]:
        """An idle worker for the block. Raises _Ended when it ends in it, and TooLarge when it does not come back."""
        worker = self._take()
        try:
            yield worker
        except Lost as lost:
            self._lost(worker, str(lost))
            raise _Ended(worker.end) from None
        except TimeoutError:
            self._lost(worker, f"it did not come back within {seconds:g} s")
            raise TooLarge(f"the model computed for more than {seconds:g} s without coming back to Python") from None
        finally:
            self._release(worker)

    def _take(self) -> WorkerProcess:
        with self._changed:
            if not self._changed.wait_for(lambda: self._idle or self._closed, WAIT_SECONDS) or self._closed:
                raise ServerUnavailable(f"no worker was warm within {WAIT_SECONDS:g} s; new ones are being started")
            worker = self._idle.pop()
            worker.state = State.BUSY
            return worker

    def _release(self, worker: WorkerProcess) -> None:
        with self._changed:
            if worker.why_ended:
                worker.state = State.ENDED
            elif worker.spent:
                worker.state = State.ENDED
                worker.kill("was ended by the server: it can use its device no more")
            else:
                worker.state = State.IDLE
                self._failures = 0
                self._idle.append(worker)
            self._changed.notify_all()
        if worker.state is State.ENDED or worker.leaving:
            self._look_now()

    def _lost(self, worker: WorkerProcess, says: str) -> None:
        """A worker is gone, or astray. Nothing of it writes to shared memory any more when this returns."""
        if not worker.buried(0.5):
            worker.kill(f"was ended by the server: {says}")
            while not worker.buried(1.0):
                log.warning("%s does not end", worker)
        worker.why_ended = worker.end

    def _remember(self, key: tuple[str, str, int], deaths: int) -> None:
        with self._changed:
            self._struck[key] = deaths
            while len(self._struck) > REMEMBERED:
                self._struck.popitem(last=False)

    # The workers

    def _watch(self) -> None:
        """One thread starts them (they would end with it) and sees them end."""
        while True:
            with self._changed:
                if self._closed:
                    return
                workers = list(self._workers)
            for worker in workers:
                self._look_at(worker)
            self._dismiss_replaced()
            wait = self._start_missing()
            self._tell()
            poller = select.poll()
            poller.register(self._wake_end, select.POLLIN)
            for worker in self._workers:
                if worker.state is State.STARTING:
                    poller.register(worker.channel, select.POLLIN)
                if worker.pidfd >= 0 and not worker.gone:
                    poller.register(worker.pidfd, select.POLLIN)
            ready = poller.poll(wait * 1000)
            if any(fd == self._wake_end for fd, _ in ready):
                os.read(self._wake_end, 4096)

    def _look_now(self) -> None:
        try:
            os.write(self._wake, b"!")
        except OSError:
            pass  # it is full, or closed

    def _look_at(self, worker: WorkerProcess) -> None:
        if worker.state is State.STARTING and worker.has_news:
            self._welcome(worker)
        if worker.gone:
            with self._changed:
                if worker.state is State.BUSY:
                    return  # who asks it finds out at once, and lets go of it
                if worker in self._idle:
                    self._idle.remove(worker)
                self._workers.remove(worker)
            self._bury(worker)
        elif worker.is_stopped:
            since = self._stopped_since.setdefault(worker.pid, time.monotonic())
            if time.monotonic() - since > STOPPED_SECONDS:
                worker.kill(f"was ended by the server: it was stopped for {STOPPED_SECONDS:g} s")
        else:
            self._stopped_since.pop(worker.pid, None)
            own = worker.own_bytes
            if own > self._limits.max_worker_bytes:
                self._retire(worker, f"it has {own >> 20} MiB of its own (max_worker_bytes)")
            if worker.answered >= self._limits.max_worker_requests:
                self._retire(worker, f"it has answered {worker.answered} requests (max_worker_requests)")

    def _welcome(self, worker: WorkerProcess) -> None:
        """A worker says that it is warm, or why it cannot start."""
        try:
            identities = worker.identities()
            if self.identities and [_same(one) for one in identities] != [_same(one) for one in self.identities]:
                raise Disagreement(f"{worker} serves other models than were announced: files have changed; start again")
        except Lost:
            return
        except IsthmusError as error:
            log.critical("%s cannot start: %s: %s", worker, type(error).__name__, error)
            worker.kill(f"refused: {error}")
            self._refused = self._refused or error
            return
        with self._changed:
            self.identities = self.identities or identities
            worker.state = State.IDLE
            worker.warm_at = time.monotonic()
            self._idle.append(worker)
            self._changed.notify_all()
        log.info("%s is warm after %.1f s", worker, worker.warm_at - worker.began)

    def _bury(self, worker: WorkerProcess) -> None:
        """It is gone: said, counted, and when another one starts."""
        worker.buried(0)
        worker.close()
        self._stopped_since.pop(worker.pid, None)
        lived = time.monotonic() - worker.warm_at if worker.warm_at else 0.0
        with self._changed:
            if worker.answered == 0 and lived < YOUNG_SECONDS and not worker.leaving:
                self._failures += 1
            self._changed.notify_all()
        if worker.leaving:
            log.info("%s is gone", worker)
            return
        self.deaths += 1
        first, longest = BACK_OFF
        delay = min(longest, first * 2 ** (self._failures - 1)) if self._failures else 0.0
        self._start_at = time.monotonic() + delay
        log.error(
            "%s %s after %d requests; another one is started%s",
            worker, worker.end, worker.answered, f" in {delay:g} s" if delay else "",
        )  # fmt: skip

    def _start_missing(self) -> float:
        """Starts what is missing; seconds until it must be looked at again."""
        while True:
            with self._changed:
                living = sum(not one.leaving and one.state is not State.ENDED for one in self._workers)
                if living >= self._count or self._closed:
                    return LOOK_SECONDS
                wait = self._start_at - time.monotonic()
                if wait > 0:
                    return min(wait, LOOK_SECONDS)
                self._number += 1
            try:
                worker = WorkerProcess(self._number, self._words, self.memory)
            except OSError as error:
                log.error("no worker can be started: %s", error)
                self._start_at = time.monotonic() + BACK_OFF[1]
                continue
            with self._changed:
                self._workers.append(worker)

    def _retire(self, worker: WorkerProcess, why: str) -> None:
        """Another takes its place, and is warm before."""
        if not worker.leaving:
            log.info("%s is replaced: %s", worker, why)
            worker.leaving = True

    def _dismiss_replaced(self) -> None:
        with self._changed:
            warm = [one for one in self._workers if one.state in (State.IDLE, State.BUSY)]
            if sum(not one.leaving for one in warm) < self._count:
                return
            for worker in [one for one in self._idle if one.leaving]:
                self._idle.remove(worker)
                worker.state = State.ENDED
                worker.channel.hang_up()

    def _tell(self) -> None:
        warm = self.warm > 0
        if warm != self._warm:
            self._warm = warm
            if not warm:
                log.error("no worker is warm: nothing is computed until one is")
            self.on_warm(warm)

    def close(self) -> None:
        """Ends all workers; what they still compute is lost."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._look_now()
        if self._watcher.ident is not None:
            self._watcher.join()
        for worker in self._workers:
            worker.channel.hang_up()
        until = time.monotonic() + END_SECONDS
        for worker in self._workers:
            if not worker.buried(max(0.0, until - time.monotonic())):
                worker.kill("ended with the server")
                worker.buried(END_SECONDS)
            if worker.state is not State.BUSY:
                worker.close()
        os.close(self._wake_end)
        os.close(self._wake)
        self.memory.close()


def _same(identity: Identity) -> Identity:
    """What all workers must have alike."""
    return replace(identity, about={}, machine={})


def _nothing(_: bool) -> None:
    pass
