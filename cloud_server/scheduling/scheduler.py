"""Decides what the workers do next: whose task, together with which others, and whether there is time for it.

Work that takes too long is ended as soon as it comes back to Python: what a tail does after it has read a value from
its data cannot be foreseen, and a model may loop as often as an input says. One thread looks at all that runs
(`Watchdog`); it raises `Overtime` in a thread whose time is over, again and again until that thread is out of the
model.

Memory that was freed is kept for the next request, within bounds; what is more goes back to the system. Left alone,
glibc takes memory for each large message from the system and gives it back: 3.2 MB in messages of 1 MiB took 1.7 times
as long for page faults (docs/decisions/0019-the-pipe.md). Or it keeps all, in as many heaps as threads. A full server
(`python -m studies.siege.memory`) had 1.29 times what its limits say, and with two heaps 1.17 times.
"""

from __future__ import annotations

import ctypes
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

STEP_BYTES = 32 << 20
"""So much less is held than was: a trim takes some milliseconds, and what is trimmed is paged in again, so that steady
traffic causes none.
"""


HEAPS = 2
LARGEST_BYTES = 32 << 20
"""Largest block that is kept: the most that glibc takes from a heap."""
KEPT_BYTES = 64 << 20
"""At the end of a heap; `Trim` takes it away once much less is held."""
_OPTIONS = {  # glibc's malloc.h
    "MALLOC_ARENA_MAX": (-8, HEAPS),
    "MALLOC_MMAP_THRESHOLD_": (-3, LARGEST_BYTES),
    "MALLOC_TRIM_THRESHOLD_": (-1, KEPT_BYTES),
}


