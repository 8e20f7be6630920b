"""What a partitioner is given, and what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edge_client.planning.candidate import Candidate
from edge_client.planning.objective import Constraints, Objective
from edge_client.planning.objective import Decision as Decision
from shared_hooks.profiling.profile import Profile


@dataclass(frozen=True)
class Situation:
    """``candidates`` are predicted from the two profiles, the link and the load; ``option`` is the partitioner's own
    word from the command line.
    """

    candidates: Sequence[Candidate]
    objective: Objective = field(default_factory=Objective)
    constraints: Constraints = field(default_factory=Constraints)
    edge: Profile | None = None
    cloud: Profile | None = None
    option: str | None = None


class Partitioner(Protocol):
    """Decides. Made once without arguments, asked as often as wanted, so it may remember."""

    about: str
    """One line for people."""

    def decide(self, situation: Situation) -> Decision:
        """Raises SpecError naming what it lacks."""
