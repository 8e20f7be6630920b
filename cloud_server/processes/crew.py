"""The worker processes: started and warm before they take work, watched, replaced."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from cloud_server.limits import Limits
from cloud_server.models import Identity
from cloud_server.processes.channel import Lost, SharedMemory
from cloud_server.processes.worker_process import ALL, END_SECONDS, WorkerProcess, WorkerShare, WorkerState
from shared_hooks.errors import Disagreement, IsthmusError, ServerUnavailable, WorkerLost

log = logging.getLogger("cloud_server")

STOPPED_SECONDS = 3.0
"""How long a worker may be stopped (SIGSTOP) before it counts as lost."""
WAIT_SECONDS = 30.0
"""How long a request waits for a warm worker."""
LOOK_SECONDS = 1.0
"""The interval of checks on silent workers."""
YOUNG_SECONDS = 10.0
"""A worker that ends sooner without an answer counts as one that cannot serve."""
BACK_OFF = 0.25, 30.0
"""Seconds before the next start after such a failure: initially, at most."""


class Crew:
    """``count`` workers. One thread starts and watches them; the methods are thread-safe."""

    def __init__(
        self, words: Sequence[str], count: int, limits: Limits, memory: SharedMemory, share: WorkerShare = ALL
    ) -> None:
        self.identities: list[Identity] = []
        """What each worker serves."""
        self.deaths = 0
        """The number of workers that ended unexpectedly."""
        self.on_warm: Callable[[bool], None] = lambda warm: None
        """Called with whether any worker is warm, when that changes."""
        self._words = tuple(words)
        self._share = share
        self._count = count
        self._limits = limits
        self._memory = memory
        self._changed = threading.Condition()
        self._workers: list[WorkerProcess] = []  # changed only by the watching thread
        self._idle: list[WorkerProcess] = []  # the most recently used is taken first: its caches are warm
        self._number = 0
        self._failures = 0
        """The number of consecutive workers that could not serve."""
        self._start_at = 0.0
        self._refused: IsthmusError | None = None
        self._stopped_since: dict[int, float] = {}
        self._was_warm = False
        self._closed = False
        self._wake_end, self._wake = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="isthmus-crew", daemon=True)

    def start(self) -> list[Identity]:
        """Start the workers and wait until all are warm; returns what they serve. Raises the error of a
        worker's start.
        """
        self._watcher.start()
        with self._changed:
            self._changed.wait_for(lambda: self._refused or self._failures or len(self._idle) == self._count)
            if self._refused is None and self._failures:
                self._refused = WorkerLost("a worker ended while it loaded the models; see the log")
            if self._refused is not None:
                raise self._refused
            return self.identities

    @property
    def warm(self) -> int:
        """The number of workers that have loaded their models."""
        with self._changed:
            return sum(one.is_warm for one in self._workers)

    @property
    def pids(self) -> list[int]:
        """The process ids of the warm workers."""
        with self._changed:
            return [one.pid for one in self._workers if one.is_warm]

    def take(self, wanted: WorkerProcess | None = None) -> WorkerProcess:
        """Take an idle worker, to be returned by `release`; if ``wanted`` is given, this one.

        Raises ServerUnavailable, and Lost if the wanted one has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._there(wanted), WAIT_SECONDS)
            if wanted is not None and wanted not in self._workers:
                raise Lost(wanted.end)
            if self._closed or not self._idle or (wanted is not None and wanted not in self._idle):
                what = "no worker was warm" if wanted is None else f"{wanted} was not free"
                raise ServerUnavailable(f"{what} within {WAIT_SECONDS:g} s; new ones are being started")
            worker = self._idle[-1] if wanted is None else wanted
            self._idle.remove(worker)
            worker.state = WorkerState.BUSY
            return worker

    def _there(self, wanted: WorkerProcess | None) -> bool:
        """Return whether a worker can be taken, or waiting is pointless. The caller holds the lock."""
        return bool(self._idle) if wanted is None else wanted in self._idle or wanted not in self._workers

    def has(self, worker: WorkerProcess) -> bool:
        """Return whether the worker has not ended."""
        with self._changed:
            return worker in self._workers

    def roomiest(self) -> WorkerProcess:
        """Return the warm worker with the fewest decoding sessions. Raises ServerUnavailable."""
        with self._changed:
            warm = [one for one in self._workers if one.is_warm and not one.leaving]
            if not warm:
                raise ServerUnavailable("no worker is warm; new ones are being started")
            return min(warm, key=lambda one: one.sessions)

    def release(self, worker: WorkerProcess) -> None:
        """Give back a worker."""
        with self._changed:
            if worker.spent and not worker.why_ended:
                worker.kill("could use its device no more, and was ended")
            if worker.why_ended or self._closed:
                worker.state = WorkerState.ENDED
            elif self._is_replaced(worker):
                worker.dismiss()
            else:
                worker.state = WorkerState.IDLE
                self._failures = 0
                self._idle.append(worker)
            self._changed.notify_all()
            closed = self._closed
        if closed:
            worker.close()
        elif worker.state is WorkerState.ENDED:
            self._look_now()

    def lost(self, worker: WorkerProcess, why: str) -> None:
        """End a worker that was lost. When this returns, it no longer writes to shared memory."""
        if not worker.buried(0.5):
            worker.kill(why)
            while not worker.buried(1.0):
                log.warning("%s does not end", worker)
        worker.why_ended = worker.end

    # Watching

    def _watch(self) -> None:
        while not self._closed:
            try:
                self._sleep(self._look_round())
            except Exception as error:  # without this thread no worker would ever be replaced
                log.exception("the workers could not be looked after")
                with self._changed:
                    if not self.identities:
                        self._refused = WorkerLost(f"no worker could be started: {type(error).__name__}: {error}")
                    self._changed.notify_all()
                time.sleep(LOOK_SECONDS)

    def _look_round(self) -> float:
        """Look at every worker, and start missing ones; returns the seconds until the next time."""
        for worker in list(self._workers):
            self._look_at(worker)
        with self._changed:
            for worker in [one for one in self._idle if self._is_replaced(one)]:
                self._idle.remove(worker)
                worker.dismiss()
            for worker in self._idle:
                worker.forget()
        wait = self._start_missing()
        self._report_warm()
        return wait

    def _sleep(self, seconds: float) -> None:
        """Wait for an event."""
        poller = select.poll()
        poller.register(self._wake_end, select.POLLIN)
        for worker in self._workers:
            if worker.state is WorkerState.STARTING:
                poller.register(worker.channel, select.POLLIN)
            if worker.pidfd >= 0 and not worker.gone:
                poller.register(worker.pidfd, select.POLLIN)
        if any(fd == self._wake_end for fd, _ in poller.poll(seconds * 1000)):
            os.read(self._wake_end, 4096)

    def _look_now(self) -> None:
        with self._changed:
            if not self._closed:
                os.write(self._wake, b"!")

    def _look_at(self, worker: WorkerProcess) -> None:
        if worker.state is WorkerState.STARTING and worker.has_news:
            self._welcome(worker)
        if worker.gone:
            with self._changed:
                if worker.state is WorkerState.BUSY:
                    return  # the next request notices at once, and releases it
                if worker in self._idle:
                    self._idle.remove(worker)
                self._workers.remove(worker)
            self._bury(worker)
        elif worker.is_stopped:
            since = self._stopped_since.setdefault(worker.pid, time.monotonic())
            if time.monotonic() - since > STOPPED_SECONDS:
                worker.kill(f"was stopped for {STOPPED_SECONDS:g} s, and was ended")
        else:
            self._stopped_since.pop(worker.pid, None)
            self._check_size(worker)

    def _check_size(self, worker: WorkerProcess) -> None:
        """Replace a worker that has grown too large, or has answered enough; its successor is warm first."""
        limits = self._limits
        own = worker.own_bytes
        why = ""
        if own > limits.max_worker_bytes:
            why = f"{own >> 20} MiB of its own are more than max_worker_bytes ({limits.max_worker_bytes >> 20} MiB)"
        elif worker.answered >= limits.max_worker_requests:
            why = f"it has answered {worker.answered} requests (max_worker_requests)"
        if why and not worker.leaving:
            log.info("%s is replaced: %s", worker, why)
            worker.leaving = True

    def _is_replaced(self, worker: WorkerProcess) -> bool:
        """Return whether enough other workers are warm. The caller holds the lock."""
        return worker.leaving and sum(one.is_warm and not one.leaving for one in self._workers) >= self._count

    def _welcome(self, worker: WorkerProcess) -> None:
        """Process a worker's first message: that it is warm, or why it cannot start."""
        try:
            identities = worker.identities()
            if self.identities and not _same_models(identities, self.identities):
                text = "it serves other models than those announced: files have changed, tell the server (SIGHUP)"
                raise Disagreement(text)
        except (Lost, TimeoutError):
            if not worker.buried(1.0):  # otherwise it has ended by itself, and its status has the reason
                worker.kill("sent a malformed message, and was ended")
            return
        except IsthmusError as error:
            log.critical("%s cannot start: %s: %s", worker, type(error).__name__, error)
            worker.kill("cannot start, and was ended")
            self._refused = self._refused or error
            return
        with self._changed:
            self.identities = self.identities or identities
            worker.state = WorkerState.IDLE
            worker.warm_at = time.monotonic()
            self._idle.append(worker)
            self._changed.notify_all()
        log.info("%s is warm after %.1f s", worker, worker.warm_at - worker.began)

    def _bury(self, worker: WorkerProcess) -> None:
        """Record the end of a worker, and when another one starts."""
        worker.buried(0)
        worker.close()
        self._stopped_since.pop(worker.pid, None)
        if worker.leaving:
            log.info("%s is gone", worker)
            return
        lived = time.monotonic() - worker.warm_at if worker.warm_at else 0.0
        with self._changed:
            self.deaths += 1
            self._failures += worker.answered == 0 and lived < YOUNG_SECONDS
            first, longest = BACK_OFF
            delay = min(longest, first * 2 ** min(self._failures - 1, 10)) if self._failures else 0.0
            self._start_at = time.monotonic() + delay
            self._changed.notify_all()
        when = f" in {delay:g} s" if delay else ""
        log.error("%s %s after %d answers; another one is started%s", worker, worker.end, worker.answered, when)

    def _start_missing(self) -> float:
        """Start missing workers; returns the seconds until the next check."""
        while not self._closed:
            living = sum(not one.leaving and one.state is not WorkerState.ENDED for one in self._workers)
            wait = self._start_at - time.monotonic()
            if living >= self._count:
                break
            if wait > 0:
                return min(wait, LOOK_SECONDS)
            self._number += 1
            try:
                worker = WorkerProcess(self._number, self._words, self._memory, self._share)
            except (OSError, ServerUnavailable) as error:  # no process could be started, or no shared memory is left
                log.error("no worker can be started: %s", error)
                self._start_at = time.monotonic() + BACK_OFF[1]
                break
            with self._changed:
                self._workers.append(worker)
        return LOOK_SECONDS

    def _report_warm(self) -> None:
        warm = self.warm > 0
        if warm != self._was_warm:
            self._was_warm = warm
            if not warm:
                log.error("no worker is warm: nothing is computed until one is")
            self.on_warm(warm)

    def close(self) -> None:
        """End all workers, with what they compute."""
        with self._changed:
            if self._closed:
                return
            os.write(self._wake, b"!")
            self._closed = True
            self._changed.notify_all()
        if self._watcher.ident is not None:
            self._watcher.join()
        for worker in self._workers:
            worker.channel.hang_up()
        until = time.monotonic() + END_SECONDS
        for worker in self._workers:
            if not worker.buried(max(0.0, until - time.monotonic())):
                worker.kill("was ended with the server")
                worker.buried(END_SECONDS)
            with self._changed:
                busy = worker.state is WorkerState.BUSY
            if not busy:  # otherwise the next request closes it
                worker.close()
        os.close(self._wake_end)
        os.close(self._wake)


def _same_models(mine: Sequence[Identity], theirs: Sequence[Identity]) -> bool:
    """Return whether two workers serve the same models."""
    return len(mine) == len(theirs) and all(one.is_like(other) for one, other in zip(mine, theirs, strict=True))
