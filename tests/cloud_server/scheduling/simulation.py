"""Workers on a clock of their own: jobs of given lengths through the fair line, without threads."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cloud_server.scheduling.fair_queue import FairQueue, Payer, Task


@dataclass(frozen=True)
class Job:
    """A job that takes ``seconds``; ``number``: which of its payer's it is."""

    payer: Payer
    number: int
    seconds: float
    put_at: float


class Simulation:
    """``used`` is the time that each account and each (account, client) had; ``waits`` what its jobs waited."""

    def __init__(self, workers: int = 1) -> None:
        self.line: FairQueue = FairQueue(workers)
        self.now = 0.0
        self.used: Counter[object] = Counter()
        self.waits: defaultdict[Payer, list[float]] = defaultdict(list)
        self.order: list[Job] = []
        self._idle = workers
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers: Counter[Payer] = Counter()

    def put(self, payer: Payer, seconds: float) -> Task:
        self._numbers[payer] += 1
        place = self.line.put(Task(Job(payer, self._numbers[payer], seconds, self.now), payer))
        self._begin()
        return place

    def at(self, time: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), what))

    def backlogged(self, payer: Payer, lengths: Iterator[float], deep: int = 4) -> None:
        """This client has ``deep`` jobs waiting or running, always."""
        for _ in range(deep):
            self.put(payer, next(lengths))
        self._refill[payer] = lengths

    def wanted(self, job: Job) -> bool:
        """Whether a job whose turn it is is done."""
        return True

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
            self._begin()

    @property
    def _refill(self) -> dict[Payer, Iterator[float]]:
        return self.__dict__.setdefault("_lengths", {})

    def _begin(self) -> None:
        while self._idle and (place := self.line.take()) is not None:
            job = place.work
            if not self.wanted(job):
                self.line.done(place, 0.0, counts=False)
                continue
            self._idle -= 1
            self.waits[job.payer].append(self.now - job.put_at)
            self.order.append(job)
            self.at(self.now + job.seconds, lambda place=place: self._end(place))  # type: ignore[misc]

    def _end(self, place: Task) -> None:
        job = place.work
        self._idle += 1
        self.line.done(place, job.seconds)
        self.used[job.payer.account] += job.seconds
        self.used[job.payer] += job.seconds
        if job.payer in self._refill:
            self.put(job.payer, next(self._refill[job.payer]))
