"""The candidate that is best in the objective that was asked for: what `plan` does unless told otherwise."""

from __future__ import annotations

from edge_client.planning.objective import Decision, decide
from edge_client.planning.partitioners.situation import Situation


class ByObjective:
    """As --objective says."""

    about = "the best in --objective (the default)"

    def decide(self, situation: Situation) -> Decision:
        return decide(situation.candidates, situation.objective, situation.constraints)
