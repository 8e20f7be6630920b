"""A break-even is where winner and runner-up score the same; where there is none, that is said."""

from __future__ import annotations

import math

import pytest

from edge_client.planning.candidate import EDGE_ONLY, Candidate
from edge_client.planning.explain import break_evens, crossing, explain, round_trip, uplink
from edge_client.planning.link import Curve, Link
from edge_client.planning.objective import Objective, decide
from edge_client.planning.predict import predict
from tests.planning.made import MS, Layer, profile

EDGE = profile("edge", [Layer(100, 1, 50_000)], input_bytes=50_000, encode_ms=0.0)
CLOUD = profile("cloud", [Layer(100, 1, 50_000)], input_bytes=50_000)


def again(link: Link, edge: float = 1.0, server: float = 1.0) -> list[Candidate]:
    """cloud-only: 10 ms, 50.2 ms at 1 MB/s, 0.5 ms down, a tail of 1.1 ms; edge-only: 100 ms."""
    return predict(EDGE, CLOUD, link, edge_factor=edge, server_factor=server, only=("edge-only", "cloud-only"))


LINK = Link(Curve.line(10 * MS, 1e6), Curve.line(0, 1e6))


def test_every_break_even_is_where_the_two_are_equal() -> None:
    decision = decide(again(LINK))
    found = {one.what: one for one in break_evens(decision, Objective(), LINK, again)}
    assert decision.winner.name == "cloud-only"
    goodput, rtt = found["uplink goodput"], found["round trip"]
    assert goodput.now == pytest.approx(8) and goodput.at is not None
    at = {one.name: one.latency_ns for one in again(uplink(LINK, goodput.at / goodput.now))}
    assert at["cloud-only"] == pytest.approx(at[EDGE_ONLY], rel=1e-6)
    assert goodput.at == pytest.approx(8 * 50.2 / 88.4, rel=1e-3)
    assert rtt.at == pytest.approx(48.2, rel=1e-3)
    at = {one.name: one.latency_ns for one in again(round_trip(LINK, rtt.at * MS))}
    assert at["cloud-only"] == pytest.approx(at[EDGE_ONLY], rel=1e-6)
    assert found["edge speed"].at == pytest.approx(100 / 61.8, rel=1e-3)
    assert found["server speed"].at == pytest.approx(1.1 / 39.3, rel=1e-3)
    assert "below" in str(goodput) and "above" in str(rtt)


def test_a_difference_that_never_changes_its_sign_has_no_crossing() -> None:
    assert crossing(lambda factor: -1.0) is None
    assert crossing(lambda factor: factor - 8) == pytest.approx(8)
    assert crossing(lambda factor: 0.125 - factor) == pytest.approx(0.125)
    assert crossing(lambda factor: abs(math.log(factor)) - 1) in (pytest.approx(math.e), pytest.approx(1 / math.e))


def test_what_can_never_be_is_said() -> None:
    slow = Link(Curve.line(500 * MS, 1e6), Curve.line(0, 1e6))  # the round trip alone is longer than the edge
    decision = decide(again(slow))
    found = {one.what: one for one in break_evens(decision, Objective(), slow, again)}
    assert decision.winner.name == EDGE_ONLY
    assert found["uplink goodput"].at is None
    assert "at no value" in str(found["uplink goodput"])
    assert found["round trip"].at == pytest.approx(48.2, rel=1e-3)


def test_the_text_tells_stages_and_break_evens() -> None:
    decision = decide(again(LINK))
    text, known = explain(decision, again(LINK), break_evens(decision, Objective(), LINK, again))
    assert text.startswith("cloud-only wins in latency: 61.8")
    assert "against edge-only: 100.000 ms" in text and "edge +100.000" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert [one["name"] for one in known["against"]] == ["edge-only"]
    assert len(known["break_even"]) == 4


def test_alone_there_is_nothing_to_compare() -> None:
    (only,) = predict(EDGE, None, None)
    decision = decide([only])
    assert break_evens(decision, Objective(), LINK, again) == []
    assert "no other candidate" in explain(decision, [only], [])[0]
