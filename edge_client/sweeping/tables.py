"""The two tables as CSV and as Parquet, which say the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.modes import EDGE_ONLY
from edge_client.spoken import option
from edge_client.sweeping.columns import PREDICTED, REQUESTS, ROWS, Columns, Kind
from edge_client.sweeping.journal import Entry
from shared_hooks.errors import SpecError

if TYPE_CHECKING:
    import polars as pl


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


def write(folder: Path, requests: pl.DataFrame, rows: pl.DataFrame) -> None:
    """requests.csv, requests.parquet, rows.csv, rows.parquet, each whole or not at all. Raises SpecError."""
    for name, frame in (("requests", requests), ("rows", rows)):
        whole_file(folder / f"{name}.csv", frame.write_csv)
        whole_file(folder / f"{name}.parquet", frame.write_parquet)


def whole_file(path: Path, fill: Callable[[Path], Any]) -> None:
    """``fill`` writes a file beside it, which then takes its place. Raises SpecError for what the disk says."""
    beside = path.with_name(f".{path.name}.part")
    try:
        fill(beside)
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise SpecError(f"{option('out')}: {path} cannot be written: {error.strerror or error}") from error
