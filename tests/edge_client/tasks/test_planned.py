"""A plan's table: whole names, the spread of what was measured, the best cut; as many columns as there is room for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_client.call import Load
from edge_client.planning.link import Curve, Link
from edge_client.planning.objective import Constraints, decide
from edge_client.planning.predict import BATCHES, Correction, RequestSample, predict
from edge_client.tasks.plan import Planned
from edge_client.user_text import EDGE_ONLY
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


def planned(link: Link = LINK, correction: Correction | None = None) -> Planned:
    edge, cloud = spread(profile("edge", LAYERS)), spread(profile("cloud", LAYERS))
    found = predict(edge, cloud, link, correction=correction)
    candidates = [replace(one, name=LONG) if one.name == "layer2" else one for one in found]
    decision, limits = decide(candidates), Constraints()
    return Planned("made", decision, candidates, limits, edge, cloud, link, Load(), correction, None, (), False, ())


def corrected_by(cuts: int = 9) -> Correction:
    samples = [RequestSample(f"cut{number}", 100 * MS, (110 + number) * MS) for number in range(cuts)]
    return Correction.fit(BATCHES * samples, [RequestSample(EDGE_ONLY, 60 * MS, 63 * MS)])


def test_an_interval_is_by_the_worst_of_nine_real_requests() -> None:
    corrected = corrected_by()
    assert (corrected.overhead_ns, corrected.alone_ns, corrected.error_ns) == (14 * MS, 3 * MS, 4 * MS)
    found = planned(correction=corrected)
    whole, cut = (next(row for row in found.rows() if row["name"] == name) for name in (EDGE_ONLY, "layer1"))
    assert (whole["latency_low_ns"], whole["latency_ns"], whole["latency_high_ns"]) == (59 * MS, 63 * MS, 67 * MS)
    assert cut["latency_high_ns"] - cut["latency_ns"] == pytest.approx(4 * MS)
    assert found.as_dict()["candidates"][0]["latency_low_ns"] == whole["latency_low_ns"]
    assert "63.000 ms [59.0, 67.0] predicted>" in repr(found)
    assert "63.00 [59.0, 67.0]" in found.text() and "nine times of ten, by real requests at 9 cuts" in found.text()


def test_fewer_real_requests_give_no_interval() -> None:
    found = planned(correction=Correction.fit([RequestSample("cut", 100 * MS, 110 * MS)]))
    assert {row["latency_high_ns"] for row in found.rows()} == {None}
    assert "no intervals: they take real requests at 9 cuts; real requests were made at 1 of them" in found.text()
    assert "no intervals: they take real requests at 9 cuts; no real requests were made" in planned().text()


def test_unsteady_measurements_are_not_ranked() -> None:
    """Unless all of it was, or it is the fastest even when it is slow."""
    steady, edge, cloud = planned(), profile("edge", LAYERS), profile("cloud", LAYERS)
    assert steady.best == EDGE_ONLY
    shaky = replace(edge, whole_ns=Quartiles(60 * MS, 20 * MS, 800 * MS, 5), bare_ns=None)
    found = decide(predict(shaky, cloud, LINK))
    assert found.winner.name != EDGE_ONLY and EDGE_ONLY not in [one.name for one in found.ranking]
    assert found.rejected[EDGE_ONLY] == "measured too unsteadily to rank: 20.0 to 800.0 ms on the edge"
    assert decide(predict(shaky, None, None)).winner.name == EDGE_ONLY
    faster = replace(edge, whole_ns=Quartiles(60 * MS, 20 * MS, 200 * MS, 5), bare_ns=None)
    assert decide(predict(faster, cloud, LINK)).winner.name == EDGE_ONLY, "all others take more than 500 ms"


def test_the_best_cut_has_a_line_where_one_side_alone_is_best() -> None:
    found = planned()
    assert found.best == EDGE_ONLY and found.best_cut == "layer1"
    assert "\nbest cut: layer1, 54" in found.text()
    fast = planned(link=Link(Curve.line(1 * MS, 1e7), Curve.line(0, 1e7)))
    assert fast.best == fast.best_cut == "layer0" and "best cut" not in fast.text()


def test_the_best_come_by_rank_and_names_are_whole_however_narrow() -> None:
    found = planned(correction=corrected_by())
    lines = found.text(3).splitlines()
    assert "the best 3 of 5 candidates, the best first" in lines
    assert [line.split("  ")[1 if line.startswith("*") else 0].strip() for line in map(str.strip, lines[2:5])] == [
        one.name for one in found.decision.ranking[:3]
    ]
    wide, narrow = found.text().splitlines()[0], found.text(width=100).splitlines()
    assert wide.split() == ["cut", "after", "ms", "edge", "net", "server", "up", "memory"]
    assert narrow[0].split() == ["cut", "after", "ms", "edge"] and any(LONG in line for line in narrow)


def test_overlapping_intervals_are_reported() -> None:
    found = planned(Link(Curve.line(1 * MS, 1e9), Curve.line(0, 1e9)), Correction((), 0.0))
    assert "runner-up: layer0\n" in found.text()
    found = planned(Link(Curve.line(1 * MS, 1e9), Curve.line(0, 1e9)), corrected_by())
    near = replace(found, decision=replace(found.decision, runner_up=found.decision.winner))
    assert "their intervals overlap" in near.text()
