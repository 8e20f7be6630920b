"""The threads that compute: requests and profiles alike, in the order of the fair line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cloud_server.work.line import Forecast, Line, Place
from cloud_server.work.payer import Payer

Job = Callable[[], bool]
"""Raises nothing; False when nothing was computed, or nothing from which a guess may be made for the next one."""


class _Doing:
    """A job that a thread does; ``resumed``: since when, or since it last gave way."""

    def __init__(self, resumed: float) -> None:
        self.resumed = resumed


class Workers:
    """``count`` threads that run one job after the other.

    The line has no bound of its own: the core admits no more requests than `Limits.max_pending`, and few profiles. A
    request that is given up leaves it.
    """

    def __init__(self, count: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock`` (seconds) says what a job took."""
        self.count = count
        self._clock = clock
        self._line: Line[Job] = Line(count)
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.local()
        self._threads = [
            # Daemons: nothing can interrupt a tail, and a process that must end now does not wait for one.
            threading.Thread(target=self._run, name=f"isthmus-worker-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job, payer: Payer) -> Callable[[], None]:
        """The job waits behind the others of its client; what is given takes it out again, if no thread has it yet."""
        with self._changed:
            place = self._line.put(job, payer)
            self._changed.notify()

        def leave() -> None:
            with self._changed:
                self._line.remove(place)

        return leave

    def turned_away(self, payer: Payer) -> None:
        """A job of it was refused for want of a place or of time: it pays for having asked."""
        with self._changed:
            self._line.turned_away(payer)

    def forecast(self, payer: Payer) -> Forecast:
        """Of a job put now."""
        with self._changed:
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
        with self._changed:
            self._line.charge(payer, since)
        while True:
            with self._changed:
                place = self._line.take() if self._line.ahead(payer) else None
            if place is None:
                break
            self._do(place)
        doing.resumed = self._clock()

    def stop(self, timeout: float = 1.0) -> None:
        """Lets the threads end after what they have; waits at most ``timeout`` seconds for each."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout)

    def _next(self) -> Place[Job] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._line or self._stopped)
            return self._line.take()

    def _run(self) -> None:
        while (place := self._next()) is not None:
            self._do(place)
            del place  # a request's payload would live until the next one comes

    def _do(self, place: Place[Job]) -> None:
        before = getattr(self._thread, "doing", None)
        doing = self._thread.doing = _Doing(self._clock())
        try:
            counts = place.job()
        finally:
            self._thread.doing = before
        with self._changed:
            self._line.done(place, self._clock() - doing.resumed, counts)

    @property
    def _doing(self) -> _Doing:
        """What this worker's thread does."""
        doing: _Doing = self._thread.doing
        return doing
