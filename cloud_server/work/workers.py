"""The threads that compute: requests and profiles alike, in the order of the fair line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import NamedTuple

from cloud_server.work.line import Forecast, Line, Place
from cloud_server.work.payer import Payer

Job = Callable[[], bool]
"""Raises nothing; False when nothing was computed, or nothing from which a guess may be made for the next one."""


class Did(NamedTuple):
    """``counts``: what the job itself would give. ``own``: seconds that were for this one alone."""

    counts: bool
    own: float = 0.0


Together = Callable[[Sequence[Job]], Sequence[Did]]
"""Does several jobs at once. Raises nothing."""
CompatibleKeys = Callable[[Job, Hashable, Callable[[Hashable], int], int], Collection[Hashable]]
"""Other batch keys to do with a job: given the job, its key, how many rows there are of any key, and the most of a
batch.
"""


class _Doing:
    """A job that a thread does; ``resumed``: since when, or since it last gave way."""

    def __init__(self, resumed: float) -> None:
        self.resumed = resumed


class Workers:
    """``count`` threads that run one job after the other, or several of one batch key at once.

    The line has no bound of its own: the core admits no more requests than `Limits.max_pending`, and few profiles. A
    request that is given up leaves it.
    """

    def __init__(
        self,
        count: int,
        clock: Callable[[], float] = time.perf_counter,
        *,
        together: Together | None = None,
        most: int = 1,
        delay: float = 0.0,
        preferred: Sequence[int] = (),
        compatible_keys: CompatibleKeys = lambda job, batch_key, waiting, most: (),
    ) -> None:
        """``clock`` (seconds) says what a job took.

        ``together`` does jobs of one batch_key, and of its ``compatible_keys``, up to ``most`` rows; where enough wait,
        as many as the largest of ``preferred`` that they fill. For more of them a worker waits ``delay`` seconds at the
        longest, and only while nobody else waits for it, nor once they are as many as one of ``preferred``.
        """
        self.count = count
        self._clock = clock
        self._together = together
        self._most = most if together is not None else 1
        self._delay = delay
        self._preferred = sorted(preferred)
        self._compatible_keys = compatible_keys
        self._line: Line[Job] = Line(count)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopped = False
        self._thread = threading.local()
        self._threads = [
            # Daemons: nothing can interrupt a tail, and a process that must end now does not wait for one.
            threading.Thread(target=self._run, name=f"isthmus-worker-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job, payer: Payer, batch_key: Hashable = None, rows: int = 1) -> Callable[[], None]:
        """The job waits behind the others of its client; what is given takes it out again, if no thread has it yet.
        Jobs of one ``batch_key`` may be done together; this one has ``rows`` of what is bounded then.
        """
        with self._lock:
            place = self._line.put(job, payer, batch_key, rows)
            self._changed.notify()

        def leave() -> None:
            with self._lock:
                self._line.remove(place)

        return leave

    def turned_away(self, payer: Payer) -> None:
        """A job of it was refused for want of a place or of time: it pays for having asked."""
        with self._lock:
            self._line.turned_away(payer)

    def forecast(self, payer: Payer) -> Forecast:
        """What to expect of a job put now."""
        with self._lock:
            return self._line.forecast(payer)

    @property
    def waited_for(self) -> bool:
        """Whether a job waits."""
        return len(self._line) > 0

    def give_way(self, payer: Payer) -> None:
        """Called by a job of ``payer`` that takes long, in its thread, where it may be put aside: it is charged for
        what it has taken, and those who have had less than its account since are served first, here.
        """
        doing = self._doing
        since = self._clock() - doing.resumed
        with self._lock:
            self._line.charge(payer, since)
        while True:
            with self._lock:
                places = self._taken() if self._line.ahead(payer) else []
            if not places:
                break
            self._do(places)
        doing.resumed = self._clock()

    def stop(self, timeout: float = 1.0) -> None:
        """Lets the threads end after what they have; waits at most ``timeout`` seconds for each."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout)

    def _taken(self) -> list[Place[Job]]:
        """The next job, and those that are done with it; none where nobody waits. The caller holds the lock."""
        place = self._line.take()
        if place is None or place.batch_key is None:
            return [] if place is None else [place]
        batch_key = {
            place.batch_key,
            *self._compatible_keys(place.job, place.batch_key, partial(self._rows_of, place), self._most),
        }
        there = place.rows + sum(map(self._line.waiting, batch_key))
        most = max((size for size in self._preferred if place.rows < size <= there), default=self._most)
        return [place, *self._line.take_alike(batch_key, most - place.rows)]

    def _rows_of(self, taken: Place[Job], batch_key: Hashable) -> int:
        """Those that wait, and those that a worker has just taken."""
        return self._line.waiting(batch_key) + (taken.rows if taken.batch_key == batch_key else 0)

    def _next(self) -> list[Place[Job]]:
        with self._lock:
            self._changed.wait_for(lambda: self._line or self._stopped)
            places = self._taken()
            if places and places[0].batch_key is not None and self._delay:
                self._wait_for_batch(places)
            return places

    def _wait_for_batch(self, places: list[Place[Job]]) -> None:
        until = time.monotonic() + self._delay
        while (rows := _rows(places)) < self._most and rows not in self._preferred:
            left = until - time.monotonic()
            if left <= 0 or self._line or self._stopped:
                break
            self._changed.wait(left)
            places += self._line.take_alike({place.batch_key for place in places}, self._most - rows)
        if self._line:
            self._changed.notify()  # what was said to this thread may be for another one that does nothing

    def _run(self) -> None:
        while places := self._next():
            self._do(places)
            del places  # a request's payload would live until the next one comes

    def _do(self, places: list[Place[Job]]) -> None:
        before = getattr(self._thread, "doing", None)
        doing = self._thread.doing = _Doing(self._clock())
        done: Sequence[Did] = [Did(False)] * len(places)
        try:
            if len(places) == 1 or self._together is None:
                done = [Did(place.job()) for place in places]
            else:
                done = self._together([place.job for place in places])
        finally:
            self._thread.doing = before
        with self._lock:
            shared = max(0.0, self._clock() - doing.resumed - sum(one.own for one in done))
            each = shared / _rows(places)
            for place, one in zip(places, done, strict=True):
                self._line.done(place, one.own + each * place.rows, one.counts)

    @property
    def _doing(self) -> _Doing:
        """What this worker's thread does."""
        doing: _Doing = self._thread.doing
        return doing


def _rows(places: Sequence[Place[Job]]) -> int:
    return sum(place.rows for place in places)
