"""Tables and numbers: CSV and Parquet say the same, and what a bar is made of adds up to what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_client.planning.objective import STAGES, Objective
from edge_client.sweeping import report, summary
from edge_client.sweeping.records import OUTSIDE, PREDICTED, REQUESTS, ROWS, SEGMENTS, STAGE_SEGMENTS, TIMES
from edge_client.sweeping.report import write
from edge_client.sweeping.settings import open_journal
from shared_hooks.metrics.records import Reading
from tests.edge_client.sweeping import synthetic

ENERGIES = [
    synthetic.NO_METER,
    Reading.measured(0.25, "a meter"),
    Reading.estimated(1 / 3, "a share by time"),
]


def read_back(folder: Path, name: str, columns: Any) -> tuple[pl.DataFrame, pl.DataFrame]:
    csv = pl.read_csv(folder / f"{name}.csv", schema=report.schema(columns))
    return csv, pl.read_parquet(folder / f"{name}.parquet")


@settings(suppress_health_check=list(HealthCheck), max_examples=25)
@given(
    name=st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), min_size=1, max_size=12),
    error=st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), min_size=1, max_size=20),
    energy=st.sampled_from(ENERGIES),
)
def test_csv_and_parquet_say_the_same(tmp_path: Path, name: str, error: str, energy: Reading) -> None:
    ways = synthetic.ways(3)
    entries = [
        synthetic.entry(index, ways, name=name, energy=energy, failing=ways[4].name, error=error, repetitions=2)
        for index in range(2)
    ]
    plan = synthetic.prediction(summary.ways_measured(report.frames(entries, {})[0], ways, {}))
    requests, rows = report.frames(entries, {one["name"]: one for one in plan["candidates"]})
    report.write_tables(tmp_path, requests, rows)
    for table, columns in (("requests", {**REQUESTS, **PREDICTED}), ("rows", ROWS)):
        csv, parquet = read_back(tmp_path, table, columns)
        assert csv.columns == parquet.columns == list(columns)
        assert csv.equals(parquet) and parquet.height > 0
    assert set(requests["error"].drop_nulls()) == {error}


def test_one_row_per_input_cut_side_and_layer_and_one_outside_per_side() -> None:
    ways = synthetic.ways(4)
    entries = [synthetic.entry(index, ways, name=f"{index}.png", repetitions=2) for index in range(3)]
    _, rows = report.frames(entries, {})
    key = ["input_index", "cut", "mode", "repetition", "side", "layer_id", "layer"]
    assert not rows.select(key).is_duplicated().any()
    for (_, _, _, _), part in rows.group_by("input_index", "cut", "mode", "repetition"):
        layers = part.filter(pl.col("layer_type") != "outside")
        assert sorted(layers["layer_id"]) == [0, 1, 2, 3]
        outside = part.filter(pl.col("layer") == OUTSIDE)
        assert outside["layer_id"].null_count() == outside.height == part["side"].n_unique()


def test_a_bar_is_made_of_every_row_once_and_a_plans_stages_too() -> None:
    assert sorted(name for names in SEGMENTS.values() for name in names) == sorted(TIMES)
    assert sorted(one for names in STAGE_SEGMENTS.values() for one in names) == sorted(SEGMENTS)
    assert tuple(STAGE_SEGMENTS) == STAGES


def test_pieces_of_a_way_add_up_and_lie_between_the_extremes() -> None:
    ways = synthetic.ways(5)
    requests, _ = report.frames([synthetic.entry(0, ways, repetitions=9)], {})
    for way, found in zip(ways, summary.ways_measured(requests, ways, {}), strict=True):
        mine = requests.filter(~pl.col("layers"), (pl.col("cut") == way.name) & (pl.col("mode") == way.mode))[
            "end_to_end_ns"
        ]
        assert found.timed is not None
        low, middle, high = found.timed.quartiles_ns
        assert mine.min() <= low <= middle <= high <= mine.max()
        assert low <= found.timed.latency_ns == sum(found.timed.segments_ns.values()) <= high
        assert (found.requests, found.failed, found.exact, found.agreeing) == (10, 0, 10, 10)


def test_a_way_that_always_failed_has_nothing_but_its_errors() -> None:
    known = synthetic.known(3, failing="cloud-only", error="Boom: no")
    way = next(one for one in known["ways"] if one["name"] == "cloud-only")
    assert way["failed"] == way["requests"] == 10 and way["latency_ns"] is None and way["predicted"] is None
    assert known["failures"] == [
        {"error": "Boom: no", "count": 10, "cut": "cloud-only", "mode": "networked", "input": "a.png"}
    ]
    assert "cloud-only" not in known["decision"]["measured"]["ranking"]


@pytest.mark.parametrize("energy", ENERGIES)
def test_energy_says_how_it_was_come_by(energy: Reading) -> None:
    known = synthetic.known(2, energy=energy)
    for way in known["ways"]:
        found = way["edge_energy"]
        assert found["status"] == energy.status or way["name"] == "cloud-only" or found["value"] is None
        if found["value"] is not None:
            assert found["value"] == pytest.approx(energy.value) and found["note"] == energy.note
    columns = {(one["column"], one["status"], one["note"]) for one in known["readings"]}
    assert ("energy_j", energy.status, energy.note) in columns


def test_the_decision_is_by_the_objective_and_says_what_following_the_plan_costs() -> None:
    known = synthetic.known(6)
    choice = [way for way in known["ways"] if way["mode"] == "networked" or way["name"] == "edge-only"]
    assert known["decision"]["measured"]["winner"] == min(choice, key=lambda way: way["latency_ns"])["name"]
    assert known["decision"]["regret_percent"] == 0
    assert known["decision"]["median_error_percent"] == pytest.approx(5)
    assert synthetic.known(6, objective="bytes")["decision"]["measured"]["winner"] == "edge-only"
    without = synthetic.known(6, objective="energy")["decision"]
    assert without["measured"] is None and "no energy meter here" in without["why_not"]


def test_without_a_prediction_there_is_none() -> None:
    known = synthetic.known(3, predicted=False)
    assert all(way["predicted"] is None for way in known["ways"])
    assert known["decision"]["predicted"] is None and known["decision"]["median_error_percent"] is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_pareto_front_is_not_dominated(points: list[tuple[int, int]]) -> None:
    front = summary.pareto([(float(x), float(y)) for x, y in points])

    def beaten(x: int, y: int) -> bool:
        return any((a <= x and b < y) or (a < x and b <= y) for a, b in points)

    assert not any(beaten(*points[one]) for one in front)
    assert {points[one] for one in front} == {point for point in points if not beaten(*point)}


def test_all_files_are_written_and_the_summary_is_json(tmp_path: Path) -> None:
    ways = synthetic.ways(3)
    with open_journal(tmp_path) as journal:
        made = synthetic.known(3)
        journal.begin(made["settings"], fresh=False)
        journal.write({"prediction": made["prediction"]})
        journal.write(synthetic.entry(0, ways, energy=Reading.measured(float("nan"), "a broken meter")))
        known = write(journal, ways, "interrupted", Objective())
    names = {"journal.jsonl", "report.html", "summary.json"}
    names |= {f"{table}.{kind}" for table in ("rows", "requests") for kind in ("csv", "parquet")}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "summary.json").read_text()) == known.as_dict()
    assert known.measured_inputs == ["image.png"] and known.ended == "interrupted"


def test_a_file_that_is_sent_as_it_is_takes_the_edge_its_waiting() -> None:
    measured = synthetic.found(2, energy=Reading.measured(0.5, "a meter")).ways
    idle = Reading.measured(2.0, "a meter")
    (file,) = [one for one in summary.candidates_measured(measured, idle) if one.name == "cloud-only-file"]
    waiting = sum(file.stages_ns[stage] for stage in ("network", "queue", "tail"))
    assert file.edge_energy.status == "estimated"
    assert file.edge_energy.value == pytest.approx(2.0 * waiting / 1e9)
    (file,) = [one for one in summary.candidates_measured(measured) if one.name == "cloud-only-file"]
    assert file.edge_energy.value is None and "idle power" in file.edge_energy.note


def test_the_summary_is_as_it_was() -> None:
    """``golden/summary.json`` is what an earlier version wrote of the same."""
    golden = Path(__file__).parent / "golden" / "summary.json"
    known = synthetic.known(
        1, inputs=["a.png"], repetitions=4, failing="cloud-only-file", error="Boom: no", observers="stem"
    )
    assert nearly(known) == nearly(json.loads(golden.read_text(encoding="utf-8")))


def nearly(found: Any) -> Any:
    """With numbers of nine digits: from Python 3.12 on `sum` rounds otherwise."""
    if isinstance(found, dict):
        return {name: nearly(one) for name, one in found.items()}
    if isinstance(found, list):
        return [nearly(one) for one in found]
    return float(f"{found:.9g}") if isinstance(found, float) else found