def few_heaps() -> None:
    """Few, which keep what is freed. To be called before there are threads; glibc's variables have the last word."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        for name, (option, value) in _OPTIONS.items():
            if name not in os.environ:
                set_option(option, value)


class Trim:
    """One thread looks, now and then. Where there is no glibc, nothing happens."""

    def __init__(self) -> None:
        self._most = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

    def look(self, held: int) -> bool:
        """``held``: bytes, now. True when freed memory was given back."""
        self._most = max(self._most, held)
        if self._trim is None or self._most - held < STEP_BYTES:
            return False
        self._most = held
        self._trim(0)
        return True


AGAIN_SECONDS = 1.0
COMES_WITHIN = 100
"""Turns of a loop, at the end of each of which Python looks whether an exception has come from outside."""


class Overtime(BaseException):
    """Not an Exception, so that no model catches it."""


class Watchdog:
    """Safe with any number of threads."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._until: dict[int, float] = {}
        self._raised: set[int] = set()
        self._changed = threading.Event()
        self._looks_at = math.inf
        """When its thread looks again at the latest."""
        self._closed = False
        threading.Thread(target=self._look, name="isthmus-overtime", daemon=True).start()

    def limited(self, seconds: float = math.inf) -> AbstractContextManager[None]:
        """Bounds what the block does in this thread, to ``seconds`` if these are fewer. `Overtime` comes where the
        engine lets it (`shared_hooks.forward.foresight`): in the model's code, and never after it.
        """
        return bounded(_Time(self, min(seconds, self._seconds)))

    @contextmanager
    def until(self, end: float) -> Iterator[None]:
        """`Overtime` may come in the block, from ``end`` on (of the monotonic clock); never after the block."""
        thread = threading.get_ident()
        before = self._until.get(thread)
        try:
            self._set(thread, end)
            yield
        finally:
            while True:  # it may come as the call begins
                try:
                    self._leave(thread, before)
                    break
                except Overtime:
                    continue

    @contextmanager
    def put_off(self) -> Iterator[Callable[[], float]]:
        """Nothing comes in the block, and what it takes does not count: `Overtime` may come as much later. What is
        given says so, after the block.
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
        if sooner:  # else its thread looks soon enough
            self._changed.set()

    def _leave(self, thread: int, before: float | None) -> None:
        """``before``: the end of the block that this one lies in."""
        while True:
            try:
                with self._lock:
                    self._until.pop(thread, None)
                if thread in self._raised:
                    # One that has not come yet comes here. Taking it back (SetAsyncExc with NULL) would leave CPython
                    # 3.11 looking for it at every call and loop, and under a profiler for ever.
                    for _ in range(COMES_WITHIN):
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
        """Ends the thread."""
        self._closed = True
        self._changed.set()


class _Time:
    """The time of one request; a `shared_hooks.forward.foresight.Limit`."""

    def __init__(self, watchdog: Watchdog, seconds: float) -> None:
        self._watchdog = watchdog
        self._seconds = seconds
        self._end: float | None = None
        """Counted from when the model first runs: what others' turns take is not this request's."""

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
"""How long the tasks of a client that has spoilt a batch go alone."""
MAX_ISOLATED = 4096
AT_ONCE_SECONDS = 0.05
"""How long an idle worker waits for the rest of the steps that a client sends at once."""


@dataclass(frozen=True)
class BatchLimits:
    """What a batch may have: ``rows``, and ``nbytes`` of memory while it is computed.

    Where enough tasks wait, a batch has as many rows as the largest of ``preferred`` that they fill. For more of them a
    worker waits up to ``delay`` seconds, while no other task waits and the batch has none of the preferred sizes.
    """

    rows: int = 1
    nbytes: float = math.inf
    delay: float = 0.0
    preferred: Sequence[int] = ()


class Result(NamedTuple):
    """``counts``: whether its time says something of the next one's. ``own``: seconds of a batch that were for this
    task alone.
    """

    counts: bool
    own: float = 0.0


class Scheduler:
    """Tasks are added by any thread; each of ``workers`` takes a batch, computes it, and says that it has finished.

    It has no bound of its own: the core admits no more requests than `Limits.max_pending`, and few profiles.
    """

    def __init__(self, workers: int = 1, limits: BatchLimits | None = None) -> None:
        self.waits = QueueClocks()
        self._limits = limits or BatchLimits()
        self._preferred = sorted(self._limits.preferred)
        self._queue = FairQueue(workers)
        self._split: deque[list[Task]] = deque()
        """The rest of batches that were split for a deadline: they are next."""
        self._isolated: OrderedDict[tuple[str, ...], float] = OrderedDict()
        """(account, client) or (account,) of tasks that go alone, and until when."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopped = False

    def __len__(self) -> int:
        """Tasks that wait."""
        return len(self._queue)

    def add(self, task: Task) -> Callable[[], None]:
        """The task waits behind the others of its client. The result takes it out again, if no worker has it yet."""
        with self._lock:
            if task.batch_key is not None and self._is_isolated(task.payer):
                task.batch_key = None
            self._queue.put(task)
            self._changed.notify()
        return partial(self._remove, task)

    def next_batch(self, before: Payer | None = None) -> list[Task]:
        """The tasks to be computed together now; waits for one, and gives none once stopped.

        ``before``: for a worker amid a task of this payer; without waiting, and only what comes before that.
        """
        with self._lock:
            if before is not None:
                return self._in_time(self._batch()) if self._split or self._queue.ahead(before) else []
            self._changed.wait_for(lambda: self._queue or self._split or self._stopped)
            tasks = self._batch()
            if tasks and tasks[0].batch_key is not None:
                self._wait_for_more(tasks)
            return self._in_time(tasks)

    def finish(self, tasks: Sequence[Task], results: Sequence[Result], seconds: float) -> None:
        """The tasks of a batch are done, after so many seconds; each is charged for its own, and by its rows."""
        with self._lock:
            each = max(0.0, seconds - sum(result.own for result in results)) / _rows(tasks)
            for task, result in zip(tasks, results, strict=True):
                self._queue.done(task, result.own + each * task.rows, result.counts)

    def charge(self, payer: Payer, seconds: float) -> None:
        """A task of it still runs, and has taken so long since it was last charged."""
        with self._lock:
            self._queue.charge(payer, seconds)

    def refused(self, payer: Payer) -> None:
        """A task of it was refused for want of a place or of time: it is charged for having asked."""
        with self._lock:
            self._queue.turned_away(payer)

    def forecast(self, payer: Payer) -> Forecast:
        """What to expect of a task added now."""
        with self._lock:
            return self._queue.forecast(payer)

    def takes(self, payer: Payer) -> float:
        """Seconds that a task of it is expected to take; 0 where it has had too few."""
        with self._lock:
            return self._queue.takes(payer)

    def check_time(self, payer: Payer, seconds_left: float) -> None:
        """Raises ServerUnavailable for a task that would end too late, so that nothing is done in vain."""
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
        """Their tasks have spoilt a batch: they go alone for a while.

        With a second client of an account all its others go alone, too: what a client calls itself costs nothing.
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
        """Gives out what still waits, and then nothing."""
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
        """The next task, and those to be computed with it; none where nothing waits. The caller holds the lock."""
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
        return [task, *self._queue.take_alike(keys, rows - task.rows, self._limits.nbytes - task.nbytes)]

    def _rows_of(self, taken: Task, batch_key: Hashable) -> int:
        """Those that wait, and those of the task that was just taken."""
        return self._queue.waiting(batch_key) + (taken.rows if taken.batch_key == batch_key else 0)

    def _wait_for_more(self, tasks: list[Task]) -> None:
        """Until the batch is full, for `BatchLimits.delay`; for what a client has sent at once, at least a moment,
        while no other account's tasks are in the batch.
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
            tasks += self._queue.take_alike({task.batch_key for task in tasks}, self._limits.rows - rows, room)
        if self._queue:
            self._changed.notify()  # what was said to this thread may be for another one that does nothing

    def _in_time(self, tasks: list[Task]) -> list[Task]:
        """The batch, which takes as long as all of its tasks; those that it would end too late for go first, alone."""
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
"""Weight of the newest wait in the mean, at least: of one that came long after the others more."""
HALF_LIFE_SECONDS = 5.0
"""Without requests the remembered wait loses half of itself in this time: nobody waited for the idle worker."""
KEPT = 1024
"""Accounts whose waits are remembered."""


