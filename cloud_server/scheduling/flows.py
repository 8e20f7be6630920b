"""Who is next, so that everybody who waits gets an equal share of the time: start-time fair queueing.

Each flow has a tag, the virtual time at which its next job may start: what its jobs took, divided by its weight, so the
least tag has had least. A flow that comes back starts at the clock, however long it was away: nobody saves up. The
clock is the greatest tag that was served, and advances a little with every job, so that flows that are new all the time
pass only so long before one that waits (P. Goyal et al., Start-time Fair Queueing, SIGCOMM 1996). What a job takes is
known only afterwards: it is guessed when it starts and corrected when it ends.

Who asks for more than its share is turned away, and pays for that, too: at most as much again as for what was done, so
its share shrinks to half while it continues, and the others have the rest.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)

STRIDE_SECONDS = 0.1
"""The clock advances by no more than this for one job: a long job of one flow sends no other to the back."""
FINE_SECONDS = 1.0
"""Most seconds of refused jobs that are paid for at once."""
KEPT = 256
"""Flows that neither wait nor run, and are remembered for what they took."""


class _Flow:
    __slots__ = ("finable", "number", "running", "tag", "waits", "weight")

    def __init__(self, weight: float, tag: float) -> None:
        self.weight = weight
        self.tag = tag
        self.finable = 0.0
        """Seconds that were done, and not paid for twice yet."""
        self.number = 0
        """When it began to wait: settles ties."""
        self.running = 0
        self.waits = False


class Flows(Generic[Name]):
    """Flows by name. Every call costs O(log n), on the average over calls. One thread at a time."""

    def __init__(self) -> None:
        self._flows: dict[Name, _Flow] = {}
        self._line: list[tuple[float, int, Name]] = []
        """A heap of (tag, number, name); those whose flow has moved on are skipped."""
        self._waiting = 0
        self._weight = 0.0
        """The weight of all flows that wait or run."""
        self._clock = 0.0
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._flows)

    @property
    def weight(self) -> float:
        """The weight of all flows that wait or run, together."""
        return self._weight

    def active(self, name: Name) -> bool:
        """Whether it waits or runs."""
        flow = self._flows.get(name)
        return flow is not None and (flow.waits or flow.running > 0)

    def wait(self, name: Name, weight: float = 1.0) -> None:
        """It has a job that waits; may be said again."""
        flow = self._flows.get(name)
        if flow is None:
            self._forget()
            flow = self._flows[name] = _Flow(weight, self._clock)
        if flow.waits:
            return
        if not flow.running:
            flow.weight = weight
            flow.tag = max(flow.tag, self._clock)
            self._weight += weight
        flow.waits = True
        flow.number = next(self._numbers)
        self._waiting += 1
        self._push(name, flow)

    def leave(self, name: Name) -> None:
        """It has no job that waits any more."""
        flow = self._flows.get(name)
        if flow is not None and flow.waits:
            flow.waits = False
            self._waiting -= 1
            self._rest(flow)

    def first(self) -> Name | None:
        """The one that waits and has had least; None when nobody waits."""
        while self._line:
            tag, number, name = self._line[0]
            flow = self._flows.get(name)
            if flow is not None and flow.waits and (flow.tag, flow.number) == (tag, number):
                return name
            heapq.heappop(self._line)
        return None

    def place(self, name: Name) -> tuple[float, int]:
        """The place of a flow that waits: whoever has the least is first."""
        flow = self._flows[name]
        return flow.tag, flow.number

    def precedes(self, name: Name) -> bool:
        """Whether another one that waits has had no more than this one, which runs."""
        first = self.first()
        return first is not None and first != name and self._flows[first].tag <= self._flows[name].tag

    def start(self, name: Name, seconds: float) -> None:
        """A job of it starts, and will take about so long."""
        flow = self._flows[name]
        self._clock = max(self._clock, flow.tag)
        flow.running += 1
        self._charge(name, flow, seconds)

    def charge(self, name: Name, seconds: float) -> None:
        """A job of it that runs has taken so long beyond what was said."""
        self._charge(name, self._flows[name], seconds)

    def fine(self, name: Name, seconds: float) -> None:
        """A job that would have taken so long was turned away."""
        flow = self._flows.get(name)
        if flow is not None:
            seconds = min(seconds, flow.finable)
            flow.finable -= seconds
            self._pay(name, flow, seconds)

    def end(self, name: Name, guessed: float, seconds: float) -> None:
        """A job of it is over; ``guessed`` is what `start` was given."""
        flow = self._flows[name]
        self._clock += min(seconds, STRIDE_SECONDS) / (self._weight + flow.weight)
        flow.running -= 1
        self._charge(name, flow, seconds - guessed)
        self._rest(flow)

    def _charge(self, name: Name, flow: _Flow, seconds: float) -> None:
        flow.finable = min(max(flow.finable + seconds, 0.0), FINE_SECONDS)
        self._pay(name, flow, seconds)

    def _pay(self, name: Name, flow: _Flow, seconds: float) -> None:
        flow.tag += seconds / flow.weight
        if flow.waits:
            self._push(name, flow)

    def _rest(self, flow: _Flow) -> None:
        if not flow.waits and not flow.running:
            self._weight -= flow.weight

    def _push(self, name: Name, flow: _Flow) -> None:
        heapq.heappush(self._line, (flow.tag, flow.number, name))
        if len(self._line) > 2 * self._waiting + 64:
            self._line = [(flow.tag, flow.number, name) for name, flow in self._flows.items() if flow.waits]
            heapq.heapify(self._line)

    def _forget(self) -> None:
        """Where too many rest: those whose tag is past, and if that is not enough, those who took least."""
        if len(self._flows) < 2 * KEPT + self._waiting:
            return
        resting = [(flow.tag, name) for name, flow in self._flows.items() if not flow.waits and not flow.running]
        resting.sort(key=lambda one: one[0])
        for number, (tag, name) in enumerate(resting):
            if tag <= self._clock or len(resting) - number > KEPT:
                del self._flows[name]
