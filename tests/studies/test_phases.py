"""The arithmetic by which a moving cut is judged."""

from __future__ import annotations

import pytest

from studies.experiments.codecs import fixed
from studies.experiments.phases import Move, Phase, Request, judge
from studies.experiments.trace import RATES

PHASES = (Phase("fast", 100, 10), Phase("gone", None, 10))
ORACLE = {"fast": {"a": 50.0, "b": 54.0, "edge-only": 200.0}, "gone": {"edge-only": 200.0}}


def test_the_oracle_serves_the_same_requests_with_the_best_of_each_phase() -> None:
    requests = [
        Request(0.0, 0.1, "a", "a"),
        Request(1.0, 1.05, "a", "a"),
        Request(10.5, 10.9, "edge-only", "edge-only"),
    ]
    found = judge(PHASES, [0.0, 10.0], ORACLE, requests, [Move(10.4, "edge-only")])
    assert found["ratio"] == pytest.approx((100 + 50 + 400) / (50 + 50 + 200))
    assert [one["oracle"] for one in found["phases"]] == ["a", "edge-only"]


def test_near_optimum_counts_as_settled() -> None:
    requests = [Request(0.0, 1.0, "edge-only", "edge-only"), Request(1.0, 1.1, "b", "b"), Request(2.0, 2.1, "a", "a")]
    moves = [Move(1.0, "b"), Move(2.0, "a")]
    fast = judge(PHASES[:1], [0.0], ORACLE, requests, moves)["phases"][0]
    assert fast["settled_after_s"] == pytest.approx(1.0)
    assert fast["moves_after_settling"] == 1
    assert fast["last_move_after_s"] == pytest.approx(2.0)


def test_a_phase_that_never_settles_takes_all_of_it() -> None:
    found = judge(PHASES[:1], [0.0], ORACLE, [Request(0.0, 1.0, "edge-only", "edge-only")], [])
    assert found["slowest_adaptation_s"] == PHASES[0].seconds


def test_a_request_without_an_answer_is_lost() -> None:
    found = judge(PHASES[:1], [0.0], ORACLE, [Request(0.0, 1.0, "a", "a", "ServerUnavailable: gone")], [])
    assert found["lost"] == found["phases"][0]["lost"] == 1


def test_the_best_fixed_candidate_is_set_beside_the_requests_of_the_phases_with_a_server() -> None:
    phases = [{"name": name, "mean_ms": 900.0 if mbits is None else 20.0} for name, mbits in RATES]
    stays = {"a + int4": {"1 Mbit/s": 10.0, "5 Mbit/s": 90.0}, "edge-only": {"1 Mbit/s": 40.0, "5 Mbit/s": 40.0}}
    found = fixed([stays, stays], [phases, phases])
    assert found["candidate"] == "edge-only"
    assert found["means_ms"] == {"a + int4": [50.0, 50.0], "edge-only": [40.0, 40.0]}
    assert found["moving_ms"] == [pytest.approx(20.0)] * 2
