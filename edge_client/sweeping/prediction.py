"""What the plan says of every way, before anything is measured: kept in the journal, so that it stays a prediction."""

from __future__ import annotations

from typing import Any

from edge_client.planning.explain import break_evens, explain
from edge_client.planning.objective import Objective, decide
from edge_client.survey.gather import Gathered
from shared_hooks.errors import SpecError


def predicted(gathered: Gathered, objective: Objective) -> dict[str, Any]:
    """JSON-able: the candidates, the decision (None, and why, where the objective's numbers are unavailable), machines,
    link and warnings.
    """
    candidates = gathered.candidates()
    decided = explanation = why_not = None
    try:
        decision = decide(candidates, objective)
        decided = decision.as_dict()
        explanation, _ = explain(
            decision, candidates, break_evens(decision, objective, gathered.link, gathered.candidates)
        )
    except SpecError as error:
        why_not = str(error)
    return {
        "candidates": [one.as_dict() for one in candidates],
        "decision": decided,
        "explanation": explanation,
        "idle_power": gathered.edge.idle_power.as_dict(),
        "why_not": why_not,
        "machines": {"edge": dict(gathered.edge.machine), "cloud": dict(gathered.cloud.machine)},
        "link": gathered.link.as_dict(),
        "warnings": list(gathered.warnings),
    }
