"""Decides which tasks the workers compute next, which of them share a batch, and whether there is time for them.

A task that exceeds its time is interrupted as soon as it returns to Python: what a tail does after it has read a value
from its data cannot be foreseen, and an input may make a model loop. One thread (`Watchdog`) watches all running tasks
and raises `Overtime` in a thread whose time is over, repeatedly until that thread has left the model.

Freed memory is kept for the next request, within bounds; the rest is returned to the system. By default glibc either
requests memory from the system for each large message and returns it (3.2 MB in messages of 1 MiB took 1.7 times as
long because of page faults, docs/decisions/0019-the-pipe.md), or keeps all of it, in as many heaps as there are
threads. A full server (`python -m studies.siege.memory`) took 1.29 times its limits, and with two heaps 1.17 times.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from cloud_server.scheduling.fair_queue import FairQueue, Forecast, Payer, Task
from shared_hooks.errors import ServerUnavailable
from shared_hooks.forward import bounded

log = logging.getLogger(__name__)

STEP_BYTES = 32 << 20
"""The decrease of held bytes that triggers a trim. A trim takes milliseconds, and trimmed memory is paged in again, so
steady traffic must not cause any.
"""


HEAPS = 2
LARGEST_BYTES = 32 << 20
"""The largest block that is kept: glibc's maximum for blocks on a heap."""
KEPT_BYTES = 64 << 20
"""Free bytes kept at the end of a heap; `Trim` releases them once much less is held."""
_OPTIONS = {  # glibc's malloc.h
    "MALLOC_ARENA_MAX": (-8, HEAPS),
    "MALLOC_MMAP_THRESHOLD_": (-3, LARGEST_BYTES),
    "MALLOC_TRIM_THRESHOLD_": (-1, KEPT_BYTES),
}


def few_heaps() -> None:
    """Make glibc use few heaps, which keep freed memory. Call it before threads start; glibc's environment variables
    win.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        for name, (option, value) in _OPTIONS.items():
            if name not in os.environ:
                set_option(option, value)


class Trim:
    """Returns freed memory to the system. Used by one thread; does nothing without glibc."""

    def __init__(self) -> None:
        self._most = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

    def look(self, held: int) -> bool:
        """Trim if much less is held than before. ``held``: bytes in use now. Returns whether memory was returned."""
        self._most = max(self._most, held)
        if self._trim is None or self._most - held < STEP_BYTES:
            return False
        self._most = held
        self._trim(0)
        return True


AGAIN_SECONDS = 1.0
ARRIVES_WITHIN = 100
"""Iterations of an empty loop within which Python delivers an exception raised from another thread."""


class Overtime(BaseException):
    """Raised in a thread whose time is over. No Exception, so that a model cannot catch it."""


class Watchdog:
    """Interrupts threads whose time is over. Thread-safe."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._until: dict[int, float] = {}
        self._raised: set[int] = set()
        self._changed = threading.Event()
        self._looks_at = math.inf
        """When the thread next looks, at the latest."""
        self._closed = False
        threading.Thread(target=self._look, name="isthmus-overtime", daemon=True).start()

    def limited(self, seconds: float = math.inf) -> AbstractContextManager[None]:
        """Limit the block in this thread to ``seconds``, or to the configured time if that is shorter.

        `Overtime` is raised only in the model's code, where the engine allows it (`shared_hooks.forward.foresight`),
        never after it.
        """
        return bounded(_Time(self, min(seconds, self._seconds)))

    @contextmanager
    def until(self, end: float) -> Iterator[None]:
        """Allow `Overtime` in the block from ``end`` (monotonic clock) on, and never after the block."""
        thread = threading.get_ident()
        before = self._until.get(thread)
        try:
            self._set(thread, end)
            yield
        finally:
            while True:  # the exception may arrive as the call begins
                try:
                    self._leave(thread, before)
                    break
                except Overtime:
                    continue

    @contextmanager
    def put_off(self) -> Iterator[Callable[[], float]]:
        """Suspend the limit in the block, and extend it by the time that the block takes.

        Yields a function that returns this time, in seconds, after the block.
        """
        thread, began, taken = threading.get_ident(), time.monotonic(), 0.0
        before = self._until.get(thread)
        try:
            self._set(thread, math.inf)
            yield lambda: taken
        finally:
            taken = time.monotonic() - began
            self._leave(thread, None if before is None else before + taken)

    def _set(self, thread: int, end: float) -> None:
        with self._lock:
            self._until[thread] = end
            sooner = end < self._looks_at
        if sooner:  # otherwise its thread looks soon enough
            self._changed.set()

    def _leave(self, thread: int, before: float | None) -> None:
        """Stop watching this thread, or restore ``before``, the end of the enclosing block."""
        while True:
            try:
                with self._lock:
                    self._until.pop(thread, None)
                if thread in self._raised:
                    # An exception still pending is delivered here. Withdrawing it (SetAsyncExc with NULL) would make
                    # CPython 3.11 check for it at every call and loop, and under a profiler forever.
                    for _ in range(ARRIVES_WITHIN):
                        pass
                    self._raised.discard(thread)
                break
            except Overtime:
                continue
        if before is not None:
            self._set(thread, before)

    def _look(self) -> None:
        while not self._closed:
            with self._lock:
                now = time.monotonic()
                for thread, until in self._until.items():
                    if until <= now:
                        self._raised.add(thread)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Overtime))
                        self._until[thread] = now + AGAIN_SECONDS
                waiting = self._looks_at = min(self._until.values(), default=math.inf)
                self._changed.clear()
            self._changed.wait(None if waiting == math.inf else max(waiting - now, 0.01))

    def close(self) -> None:
        """Stop the thread."""
        self._closed = True
        self._changed.set()


