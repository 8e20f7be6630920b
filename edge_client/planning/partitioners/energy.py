"""The candidate that takes the least energy of this machine."""

from __future__ import annotations

from edge_client.planning.objective import Decision, Objective, decide
from edge_client.planning.partitioners.situation import Situation


class Energy:
    """Whatever the objective that was asked for. SpecError where no energy is known."""

    about = "the lowest predicted energy on the edge"

    def decide(self, situation: Situation) -> Decision:
        return decide(situation.candidates, Objective({"energy": 1.0}), situation.constraints)
