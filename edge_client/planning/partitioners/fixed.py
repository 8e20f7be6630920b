"""The candidate that was named."""

from __future__ import annotations

from edge_client.planning.objective import Decision
from edge_client.planning.partitioners.by_objective import ByObjective
from edge_client.planning.partitioners.chosen import chosen
from edge_client.planning.partitioners.situation import Situation
from shared_hooks.errors import SpecError
from shared_hooks.hierarchy import near


class Fixed:
    """``option`` is a candidate's name, or its layer's id."""

    about = "the candidate that --partitioner-option names"

    def decide(self, situation: Situation) -> Decision:
        wanted = situation.option
        if wanted is None:
            raise SpecError("partitioner fixed: name the candidate with --partitioner-option")
        names = {one.name: one for one in situation.candidates}
        by_id = {str(one.layer_id): one for one in situation.candidates if one.layer_id is not None}
        pick = names.get(wanted) or by_id.get(wanted)
        if pick is None:
            raise SpecError(f"partitioner fixed: no candidate {wanted!r}.{near(wanted, names)}")
        decision = ByObjective().decide(situation)
        if pick.name in decision.rejected:
            raise SpecError(f"partitioner fixed: {pick.name} is not allowed: {decision.rejected[pick.name]}")
        return chosen(decision, pick, "fixed")