class _Time:
    """The time limit of one request; a `shared_hooks.forward.foresight.Limit`."""

    def __init__(self, watchdog: Watchdog, seconds: float) -> None:
        self._watchdog = watchdog
        self._seconds = seconds
        self._end: float | None = None
        """Counted from the model's first call, so that other requests' turns do not count."""

    def interruptible(self, seconds: float) -> AbstractContextManager[None]:
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        return self._watchdog.until(min(self._end, now + seconds))

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        with self._watchdog.put_off() as seconds:
            yield
        if self._end is not None:
            self._end += seconds()


ISOLATED_SECONDS = 60.0
"""How long the tasks of a client that made a batch fail are computed alone."""
MAX_ISOLATED = 4096
AT_ONCE_SECONDS = 0.05
"""How long an idle worker waits for the remaining steps that a client sends at once."""


@dataclass(frozen=True)
class BatchLimits:
    """Bounds of a batch: ``rows``, and ``nbytes`` of memory while it is computed.

    With enough waiting tasks a batch has the largest of the ``preferred`` numbers of rows that they fill. Otherwise a
    worker waits up to ``delay`` seconds for more, unless another task waits or the batch already has a preferred size.
    """

    rows: int = 1
    nbytes: float = math.inf
    delay: float = 0.0
    preferred: Sequence[int] = ()


class TaskResult(NamedTuple):
    """The outcome of a task. ``counts``: its duration predicts that of the next one. ``own``: the seconds of a batch
    that were spent on this task alone.
    """

    counts: bool
    own: float = 0.0


