"""From the journal to the files of results: tables, summary.json, report.html, and what observers saw."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.planning.objective import Objective
from edge_client.spoken import EDGE_ONLY, option
from edge_client.sweeping import report, runner, summary
from edge_client.sweeping.records import PREDICTED, REQUESTS, ROWS, Columns, Kind, Way
from edge_client.sweeping.settings import Entry, Journal, installed
from edge_client.sweeping.summary import Summary
from shared_hooks.files import write_json, write_text, write_whole

if TYPE_CHECKING:
    import polars as pl


# The two tables as CSV and as Parquet, which say the same.


def schema(columns: Columns) -> dict[str, Any]:
    """Columns as polars' types."""
    import polars as pl

    kinds: dict[Kind, Any] = {"text": pl.String, "integer": pl.Int64, "number": pl.Float64, "flag": pl.Boolean}
    return {name: kinds[kind] for name, kind in columns.items()}


def frames(entries: Iterable[Entry], predicted: Mapping[str, Mapping[str, Any]]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(requests, rows) of the journal's entries; ``predicted``: candidate's name -> its dictionary."""
    import polars as pl

    columns = {"requests": schema(REQUESTS), "rows": schema(ROWS)}
    parts = {table: [pl.DataFrame(schema=own)] for table, own in columns.items()}
    for entry in entries:  # one after the other: a column of polars is a tenth of a list of Python's
        for table, own in columns.items():
            parts[table].append(pl.DataFrame(entry[table], schema=own))
    said = {name: _predicted(one) for name, one in predicted.items()}
    foretold = pl.DataFrame(
        [{"cut": name, **cells} for name, cells in said.items()], schema={"cut": pl.String, **schema(PREDICTED)}
    )
    requests = pl.concat(parts["requests"]).join(foretold, on="cut", how="left", maintain_order="left")
    # of a local split nothing was predicted: the network is not in it
    local = (pl.col("mode") == "local") & (pl.col("cut") != EDGE_ONLY)
    requests = requests.with_columns(
        pl.when(local).then(None).otherwise(pl.col(name)).alias(name) for name in PREDICTED
    )
    return requests, pl.concat(parts["rows"])


def _predicted(candidate: Mapping[str, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {
        "predicted_latency_ns": float(candidate["latency_ns"]),
        "predicted_bytes_up": int(candidate["bytes_up"]),
        "predicted_bytes_down": int(candidate["bytes_down"]),
        "predicted_edge_energy_j": candidate["edge_energy"]["value"],
    }
    return cells | {f"predicted_{stage}_ns": float(ns) for stage, ns in candidate["stages_ns"].items()}


def write_tables(folder: Path, requests: pl.DataFrame, rows: pl.DataFrame) -> None:
    """requests.csv, requests.parquet, rows.csv, rows.parquet, each whole or not at all. Raises SpecError."""
    for name, frame in (("requests", requests), ("rows", rows)):
        write_whole(folder / f"{name}.csv", frame.write_csv, option("output"))
        write_whole(folder / f"{name}.parquet", frame.write_parquet, option("output"))


def write(
    journal: Journal,
    ways: Sequence[Way],
    ended: str | None,
    objective: Objective,
    leaks: Callable[[str], float | None] = lambda way: None,
) -> Summary:
    """All results of what the journal holds, each file whole or not at all; the summary. ``ended``: why inputs are
    missing; ``leaks``: what a way gives away of its input, where that was measured.
    """
    contents = journal.read()
    assert contents.settings is not None
    prediction = contents.prediction
    predicted = {one["name"]: one for one in prediction["candidates"]} if prediction else {}
    seen: list[Entry] = []
    watched: list[dict[str, Any]] = []

    def noted() -> Iterator[Entry]:
        for entry in journal.entries():
            seen.append({key: entry[key] for key in ("input", "repetitions", "notes")})
            if "observed" in entry and len(watched) < runner.SHOWN:
                picture = {"picture": entry["picture"]} if "picture" in entry else {}
                watched.append({"input": entry["input"], **entry["observed"], **picture})
            yield entry

    requests, rows = frames(noted(), predicted)
    write_tables(journal.folder, requests, rows)
    measured = summary.ways_measured(requests, ways, predicted)
    measured = [way for way in measured if way.requests or way.name not in contents.skipped]
    found = Summary(
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        settings=contents.settings,
        measured_inputs=[entry["input"] for entry in seen],
        repetitions=[entry["repetitions"] for entry in seen],
        ended=ended,
        skipped=contents.skipped,
        versions={
            "python": platform.python_version(),
            **{name: installed(name) for name in ("isthmus", "torch", "grpcio", "numpy", "polars")},
        },
        ways=measured,
        layers=summary.layers_measured(rows),
        prediction=prediction,
        outcome=summary.outcome(measured, prediction, objective),
        failures=summary.failures(requests),
        readings=summary.readings(note for entry in seen for note in entry["notes"]),
        observed=watched,
        engines=contents.engines,
        leakage={way.name: found for way in ways if (found := leaks(way.name)) is not None},
    )
    if watched:
        write_whole(journal.folder / runner.FILE, lambda path: _write_lines(path, journal), option("output"))
    known = found.as_dict()
    write_json(journal.folder / "summary.json", known, option("output"))
    write_text(journal.folder / "report.html", report.render(known), option("output"))
    return found


def _write_lines(path: Path, journal: Journal) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(runner.lines(journal.entries()))
