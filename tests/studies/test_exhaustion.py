"""A server outlives a while in which the system refuses it threads, files and memory."""

from __future__ import annotations

from studies.exhaustion import CUTS, failures, measure


def test_requests_are_right_or_fail_by_name_and_all_are_answered_afterwards() -> None:
    found = measure(["threads", "files", "memory"], 0.2, 3.0, 1, [])
    assert not failures(found) and found["afterwards"]["right"] >= len(CUTS), found
    assert sum(found["while calls failed"].values()) > found["while calls failed"].get("right", 0)


def test_what_counts_as_a_failure() -> None:
    good = {
        "while calls failed": {"right": 1, "ModelFailed": 3},
        "afterwards": {"right": 2},
        "clients that hang": {"": 0},
    }
    assert not failures(good)
    assert failures({**good, "while calls failed": {"WRONG": 1}}) == ["while calls failed: WRONG"]
    assert failures({**good, "afterwards": {}}) == ["afterwards: no answers"]
    assert failures({**good, "afterwards": {"right": 1, "ModelFailed": 1}}) == ["afterwards: ModelFailed"]
    assert failures({**good, "clients that hang": {"": 1}}) == ["clients hang"]