class Scheduler:
    """Hands tasks to workers: any thread adds tasks; each of ``workers`` takes a batch, computes it and calls `finish`.

    The queue is unbounded here: the core admits at most `Limits.max_pending` requests, and few profiles.
    """

    def __init__(self, workers: int = 1, limits: BatchLimits | None = None) -> None:
        self.waits = QueueClocks()
        self._limits = limits or BatchLimits()
        self._preferred = sorted(self._limits.preferred)
        self._queue = FairQueue(workers)
        self._split: deque[list[Task]] = deque()
        """Batches that were split off for a deadline, in order; they are next."""
        self._isolated: OrderedDict[tuple[str, ...], float] = OrderedDict()
        """(account, client) or (account,) of tasks that are computed alone, and until when."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopped = False

    def __len__(self) -> int:
        """Return the number of waiting tasks."""
        return len(self._queue)

    def add(self, task: Task) -> Callable[[], None]:
        """Append the task to its client's tasks. Returns a function that removes it, unless a worker has taken it."""
        with self._lock:
            if task.batch_key is not None and self._is_isolated(task.payer):
                task.batch_key = None
            self._queue.put(task)
            self._changed.notify()
        return partial(self._remove, task)

    def next_batch(self, before: Payer | None = None) -> list[Task]:
        """Return the tasks to compute together next. Blocks until there is one; empty once stopped.

        ``before``: the payer of the task that the calling worker is in the middle of. Then it does not block, and
        returns only tasks that take precedence over that one.
        """
        with self._lock:
            if before is not None:
                return self._in_time(self._batch()) if self._split or self._queue.ahead(before) else []
            self._changed.wait_for(lambda: self._queue or self._split or self._stopped)
            tasks = self._batch()
            if tasks and tasks[0].batch_key is not None:
                self._wait_for_more(tasks)
            return self._in_time(tasks)

    def finish(self, tasks: Sequence[Task], results: Sequence[TaskResult], seconds: float) -> None:
        """Record that a batch took ``seconds``. Each task is charged its own time, and the rest by its rows."""
        with self._lock:
            each = max(0.0, seconds - sum(result.own for result in results)) / _rows(tasks)
            for task, result in zip(tasks, results, strict=True):
                self._queue.done(task, result.own + each * task.rows, result.counts)

    def charge(self, payer: Payer, seconds: float) -> None:
        """Charge a payer for the ``seconds`` that its running task took since the last charge."""
        with self._lock:
            self._queue.charge(payer, seconds)

    def refused(self, payer: Payer) -> None:
        """Charge a payer for a task that was refused for lack of room or time."""
        with self._lock:
            self._queue.turned_away(payer)

    def forecast(self, payer: Payer) -> Forecast:
        """Return the expected wait and duration of a task that is added now."""
        with self._lock:
            return self._queue.forecast(payer)

    def takes(self, payer: Payer) -> float:
        """Return the expected duration in seconds of a task of this payer; 0 if it has had too few."""
        with self._lock:
            return self._queue.takes(payer)

    def check_time(self, payer: Payer, seconds_left: float) -> None:
        """Raise ServerUnavailable for a task that would miss its deadline, so that no work is done in vain."""
        forecast = self.forecast(payer)
        late = forecast.late(seconds_left)
        if late > 0:
            error = ServerUnavailable(
                f"the server has more to do than it can: a request of {payer.account} would wait about "
                f"{forecast.wait:.2f} s for a worker, and this one's time is over in {seconds_left:.2f} s; "
                f"try again in {late:.2f} s"
            )
            error.retry_after_seconds = late
            raise error

    def isolate(self, payers: Iterable[Payer]) -> None:
        """Exclude these payers from batches for a while, because their tasks made a batch fail.

        If a second client of an account fails, all clients of that account are excluded: client ids are free to invent.
        """
        now = time.monotonic()
        with self._lock:
            for payer in payers:
                client = payer.account, payer.client
                others = [key for key, until in self._isolated.items() if key[0] == payer.account and until > now]
                for key in (client, *([client[:1]] if others and others != [client] else [])):
                    self._isolated[key] = now + ISOLATED_SECONDS
                    self._isolated.move_to_end(key)
            while len(self._isolated) > MAX_ISOLATED:
                self._isolated.popitem(last=False)

    def stop(self) -> None:
        """Let `next_batch` return what still waits, and then nothing."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()

    def _is_isolated(self, payer: Payer) -> bool:
        now = time.monotonic()
        return any(self._isolated.get(key, now) > now for key in ((payer.account, payer.client), (payer.account,)))

    def _remove(self, task: Task) -> None:
        with self._lock:
            self._queue.remove(task)

    def _batch(self) -> list[Task]:
        """Return the next task and those that share its batch; empty if none waits. The caller holds the lock."""
        if self._split:
            return self._split.popleft()
        task = self._queue.take()
        if task is None or task.batch_key is None:
            return [] if task is None else [task]
        keys = {task.batch_key}
        if task.compatible_keys is not None:
            keys.update(task.compatible_keys(task.batch_key, partial(self._rows_of, task), self._limits.rows))
        there = task.rows + sum(map(self._queue.waiting, keys))
        rows = max((size for size in self._preferred if task.rows < size <= there), default=self._limits.rows)
        return [task, *self._queue.take_batchable(keys, rows - task.rows, self._limits.nbytes - task.nbytes)]

    def _rows_of(self, taken: Task, batch_key: Hashable) -> int:
        """Return the rows with this key that wait, or belong to the task just taken."""
        return self._queue.waiting(batch_key) + (taken.rows if taken.batch_key == batch_key else 0)

    def _wait_for_more(self, tasks: list[Task]) -> None:
        """Wait until the batch is full, for at most `BatchLimits.delay`.

        For tasks that a client sends at once it waits at least a moment, as long as the batch holds one account's tasks
        only.
        """
        began = time.monotonic()
        while (rows := _rows(tasks)) < self._limits.rows and rows not in self._preferred:
            alone = len({task.payer.account for task in tasks}) == 1
            moment = AT_ONCE_SECONDS if alone and rows < max(task.wanted_rows for task in tasks) else 0.0
            left = began + max(self._limits.delay, moment) - time.monotonic()
            if left <= 0 or self._queue or self._stopped:
                break
            self._changed.wait(left)
            room = self._limits.nbytes - sum(task.nbytes for task in tasks)
            tasks += self._queue.take_batchable({task.batch_key for task in tasks}, self._limits.rows - rows, room)
        if self._queue:
            self._changed.notify()  # this thread's notification may have been meant for another idle one

    def _in_time(self, tasks: list[Task]) -> list[Task]:
        """Split off the tasks that would miss their deadline in the batch; they go first, alone."""
        if len(tasks) < 2 or all(task.seconds_left is None for task in tasks):
            return tasks
        takes = sum(self._queue.takes(task.payer) for task in tasks)
        hurried = [task for task in tasks if task.seconds_left is not None and task.seconds_left() < takes]
        if not hurried:
            return tasks
        rest = [task for task in tasks if task not in hurried]
        first, *others = [*([task] for task in hurried), *([rest] if rest else [])]
        self._split.extend(others)
        self._changed.notify(len(others))
        return first


def _rows(tasks: Sequence[Task]) -> int:
    return sum(task.rows for task in tasks)


WEIGHT = 0.2
"""The minimum weight of the newest wait in the mean; a wait that comes long after the others weighs more."""
HALF_LIFE_SECONDS = 5.0
"""Without requests the remembered wait halves in this time, because an idle worker has no queue."""
KEPT = 1024
"""The number of accounts whose waits are remembered."""


class QueueClocks:
    """A `QueueClock` for each account, because one that floods the server waits longer than others. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._all = QueueClock(clock)
        self._of: OrderedDict[str, QueueClock] = OrderedDict()

    def add(self, account: str, wait_ns: int) -> None:
        with self._lock:
            found = self._of.get(account)
            if found is None:
                found = self._of[account] = QueueClock(self._clock)
                if len(self._of) > KEPT:
                    self._of.popitem(last=False)
            self._of.move_to_end(account)
        found.add(wait_ns)
        self._all.add(wait_ns)

    def mean_ns(self, account: str | None) -> int:
        """Return the mean wait of an account in ns, 0 if it never waited; None: of all accounts."""
        if account is None:
            return self._all.mean_ns
        with self._lock:
            found = self._of.get(account)
        return 0 if found is None else found.mean_ns


