"""A decision in which something else than the objective picked the winner."""

from __future__ import annotations

from dataclasses import replace

from edge_client.planning.candidate import Candidate
from edge_client.planning.objective import Decision


def chosen(decision: Decision, winner: Candidate, by: str) -> Decision:
    """``winner`` first; the best of the others is the runner-up. ``by``: the partitioner's name."""
    others = tuple(one for one in decision.ranking if one.name != winner.name)
    return replace(
        decision,
        objective=f"{by} ({decision.objective})",
        winner=winner,
        runner_up=others[0] if others else None,
        ranking=(winner, *others),
    )
