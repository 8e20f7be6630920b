"""Workers on a clock of their own: jobs of given lengths through the fair line, without threads."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cloud_server.work.line import Line, Place
from cloud_server.work.payer import Payer


@dataclass(frozen=True)
class Task:
    """A job that takes ``seconds``; ``number``: which of its payer's it is."""

    payer: Payer
    number: int
    seconds: float
    put_at: float


class Simulation:
    """``used`` is the time that each account and each (account, client) had; ``waits`` what its jobs waited."""

    def __init__(self, workers: int = 1) -> None:
        self.line: Line[Task] = Line(workers)
        self.now = 0.0
        self.used: Counter[object] = Counter()
        self.waits: defaultdict[Payer, list[float]] = defaultdict(list)
        self.order: list[Task] = []
        self._idle = workers
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers: Counter[Payer] = Counter()

    def put(self, payer: Payer, seconds: float) -> Place[Task]:
        self._numbers[payer] += 1
        place = self.line.put(Task(payer, self._numbers[payer], seconds, self.now), payer)
        self._begin()
        return place

    def at(self, time: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), what))

    def backlogged(self, payer: Payer, lengths: Iterator[float], deep: int = 4) -> None:
        """This client has ``deep`` jobs waiting or running, always."""
        for _ in range(deep):
            self.put(payer, next(lengths))
        self._refill[payer] = lengths

    def wanted(self, task: Task) -> bool:
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
            task = place.job
            if not self.wanted(task):
                self.line.done(place, 0.0, counts=False)
                continue
            self._idle -= 1
            self.waits[task.payer].append(self.now - task.put_at)
            self.order.append(task)
            self.at(self.now + task.seconds, lambda place=place: self._end(place))  # type: ignore[misc]

    def _end(self, place: Place[Task]) -> None:
        task = place.job
        self._idle += 1
        self.line.done(place, task.seconds)
        self.used[task.payer.account] += task.seconds
        self.used[task.payer] += task.seconds
        if task.payer in self._refill:
            self.put(task.payer, next(self._refill[task.payer]))
