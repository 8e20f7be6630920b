"""Write a sweep's results from its journal: tables, summary.json, what observers saw, and the page.

The page (report.html) has charts, findings and the table of all ways.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from edge_client.pages import blocks, duration, short, stem
from edge_client.pages import render as page_of
from edge_client.planning.objective import Objective
from edge_client.screen import size
from edge_client.sweeping import runner, summary, wording
from edge_client.sweeping.records import PREDICTED, REQUESTS, ROWS, Columns, Kind, Way
from edge_client.sweeping.runner import drawn as attention
from edge_client.sweeping.runner import section
from edge_client.sweeping.settings import Entry, Journal, installed
from edge_client.sweeping.summary import SweepSummary, pareto
from edge_client.sweeping.wording import is_choice, is_cut
from edge_client.user_text import EDGE_ONLY, option
from shared_hooks.files import write_json, write_text, write_whole

if TYPE_CHECKING:
    import polars as pl


TEMPLATE: Final = Path(__file__).parent / "page.html.j2"
CHARTS: Final = ("bars", "columns", "scatter", "heat")
CONTENTS: Final = (
    ("stages", "time by stage"),
    ("agreement", "predicted and measured"),
    ("bytes", "bytes"),
    ("energy", "energy"),
    ("pareto", "what to choose between"),
    ("layers", "layers"),
    ("local", "what splitting costs"),
    ("observed", "what observers saw"),
    ("ways", "all ways"),
    ("failures", "what failed"),
    ("facts", "how it was measured"),
)
_WayFound = Mapping[str, Any]


def render(known: Mapping[str, Any]) -> str:
    """Render summary.json (`outcome.Summary.as_dict`) as HTML."""
    ways, decision = known["ways"], known["decision"]
    choices = [way for way in ways if is_choice(way) and way["latency_ns"] is not None]
    winner = decision["measured"]["winner"] if decision["measured"] else None
    whole = next((way["segments_ns"]["edge"] for way in choices if way["name"] == EDGE_ONLY), None)
    model = known["settings"]["model"]
    costly = [way for way in choices if way["edge_energy"]["value"] is not None]
    leakage = known.get("leakage", {})
    leaking = [way for way in choices if way["name"] in leakage]
    names = [way["name"] for way in ways if is_cut(way)]
    names += [one["layer"] for one in known["layers"] if one["layer_id"] is not None]
    drawn = {
        "file": stem(model),
        "model": model,
        "ways": ways,
        "layers": known["layers"],
        "blocks": blocks(list(dict.fromkeys(names))),
        "winner": winner,
        "whole_ns": whole,
        "fronts": {
            "bytes": _front(choices, lambda way: way["bytes_up"] + way["bytes_down"]),
            "energy": _front(costly, lambda way: way["edge_energy"]["value"]),
            "leakage": _front(leaking, lambda way: leakage[way["name"]]),
        },
        "leakage": leakage,
        "attention": attention(known),
        "engines": known.get("engines", {}),
    }
    observed = section(known)
    failures = [
        f"{one['count']} times, first with {one['input']} at {one['cut']} ({one['mode']}): {one['error']}"
        for one in known["failures"]
    ]
    there = {"observed": observed, "failures": failures}
    tables = [
        _table("Every way to run a request", [way for way in ways if is_choice(way)], winner),
        _table("The cuts again, in one process", [way for way in ways if not is_choice(way)], None),
        *(_engine_table(name, one, ways) for name, one in known.get("engines", {}).items()),
    ]
    return page_of(
        TEMPLATE,
        CHARTS,
        drawn,
        title=f"{model}: a sweep over {sum(1 for way in choices if is_cut(way))} cuts",
        kicker="Isthmus sweep",
        heading=f"Where to cut {model}",
        lead=wording.lead(known),
        partial=wording.partial(known),
        engines=list(known.get("engines", {})),
        contents=[one for one in CONTENTS if there.get(one[0], True)],
        cards=wording.cards(ways, decision, winner),
        explanation=wording.explanation(known),
        plan=(known["prediction"] or {}).get("explanation"),
        agreement=wording.agreement(decision, known["prediction"]),
        energy=wording.energy_lines(choices),
        front_energy=bool(costly),
        front_leakage=bool(leaking),
        local=wording.local(ways, whole),
        tables=tables,
        observed=observed,
        failures=failures,
        facts=wording.facts(known),
    )


def _front(ways: Sequence[_WayFound], cost: Any) -> list[str]:
    return [ways[index]["name"] for index in pareto([(way["latency_ns"], cost(way)) for way in ways])]


HEADERS: Final = (
    *("way", "layer", "latency", "quartiles", "predicted", "off by", "up", "down"),
    *("energy, edge", "energy, cloud", "exact", "same top 1", "failed"),
)


def _table(title: str, ways: Sequence[_WayFound], winner: str | None) -> dict[str, Any]:
    """Return title, headers, rows and the indices of the best ones, without empty columns."""
    rows = [_row(way) for way in ways]
    reported = [
        at for at in range(len(HEADERS)) if at < 3 or any(row[at] not in ("", "–", "unavailable") for row in rows)
    ]
    return {
        "title": title,
        "headers": [HEADERS[at] for at in reported],
        "rows": [[row[at] for at in reported] for row in rows],
        "best": [at for at, way in enumerate(ways) if way["name"] == winner],
    }


def _engine_table(name: str, measured: Mapping[str, Any], ways: Sequence[_WayFound]) -> dict[str, Any]:
    """Return the table of requests with heads in another engine, next to torch's."""
    torchs = {way["name"]: way["latency_ns"] for way in ways if is_choice(way) and is_cut(way)}
    cuts = measured["cuts"]
    best = min(cuts, key=lambda cut: cuts[cut]["latency_ns"], default=None)
    rows = [
        [
            cut,
            duration(one["latency_ns"]),
            "–" if torchs.get(cut) is None else duration(torchs[cut]),
            duration(one["head_ns"]),
            size(round(one["bytes_up"])),
            f"{one['difference']:.1e}",
        ]
        for cut, one in cuts.items()
    ]
    return {
        "title": f"Heads in {name}",
        "headers": ["cut", "latency", "with torch", "head", "up", "off by"],
        "rows": rows,
        "best": [at for at, cut in enumerate(cuts) if cut == best],
    }


