"""Every allowed candidate in turn: for experiments."""

from __future__ import annotations

from edge_client.planning.objective import Decision
from edge_client.planning.partitioners.by_objective import ByObjective
from edge_client.planning.partitioners.chosen import chosen
from edge_client.planning.partitioners.situation import Situation


class Cycle:
    """Each decision takes the next, in the order of the layers, and starts over after the last."""

    about = "each allowed candidate in turn, for experiments"

    def __init__(self) -> None:
        self._turn = 0

    def decide(self, situation: Situation) -> Decision:
        decision = ByObjective().decide(situation)
        allowed = [one for one in situation.candidates if one.name not in decision.rejected]
        pick = allowed[self._turn % len(allowed)]
        self._turn += 1
        return chosen(decision, pick, "cycle")
