"""From one cut to a later one: a request runs the middle part by itself, and joins a batch of those cut there.

Up to the later cut nothing changes: a middle part gives the very bytes that a head gives there (`shared_hooks.middle`).
What joins behind it, and what rows may influence, is as for requests that were cut there (`proof`).

It is worth it where a tail gains from more rows, and the middle is not most of it; that is not guessed: tails of
several sizes and the middle are timed where they are tried, and whenever they run.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Final
from weakref import ReferenceType, ref

from shared_hooks.batching.batches import Batches, Joinable
from shared_hooks.batching.proof import Doubt, Proof, Seconds
from shared_hooks.crossing import EarlyOutput
from shared_hooks.errors import CutRefused, IsthmusError
from shared_hooks.tensors.staging import wait

MAX_WAYS: Final = 256
MAX_CUTS: Final = 64
MAX_SURE: Final = 256
GAIN: Final = 0.05
"""Share of the time that both would take apart: less is within what measurements differ by."""


@dataclass(frozen=True)
class Cut:
    """One that has batches; its proof is others' to keep."""

    batch_key: int
    form: Hashable
    position: int
    proof: ReferenceType[Proof]

    @classmethod
    def of(cls, joinable: Joinable) -> Cut:
        return cls(joinable.batch_key, joinable.form, joinable.position, ref(joinable.proof))


@dataclass(frozen=True)
class Way:
    """Some rows of a cut may run on to a later one, which takes ``seconds`` by itself. ``sure``: digests of
    descriptions from which it was seen to lead there.
    """

    seconds: Seconds = field(default_factory=Seconds)
    sure: set[str] = field(default_factory=set)


class Ways:
    """What is faster at the cuts of one model that have batches. Any thread may call; `learn` one at a time."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._lock = threading.Lock()
        self._cuts: OrderedDict[int, Cut] = OrderedDict()
        """By its batch key, whose requests came last."""
        self._ways: OrderedDict[tuple[int, int, int], Way | Doubt] = OrderedDict()
        """By batch key, rows, and the later key."""

    def came(self, joinable: Joinable) -> None:
        """A request of this cut."""
        with self._lock:
            self._cuts[joinable.batch_key] = Cut.of(joinable)
            self._cuts.move_to_end(joinable.batch_key)
            while len(self._cuts) > MAX_CUTS:
                self._cuts.popitem(last=False)

    def learn(self, joinable: Joinable) -> bool:
        """Tries the way to one later cut at which requests of the same form came, if there is one that was not tried:
        plans and runs the model. Whether it did.
        """
        with self._lock:
            later = [
                one for one in self._cuts.values() if one.form == joinable.form and one.position > joinable.position
            ]
            unknown = [one for one in later if self._known(joinable, one.batch_key) is None]
        if not unknown:
            return False
        last = unknown[-1]
        try:
            found: Way | Doubt = self._tried(joinable, last)
        except IsthmusError as error:
            found = Doubt(str(error))
        with self._lock:
            self._ways[joinable.batch_key, joinable.rows, last.batch_key] = found
            while len(self._ways) > MAX_WAYS:
                self._ways.popitem(last=False)
        return True

    def _known(self, joinable: Joinable, last: int) -> Way | Doubt | None:
        found = self._ways.get((joinable.batch_key, joinable.rows, last))
        return None if isinstance(found, Doubt) and found.is_over else found

    def _tried(self, joinable: Joinable, last: Cut) -> Way:
        if (proof := last.proof()) is None:
            raise CutRefused("nobody's requests join there any more")
        early = joinable.proof.sample(joinable.rows)
        way = Way()
        self.run(way, early, joinable.rows, proof)  # plans, and works the middle out
        way.seconds.clear()
        self.run(way, early, joinable.rows, proof)
        return way

    def run(self, way: Way, early: EarlyOutput, rows: int, last: Proof) -> EarlyOutput:
        """What crosses the later cut, of which ``last`` is; ``early`` stays as it is. Raises CutRefused where that is
        another cut than its batches are of.
        """
        started = time.perf_counter()
        found: EarlyOutput = self._batches.wrapped.forward(replace(early, disposable=False), end=last.cut.cut)
        if early.crossing.digest not in way.sure:
            if not last.cut.is_at(found.crossing, rows):
                raise CutRefused("the middle part leads to another cut than the batch is of")
            if len(way.sure) < MAX_SURE:
                way.sure.add(early.crossing.digest)
        wait(self._batches.wrapped.device)
        way.seconds.add(rows, time.perf_counter() - started)
        return found

    def way(self, joinable: Joinable, last: int) -> Way | None:
        """From where a request was cut to the cut of another batch key."""
        with self._lock:
            found = self._known(joinable, last)
        return found if isinstance(found, Way) else None

    def compatible_keys(self, batch_key: int, waiting: Callable[[int], int], most: int) -> list[int]:
        """The batch keys whose requests are worth joining with those of ``batch_key``: ``waiting`` gives the rows of a
        key that wait, or are taken, and a batch has ``most`` at the most.
        """
        with self._lock:
            pairs = [
                (first, rows, last, way)
                for (first, rows, last), way in self._ways.items()
                if isinstance(way, Way) and batch_key in (first, last) and first in self._cuts and last in self._cuts
            ]
            cuts = dict(self._cuts)
        found = []
        for first, rows, last, way in pairs:
            other = last if first == batch_key else first
            if other not in found and self._pays(cuts[first], cuts[last], way, rows, waiting, most):
                found.append(other)
        return found

    def _pays(self, first: Cut, last: Cut, way: Way, rows: int, waiting: Callable[[int], int], most: int) -> bool:
        """Whether rows take less as one batch at the later cut than in the batches that each cut would have."""
        here, there = first.proof(), last.proof()
        ones, others = min(waiting(first.batch_key), most), min(waiting(last.batch_key), most)
        if not ones or not others or here is None or there is None:
            return False
        fits = min(1.0, most / (ones + others))  # of each; full batches have nothing to gain
        early, late = here.seconds.of(ones), there.seconds.of(others)
        middle, together = way.seconds.of(rows), there.seconds.of(round(fits * (ones + others)))
        if early is None or late is None or middle is None or together is None:
            return False
        return middle * fits * ones / rows + together < (1 - GAIN) * fits * (early + late)