def _row(way: _WayFound) -> list[str]:
    predicted, quartiles = way["predicted"], way["quartiles_ns"]
    answered = way["requests"] - way["failed"]
    off = predicted["error_percent"] if predicted else None
    spread = "–" if quartiles is None else f"{duration(quartiles[0])} to {duration(quartiles[2])}"
    return [
        way["name"],
        str(way["layer_id"]) if is_cut(way) else "",
        "–" if quartiles is None else duration(way["latency_ns"]),
        spread,
        duration(predicted["latency_ns"]) if predicted else "–",
        "–" if off is None else f"{off:+.1f} %",
        "–" if way["bytes_up"] is None else size(round(way["bytes_up"])),
        "–" if way["bytes_down"] is None else size(round(way["bytes_down"])),
        _joules(way["edge_energy"]),
        _joules(way["cloud_energy"]),
        f"{way['exact']} of {answered}",
        "–" if way["agreeing"] is None else f"{way['agreeing']} of {answered}",
        str(way["failed"] or ""),
    ]


def _joules(reading: Mapping[str, Any]) -> str:
    value = reading["value"]
    if value is None:
        return "unavailable"
    for factor, unit in ((1.0, "J"), (1e-3, "mJ")):
        if abs(value) >= factor:
            return f"{short(value / factor)} {unit}, {reading['status']}"
    return f"{short(value / 1e-6)} µJ, {reading['status']}"


# The two tables as CSV and as Parquet, with equal content.


def schema(columns: Columns) -> dict[str, Any]:
    """Return the columns as polars types."""
    import polars as pl

    kinds: dict[Kind, Any] = {"text": pl.String, "integer": pl.Int64, "number": pl.Float64, "flag": pl.Boolean}
    return {name: kinds[kind] for name, kind in columns.items()}


def frames(entries: Iterable[Entry], predicted: Mapping[str, Mapping[str, Any]]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return (requests, rows) of the journal's entries; ``predicted``: candidate's name -> its dictionary."""
    import polars as pl

    columns = {"requests": schema(REQUESTS), "rows": schema(ROWS)}
    parts = {table: [pl.DataFrame(schema=own)] for table, own in columns.items()}
    for entry in entries:  # one after the other: a column of polars is a tenth the size of a Python list
        for table, own in columns.items():
            parts[table].append(pl.DataFrame(entry[table], schema=own))
    reported = {name: _predicted(one) for name, one in predicted.items()}
    predictions = pl.DataFrame(
        [{"cut": name, **cells} for name, cells in reported.items()], schema={"cut": pl.String, **schema(PREDICTED)}
    )
    requests = pl.concat(parts["requests"]).join(predictions, on="cut", how="left", maintain_order="left")
    # nothing was predicted for a local split: it has no network
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
    """Write requests.csv, requests.parquet, rows.csv, rows.parquet, each atomically. Raises SpecError."""
    for name, frame in (("requests", requests), ("rows", rows)):
        write_whole(folder / f"{name}.csv", frame.write_csv, option("output"))
        write_whole(folder / f"{name}.parquet", frame.write_parquet, option("output"))


def write(
    journal: Journal,
    ways: Sequence[Way],
    ended: str | None,
    objective: Objective,
    leaks: Callable[[str], float | None] = lambda way: None,
) -> SweepSummary:
    """Write all results of the journal, each file atomically, and return the summary. ``ended``: why inputs are
    missing; ``leaks``: a way's leakage, if measured.
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
    found = SweepSummary(
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
    write_text(journal.folder / "report.html", render(known), option("output"))
    return found


def _write_lines(path: Path, journal: Journal) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(runner.lines(journal.entries()))