class QueueClock:
    """The exponentially weighted mean of waits in ns. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._mean = 0.0
        self._at = clock()

    def add(self, wait_ns: int) -> None:
        with self._lock:
            now = self._clock()
            kept = (1 - WEIGHT) * self._faded(now)  # an old value weighs less than what is reported
            self._mean = kept * self._mean + (1 - kept) * wait_ns
            self._at = now

    @property
    def mean_ns(self) -> int:
        with self._lock:
            return round(self._mean * self._faded(self._clock()))

    def _faded(self, now: float) -> float:
        share: float = 0.5 ** ((now - self._at) / HALF_LIFE_SECONDS)
        return share


# The threads that compute what a scheduler gives them.


Execute = Callable[[Sequence[Task]], Sequence[TaskResult]]
"""Computes the tasks of a batch. Raises nothing."""


def call(tasks: Sequence[Task]) -> list[TaskResult]:
    """Compute tasks whose work is a function, one after the other."""
    return [TaskResult(task.work()) for task in tasks]


class Workers:
    """``count`` threads that take batches from ``scheduler`` until it is stopped. ``clock``: seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        count: int,
        execute: Execute = call,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.count = count
        self.scheduler = scheduler
        self._execute = execute
        self._clock = clock
        self._thread = threading.local()
        """A worker's own ``resumed``: when its task began, or last let others go first."""
        self._threads = [
            # Daemon threads: a tail cannot be interrupted, and a process that must exit does not wait for one.
            threading.Thread(target=self._run, name=f"isthmus-worker-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def yield_to_others(self, payer: Payer) -> None:
        """Serve tasks that take precedence over the long-running task of ``payer``, in its own thread.

        The task is charged for its time so far; accounts that have received less service since then go first.
        """
        self.scheduler.charge(payer, self._clock() - self._thread.resumed)
        while tasks := self.scheduler.next_batch(before=payer):
            self._do(tasks)
        self._thread.resumed = self._clock()

    def stop(self, timeout: float = 1.0) -> None:
        """Let the threads end after their current batch; waits at most ``timeout`` seconds for each."""
        self.scheduler.stop()
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        running = True
        while running:
            tasks: list[Task] = []
            try:
                tasks = self.scheduler.next_batch()
                running = bool(tasks)
                if running:
                    self._do(tasks)
            except BaseException:  # the other tasks need this thread
                accounts = ", ".join(sorted({task.payer.account for task in tasks})) or "an unknown account"
                log.exception("tasks of %s could not be computed", accounts)
            del tasks  # otherwise a request's payload would live until the next request

    def _do(self, tasks: list[Task]) -> None:
        self._thread.resumed = self._clock()
        results: Sequence[TaskResult] = [TaskResult(False)] * len(tasks)
        try:
            results = self._execute(tasks)
        finally:
            self.scheduler.finish(tasks, results, self._clock() - self._thread.resumed)
