"""The best cut for a generation: by what a token, the first token, or the whole reply takes, under constraints."""

from __future__ import annotations

from collections.abc import Sequence

from edge_client.planning.generation.predict import GenerationCandidate, check_goal
from edge_client.planning.objective import Constraints, Decision, Objective, decide


def decide_generation(
    candidates: Sequence[GenerationCandidate],
    goal: str = "token",
    objective: Objective | None = None,
    constraints: Constraints | None = None,
) -> Decision:
    """As `decide`, of the candidates' ``goal`` (a name of `GOALS`). Raises SpecError for another word, for numbers that
    are not known, and where none is allowed.
    """
    check_goal(goal)
    return decide([one.of(goal) for one in candidates], objective, constraints)
