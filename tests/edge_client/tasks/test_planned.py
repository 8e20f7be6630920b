"""A plan's table: whole names, the spread of what was measured, the best cut; as many columns as there is room for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_client.load import Load
from edge_client.planning.link import Curve, Link
from edge_client.planning.objective import Constraints, decide
from edge_client.planning.predict import predict
from edge_client.spoken import EDGE_ONLY
from edge_client.tasks.plan import Planned
from shared_hooks.profiling.profile import Profile, Quartiles
from tests.edge_client.planning.made import MS, Layer, profile

LAYERS = [Layer(10, 1, 40_000), Layer(20, 2, 10_000), Layer(30, 3, 400)]
LINK = Link(Curve.line(500 * MS, 1e6), Curve.line(0, 1e6))
LONG = "a_model_of_many_words.encoder.layers.11.attention.output.dense"


def spread(found: Profile, n: int = 5) -> Profile:
    """Every head and tail, and the whole: a tenth below and two tenths above."""

    def wide(one: Quartiles) -> Quartiles:
        return Quartiles(one.median, 0.9 * one.median, 1.2 * one.median, n)

    stages = [{name: wide(one) for name, one in cut.stages.items()} for cut in found.cuts]
    cuts = tuple(replace(cut, stages=own) for cut, own in zip(found.cuts, stages, strict=True))
    return replace(found, cuts=cuts, whole_ns=wide(found.whole_ns))


def planned(n: int = 5, link: Link = LINK) -> Planned:
    edge, cloud = spread(profile("edge", LAYERS), n), spread(profile("cloud", LAYERS), n)
    candidates = [replace(one, name=LONG) if one.name == "layer2" else one for one in predict(edge, cloud, link)]
    decision, limits = decide(candidates), Constraints()
    return Planned("made", decision, candidates, limits, edge, cloud, link, Load(), None, None, (), False, ())


def test_a_prediction_has_the_spread_of_what_it_is_made_of() -> None:
    found = planned()
    whole, cut = (next(row for row in found.rows() if row["name"] == name) for name in (EDGE_ONLY, "layer1"))
    assert (whole["latency_q1_ns"], whole["latency_q3_ns"]) == pytest.approx((54 * MS, 72 * MS))
    # 30.1 ms here and 3.1 ms there, independent of each other; the link was given
    assert cut["latency_ns"] - cut["latency_q1_ns"] == pytest.approx((3.01**2 + 0.31**2) ** 0.5 * MS)
    assert cut["latency_q3_ns"] - cut["latency_ns"] == pytest.approx((6.02**2 + 0.62**2) ** 0.5 * MS)
    assert found.as_dict()["candidates"][0]["latency_q1_ns"] == whole["latency_q1_ns"]
    assert "60.000 ms [54.00, 72.00] predicted>" in repr(found)
    assert "60.00 [54.00, 72.00]" in found.text() and "the given link has none" in found.text()
    quarters = Curve.line(460 * MS, 1e6), Curve.line(560 * MS, 1e6)
    probed = next(row for row in planned(link=replace(LINK, quarters=quarters)).rows() if row["name"] == "layer1")
    assert probed["latency_ns"] - probed["latency_q1_ns"] == pytest.approx((3.01**2 + 0.31**2 + 40**2) ** 0.5 * MS)


def test_of_two_repetitions_there_is_no_spread() -> None:
    found = planned(n=2)
    assert {row["latency_q3_ns"] for row in found.rows()} == {None}
    assert "60.00 " in found.text() and "no spread: fewer than 3 repetitions" in found.text()


def test_the_best_cut_has_a_line_where_one_side_alone_is_best() -> None:
    found = planned()
    assert found.best == EDGE_ONLY and found.best_cut == "layer1"
    assert "\nbest cut: layer1, 54" in found.text()
    fast = planned(link=Link(Curve.line(1 * MS, 1e7), Curve.line(0, 1e7)))
    assert fast.best == fast.best_cut == "layer0" and "best cut" not in fast.text()


def test_the_best_come_by_rank_and_names_are_whole_however_narrow() -> None:
    found = planned()
    lines = found.text(3).splitlines()
    assert "the best 3 of 5 candidates, the best first" in lines
    assert [line.split("  ")[1 if line.startswith("*") else 0].strip() for line in map(str.strip, lines[2:5])] == [
        one.name for one in found.decision.ranking[:3]
    ]
    wide, narrow = found.text().splitlines()[0], found.text(width=100).splitlines()
    assert wide.split() == ["cut", "after", "ms", "edge", "net", "server", "up", "memory"]
    assert narrow[0].split() == ["cut", "after", "ms", "edge"] and any(LONG in line for line in narrow)


def test_two_whose_spreads_overlap_are_said_to() -> None:
    found = planned(link=Link(Curve.line(1 * MS, 1e9), Curve.line(0, 1e9)))
    assert "runner-up: layer0\n" in found.text()
    near = replace(found, decision=replace(found.decision, runner_up=found.decision.winner))
    assert "their spreads overlap" in near.text()
