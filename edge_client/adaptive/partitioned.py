"""`--split auto` by another partitioner: it decides about every request, without waiting for a gain to last."""

from __future__ import annotations

from typing import Any

from edge_client.planning.controller import Choice, SplitController
from edge_client.planning.partitioners import Partitioner, Situation


class PartitionedController(SplitController):
    """Observes as `SplitController` does; who decides is ``partitioner``, among every candidate that is predicted."""

    def __init__(self, partitioner: Partitioner, option: str | None, *profiles: Any, **known: Any) -> None:
        self._partitioner, self._option = partitioner, option
        super().__init__(*profiles, **known)

    def _narrow(self) -> None:
        """Also those that another beats in everything: they may be asked for."""

    def choose(self, now: int) -> Choice:
        """The partitioner's; EDGE_ONLY without a server. Raises SpecError naming what it lacks."""
        if not self._there:
            return super().choose(now)
        candidates, held = self._candidates(), self._held
        decision = self._partitioner.decide(
            Situation(candidates, self._objective, self._constraints, self._edge, self._cloud, self._option)
        )
        pick = decision.winner
        before = next((one for one in candidates if one.name == held), None)
        moved, self._held = pick.name != held, pick.name
        self._promised[pick.name] = pick.latency_ns
        best = decision.ranking[0] if decision.ranking else pick
        numbers = self._numbers(pick, before, held, best)
        return Choice(pick, moved, decision.objective, numbers)
