"""From the journal to the files of results: tables, summary.json, report.html, and what observers saw."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edge_client.planning.objective import Objective
from edge_client.sweeping import observed, report, summary, tables
from edge_client.sweeping.journal import Entry, Journal
from edge_client.sweeping.outcome import Summary
from edge_client.sweeping.settings import installed
from edge_client.sweeping.ways import Way


def write(journal: Journal, ways: Sequence[Way], ended: str | None, objective: Objective) -> Summary:
    """All results of what the journal holds, each file whole or not at all; the summary. ``ended``: why inputs are
    missing.
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
            if "observed" in entry and len(watched) < observed.SHOWN:
                picture = {"picture": entry["picture"]} if "picture" in entry else {}
                watched.append({"input": entry["input"], **entry["observed"], **picture})
            yield entry

    requests, rows = tables.frames(noted(), predicted)
    tables.write(journal.folder, requests, rows)
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
    )
    if watched:
        tables.whole_file(journal.folder / observed.FILE, lambda path: _write_lines(path, journal))
    known = found.as_dict()
    text = json.dumps(known, indent=1, allow_nan=False)
    tables.whole_file(journal.folder / "summary.json", lambda path: path.write_text(text + "\n", encoding="utf-8"))
    page = report.render(known)
    tables.whole_file(journal.folder / "report.html", lambda path: path.write_text(page, encoding="utf-8"))
    return found


def _write_lines(path: Path, journal: Journal) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(observed.lines(journal.entries()))
