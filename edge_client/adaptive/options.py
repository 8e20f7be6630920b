"""`AutoOptions`: what ``split="auto"`` goes by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_client.planning.objective import Constraints, Objective
from edge_client.planning.partitioners import ByObjective, Partitioner, find_partitioner
from shared_hooks.errors import SpecError
from shared_hooks.showing import short


@short
@dataclass(frozen=True)
class AutoOptions:
    """Checked when it is made. Raises SpecError.

    ``objective``: what is to be least, such as "latency", "energy", "bytes" or "latency=1,bytes=0.2"; ``partitioner``
    decides in another way (`edge_client.planning.partitioners`), ``option`` is its own word.
    """

    objective: str | Objective = "latency"
    constraints: Constraints = field(default_factory=Constraints)
    partitioner: str | Partitioner = "objective"
    option: str | None = None
    edge_profile: str | Path | None = None
    """A file of ``edge-client profile``; None: measured at the start."""
    cloud_profile: str | Path | None = None
    profile_seconds: float = 20.0
    """For measuring either side, at most."""
    progress: bool | None = None
    """Whether measuring is shown; None: in a terminal and in a notebook."""
    say: Callable[[str], None] | None = None
    """Gets what people should know, a line each; None: it is logged."""
    on_decision: Callable[[dict[str, Any]], None] | None = None
    """Gets every decision and event, with its numbers (`edge_client.adaptive.decisions`)."""

    def __post_init__(self) -> None:
        if isinstance(self.objective, str):
            object.__setattr__(self, "objective", Objective.parse(self.objective))
        if isinstance(self.partitioner, str):
            object.__setattr__(self, "partitioner", find_partitioner(self.partitioner))
        if not 0 < self.profile_seconds < 1e6:  # which rejects NaN, too
            raise SpecError(f"profile_seconds={self.profile_seconds}: expected seconds, more than 0")

    @property
    def goal(self) -> Objective:
        """The objective, which a partitioner may have of its own."""
        own = self.partitioner.own if isinstance(self.partitioner, ByObjective) else None
        assert isinstance(self.objective, Objective)
        return own or self.objective

    @property
    def decider(self) -> Partitioner | None:
        """Who decides about every request; None: the controller itself, which moves with care."""
        assert not isinstance(self.partitioner, str)
        return None if isinstance(self.partitioner, ByObjective) else self.partitioner
