"""What a partitioner is, what it is given, and those that pick a candidate as it was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from edge_client.planning.objective import Candidate, Constraints, Decision, Objective, decide
from edge_client.spoken import option
from shared_hooks.errors import SpecError, near_path
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


class ByObjective:
    """The best candidate in the objective that was asked for, or in one of its own."""

    def __init__(self, about: str = "the best in --objective (the default)", own: Objective | None = None) -> None:
        self.about, self.own = about, own

    def decide(self, situation: Situation) -> Decision:
        return decide(situation.candidates, self.own or situation.objective, situation.constraints)


class Cycle:
    """Each decision takes the next candidate, in the order of the layers, and starts over after the last."""

    about = "each allowed candidate in turn, for experiments"

    def __init__(self) -> None:
        self._turn = 0

    def decide(self, situation: Situation) -> Decision:
        situation = _with_unsteady(situation)
        decision = ByObjective().decide(situation)
        allowed = [one for one in situation.candidates if one.key not in decision.rejected]
        pick = allowed[self._turn % len(allowed)]
        self._turn += 1
        return chosen(decision, pick, "cycle")


class Fixed:
    """``option`` is a candidate's key or name, or its layer's id."""

    about = "the candidate that --partitioner-option names"

    def decide(self, situation: Situation) -> Decision:
        wanted = situation.option
        if wanted is None:
            raise SpecError(f"partitioner fixed: name the candidate with {option('partitioner_option')}")
        situation = _with_unsteady(situation)
        meant = [
            [one for one in situation.candidates if wanted == word(one)]
            for word in (lambda one: one.key, lambda one: one.name, lambda one: str(one.layer_id))
        ]
        found = next((ones for ones in meant if ones), None)
        if found is None:
            names = [one.key for one in situation.candidates]
            raise SpecError(f"partitioner fixed: no candidate {wanted!r}.{near_path(wanted, names)}")
        decision = ByObjective().decide(situation)
        pick = next((one for one in decision.ranking if one in found), None)  # of several codecs the best
        if pick is None:
            raise SpecError(f"partitioner fixed: {found[0].key} is not allowed: {decision.rejected[found[0].key]}")
        return chosen(decision, pick, "fixed")


def _with_unsteady(situation: Situation) -> Situation:
    """The situation for a choice that is not by predictions: what could not be measured steadily counts, too."""
    return replace(situation, candidates=[replace(one, unsteady="") for one in situation.candidates])


def chosen(decision: Decision, winner: Candidate, by: str) -> Decision:
    """A decision in which a partitioner, named ``by``, picked the winner; the best of the others is the runner-up."""
    others = tuple(one for one in decision.ranking if one.key != winner.key)
    return replace(
        decision,
        objective=f"{by} ({decision.objective})",
        winner=winner,
        runner_up=others[0] if others else None,
        ranking=(winner, *others),
    )
