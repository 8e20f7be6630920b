"""The candidate that answers first."""

from __future__ import annotations

from edge_client.planning.objective import Decision, Objective, decide
from edge_client.planning.partitioners.situation import Situation


class Latency:
    """Whatever the objective that was asked for."""

    about = "the lowest predicted latency"

    def decide(self, situation: Situation) -> Decision:
        return decide(situation.candidates, Objective({"latency": 1.0}), situation.constraints)
