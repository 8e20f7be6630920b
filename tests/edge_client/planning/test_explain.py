"""A break-even is where winner and runner-up score the same; where there is none, that is said."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from edge_client.planning.explain import BreakEven, break_evens, crossing, explain, round_trip, uplink
from edge_client.planning.link import Curve, Link, Speed
from edge_client.planning.objective import Candidate, Objective, decide
from edge_client.planning.partitioners import chosen
from edge_client.planning.predict import predict
from edge_client.user_text import EDGE_ONLY
from tests.edge_client.planning.made import MS, Layer, profile

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


def test_impossible_changes_are_stated() -> None:
    slow = Link(Curve.line(500 * MS, 1e6), Curve.line(0, 1e6))  # the round trip alone is longer than the edge
    decision = decide(again(slow))
    found = {one.what: one for one in break_evens(decision, Objective(), slow, again)}
    assert decision.winner.name == EDGE_ONLY
    assert found["uplink goodput"].at is None
    assert str(found["uplink goodput"]) == "uplink goodput: no change would do"
    assert found["round trip"].at == pytest.approx(48.2, rel=1e-3)


def test_the_text_tells_stages_and_break_evens() -> None:
    decision = decide(again(LINK))
    text, known = explain(decision, again(LINK), break_evens(decision, Objective(), LINK, again))
    assert text.startswith("cloud-only wins in latency: 61.8")
    assert "\nedge-only takes 100.000 ms, 38.200 ms more\n  stage by stage, ms: edge +100.000" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert [one["name"] for one in known["against"]] == ["edge-only"]
    assert len(known["break_even"]) == 4


def test_another_objectives_own_figure_is_reported_and_the_latency_beside_it() -> None:
    decision = decide(again(LINK), Objective.parse("server-time"))
    text = explain(decision, again(LINK), [])[0]
    assert text.startswith("edge-only wins in server-time: 0.000 ms (latency 100.000 ms)\n")


def test_one_figure_for_the_link_is_reported_now_and_at_the_break_even() -> None:
    """The probe's own figure, and not the slope of its curve, of which the break-even is so many times as much."""
    link = replace(LINK, measured_up=Speed(2e6, 1.9e6, 2.1e6))
    goodput = break_evens(decide(again(link)), Objective(), link, again)[0]
    assert goodput.now == 16 and goodput.at == pytest.approx(16 * 50.2 / 88.4, rel=1e-3)
    unknown = replace(LINK, measured_up=Speed(None, None, None, "noise"))
    goodput = break_evens(decide(again(unknown)), Objective(), unknown, again)[0]
    assert str(goodput) == "uplink goodput: below 4.543 Mbit/s (now cannot be known)"


def test_unchangeable_by_one_factor_is_one_line() -> None:
    decision = decide(again(LINK))
    never = [BreakEven(what, "x", 1.0, None) for what in ("uplink goodput", "edge speed")]
    text = explain(decision, again(LINK), never)[0]
    assert text.endswith("\nedge-only would not win by a change of one alone: uplink goodput, edge speed")


def test_the_best_cut_is_compared_where_one_side_alone_wins() -> None:
    link = Link(Curve.line(500 * MS, 1e6), Curve.line(0, 1e6))
    layers = [Layer(60, 0.5, 90_000), Layer(40, 0.5, 50_000)]
    candidates = predict(profile("edge", layers, encode_ms=0.0), profile("cloud", layers), link)
    decision = decide(candidates)
    assert decision.winner.name == EDGE_ONLY and decision.best_cut is not None
    # fewer bytes cross after layer1, and the server would have nothing to do
    assert decision.best_cut.name == decision.as_dict()["best_cut"] == "layer0"
    assert "layer0 takes 65" in explain(decision, candidates, [])[0]
    assert decide(again(link)).best_cut is None


def test_alone_there_is_nothing_to_compare() -> None:
    (only,) = predict(EDGE, None, None)
    decision = decide([only])
    assert break_evens(decision, Objective(), LINK, again) == []
    assert "no other candidate" in explain(decision, [only], [])[0]


def test_the_runner_up_must_beat_all_others_not_the_winner_alone() -> None:
    """Slower and slower links: another cut takes over before the runner-up beats the winner."""
    edge = profile("edge", [Layer(20, 1, 60_000), Layer(20, 1, 1_000)], input_bytes=50_000, encode_ms=0.0)
    cloud = profile("cloud", [Layer(20, 1, 60_000), Layer(20, 1, 1_000)], input_bytes=50_000)

    def predicted(link: Link, edge_factor: float = 1.0, server_factor: float = 1.0) -> list[Candidate]:
        return predict(edge, cloud, link, edge_factor=edge_factor, server_factor=server_factor)

    link = Link(Curve.line(1 * MS, 1e7), Curve.line(0, 1e9))
    decision = decide(predicted(link))
    assert decision.winner.name == "cloud-only" and decision.runner_up is not None
    for one in break_evens(decision, Objective(), link, predicted):
        if one.at is None or one.what != "uplink goodput":
            continue
        changed = decide(predicted(uplink(link, one.at / one.now * (1.0001 if one.at > one.now else 0.9999))))
        assert changed.winner.name == decision.runner_up.name


def test_weights_are_scaled_as_the_decision_scales_them() -> None:
    weights = Objective.parse("latency=1,bytes=0.2")

    def all_of(link: Link, edge: float = 1.0, server: float = 1.0) -> list[Candidate]:
        return predict(EDGE, CLOUD, link, edge_factor=edge, server_factor=server)

    decision = decide(all_of(LINK), weights)
    found = {one.what: one for one in break_evens(decision, weights, LINK, all_of)}
    speed = found["edge speed"]
    assert decision.runner_up is not None and speed.at is not None
    for nudge, name in ((1 + 1e-6, decision.runner_up.name), (1 - 1e-6, decision.winner.name)):
        factor = speed.at * (nudge if speed.at > 1 else 1 / nudge)
        assert decide(all_of(LINK, edge=1 / factor), weights).winner.name == name


def test_where_something_else_decided_no_break_even_is_claimed() -> None:
    decision = chosen(decide(again(LINK)), again(LINK)[0], "fixed")
    assert break_evens(decision, Objective(), LINK, again) == []
    assert "is not known" in explain(decision, again(LINK), [])[0]


def test_a_crossing_in_the_middle_is_found() -> None:
    assert crossing(lambda factor: 0.5 - abs(math.log(factor) - 3)) == pytest.approx(math.exp(2.5))