class QueueClocks:
    """A `QueueClock` for each account: who floods the server waits long, and others do not. Any thread may call."""

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
        """0 for one that never waited; None: of all."""
        if account is None:
            return self._all.mean_ns
        with self._lock:
            found = self._of.get(account)
        return 0 if found is None else found.mean_ns


class QueueClock:
    """The exponentially weighted mean of waits (ns). Any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._mean = 0.0
        self._at = clock()

    def add(self, wait_ns: int) -> None:
        with self._lock:
            now = self._clock()
            kept = (1 - WEIGHT) * self._faded(now)  # what is long ago weighs no more than what is reported
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


Execute = Callable[[Sequence[Task]], Sequence[Result]]
"""Does the tasks of a batch. Raises nothing."""


def call(tasks: Sequence[Task]) -> list[Result]:
    """Does tasks whose work is a function, one after the other."""
    return [Result(task.work()) for task in tasks]


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
        """A worker's own ``resumed``: since when its task runs, or since it last let others go first."""
        self._threads = [
            # Daemons: nothing can interrupt a tail, and a process that must end now does not wait for one.
            threading.Thread(target=self._run, name=f"isthmus-worker-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def let_others_go_first(self, payer: Payer) -> None:
        """Called by a task of ``payer`` that takes long, in its thread: it is charged for what it has taken, and those
        who have had less than its account since are served now, here.
        """
        self.scheduler.charge(payer, self._clock() - self._thread.resumed)
        while tasks := self.scheduler.next_batch(before=payer):
            self._do(tasks)
        self._thread.resumed = self._clock()

    def stop(self, timeout: float = 1.0) -> None:
        """Lets the threads end after what they have; waits at most ``timeout`` seconds for each."""
        self.scheduler.stop()
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        while tasks := self.scheduler.next_batch():
            self._do(tasks)
            del tasks  # a request's payload would live until the next one comes

    def _do(self, tasks: list[Task]) -> None:
        self._thread.resumed = self._clock()
        results: Sequence[Result] = [Result(False)] * len(tasks)
        try:
            results = self._execute(tasks)
        finally:
            self.scheduler.finish(tasks, results, self._clock() - self._thread.resumed)
