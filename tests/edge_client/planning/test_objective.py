"""The best is the best of what is allowed; what cannot be decided is refused with its reason."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.planning.objective import COSTS, Candidate, Constraints, Objective, decide
from shared_hooks.errors import SpecError
from shared_hooks.metrics.records import Reading


def one(name: str, ms: float, nbytes: int = 0, joules: float | None = 1.0, memory: float | None = 1e6) -> Candidate:
    def reading(value: float | None) -> Reading:
        return Reading.unavailable("no meter") if value is None else Reading.measured(value, "x")

    return Candidate(name, 1, {"edge": ms * 1e6}, nbytes, 0, reading(joules), reading(memory), throughput=1000 / ms)


def test_an_objective_is_a_name_or_weights() -> None:
    assert Objective.parse("latency").weights == {"latency": 1.0}
    assert Objective.parse("latency=1, energy=0.5").weights == {"latency": 1.0, "energy": 0.5}
    assert str(Objective.parse("latency=1,energy=0.5")) == "latency=1,energy=0.5"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("speed", "'speed'.*latency, energy"),
        ("", "''"),
        ("latency,latency", "twice"),
        ("latency=-1", "above 0"),
        ("latency=nan", "above 0"),
        ("latency=inf", "above 0"),
        ("latency=fast", "above 0"),
    ],
)
def test_a_wrong_objective_is_named(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        Objective.parse(text)


@pytest.mark.parametrize(
    ("objective", "winner"), [("latency", "fast"), ("bytes", "slow"), ("energy", "slow"), ("throughput", "fast")]
)
def test_each_objective_has_its_winner(objective: str, winner: str) -> None:
    both = [one("fast", 10, 900, 3.0), one("slow", 20, 100, 1.0)]
    decision = decide(both, Objective.parse(objective))
    assert decision.winner.name == winner
    assert decision.runner_up is not None and decision.runner_up.name != winner
    assert list(decision.scores) == [ranked.name for ranked in decision.ranking]


def test_weights_count_multiples_of_the_best() -> None:
    both = [one("fast", 10, 900), one("slow", 20, 100)]
    assert decide(both, Objective.parse("latency=1,bytes=0.1")).winner.name == "fast"  # 1 + 0.9 against 2 + 0.1
    assert decide(both, Objective.parse("latency=1,bytes=0.2")).winner.name == "slow"  # 1 + 1.8 against 2 + 0.2


def test_numbers_that_are_not_there_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"energy: unavailable for a .no meter.*power=\(active, idle\)"):
        decide([one("a", 1, joules=None)], Objective.parse("latency=1,energy=1"))


def test_violated_constraint_is_reported_with_its_value() -> None:
    decision = decide([one("fat", 1, memory=3e6), one("thin", 2)], constraints=Constraints(max_edge_memory=2e6))
    assert decision.winner.name == "thin"
    assert decision.rejected == {"fat": "edge memory 3000000 B, limit 2000000 B"}
    assert decision.as_dict()["rejected"] == dict(decision.rejected)


def test_traffic_counts_at_the_rate_of_requests() -> None:
    both = [one("much", 1, 1000), one("little", 2, 10)]
    assert decide(both, constraints=Constraints(max_bytes_per_second=5000, rate=10)).winner.name == "little"
    assert decide(both, constraints=Constraints(max_bytes_per_second=5000, rate=1)).winner.name == "much"
    with pytest.raises(SpecError, match="go together"):
        Constraints(max_bytes_per_second=5000)


@pytest.mark.parametrize("accuracy", [-0.1, 1.5, math.nan])
def test_an_accuracy_is_a_share(accuracy: float) -> None:
    with pytest.raises(SpecError, match="from 0 to 1"):
        Constraints(min_accuracy=accuracy)


def test_unknown_value_does_not_satisfy_a_constraint() -> None:
    unknown = replace(one("a", 1, memory=None), accuracy=None)
    with pytest.raises(SpecError, match="edge memory unknown"):
        decide([unknown], constraints=Constraints(max_edge_memory=1e9))
    with pytest.raises(SpecError, match="accuracy unknown"):
        decide([unknown], constraints=Constraints(min_accuracy=0.5))


def test_where_nobody_satisfies_the_error_counts_and_names_the_nearest() -> None:
    three = [one("a", 1, memory=9e6), one("b", 2, memory=3e6), replace(one("c", 1), accuracy=0.2)]
    with pytest.raises(
        SpecError, match="edge memory removes 2, accuracy removes 1 of 3.*nearest: b .edge memory 3000000"
    ):
        decide(three, constraints=Constraints(max_edge_memory=2e6, min_accuracy=0.9))
    with pytest.raises(SpecError, match="no candidate"):
        decide([])


@given(
    st.lists(st.tuples(st.floats(0.1, 1e4), st.integers(0, 10**7), st.floats(0, 50)), min_size=1, max_size=20),
    st.dictionaries(st.sampled_from(sorted(COSTS)), st.floats(0.01, 10), min_size=1),
)
def test_no_other_candidate_is_better_in_everything_than_the_winner(
    numbers: list[tuple[float, int, float]], weights: dict[str, float]
) -> None:
    candidates = [one(str(at), ms, nbytes, joules) for at, (ms, nbytes, joules) in enumerate(numbers)]
    decision = decide(candidates, Objective(weights))
    costs = {each.name: [cost(each) or 0.0 for name, cost in COSTS.items() if name in weights] for each in candidates}
    winner = costs[decision.winner.name]
    assert not any(all(a < b for a, b in zip(other, winner, strict=True)) for other in costs.values())
    assert len(decision.ranking) == len(candidates)
