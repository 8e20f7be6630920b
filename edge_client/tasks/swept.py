"""What a sweep returns: where its files lie, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from edge_client.modes import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from edge_client.screen.table import table
from edge_client.screen.text import milliseconds, printable, size
from edge_client.sweeping.outcome import MeasuredWay, Summary
from edge_client.tasks.tabular import Row, Tabular

if TYPE_CHECKING:
    import polars

_FEW: Final = 12
"""Ways that are all shown, one a line; of more, those worth it."""


@dataclass(frozen=True, repr=False)
class Swept(Tabular):
    """`edge_client.sweep` returns it. A row is a way to run a request, as it was measured; times in ns.

    ``folder`` holds the tables, summary.json and the page (`report`). ``measured`` of ``inputs`` inputs are in it;
    ``ended`` says why others are not, and ``failure`` what was raised. ``summary`` is None where nothing was measured.
    """

    folder: Path
    summary: Summary | None
    measured: int
    inputs: int
    ended: str | None = None
    failure: BaseException | None = None

    shown = {  # noqa: RUF012
        "name": "way",
        "mode": "",
        "latency_ns": "ms",
        "predicted_latency_ns": "predicted",
        "bytes_up": "bytes up",
        "exact": "exact",
        "requests": "of",
        "failed": "failed",
    }

    drawn = "latency_ns"

    @property
    def report(self) -> Path:
        """The page, for a browser."""
        return self.folder / "report.html"

    @property
    def best(self) -> str | None:
        """The winner's name, as measured; None where nothing can be decided on."""
        decision = self.summary.outcome.measured if self.summary else None
        return decision.winner.name if decision else None

    @property
    def ways(self) -> list[MeasuredWay]:
        """What was measured of each."""
        return list(self.summary.ways) if self.summary else []

    def requests(self) -> polars.DataFrame:
        """One row a request (docs/sweep.md): requests.parquet, as a polars frame. Its own ``to_pandas()`` needs
        pyarrow; ``pandas.DataFrame(found.requests().to_dict(as_series=False))`` does not.
        """
        import polars as pl

        return pl.read_parquet(self.folder / "requests.parquet")

    def layers(self) -> polars.DataFrame:
        """One row a request, side and layer: rows.parquet, as a polars frame, as `requests`."""
        import polars as pl

        return pl.read_parquet(self.folder / "rows.parquet")

    def as_dict(self) -> dict[str, Any]:
        """What summary.json says."""
        found: dict[str, Any] = self.summary.as_dict() if self.summary else {"ended": self.ended}
        return found

    def title(self) -> str:
        if self.summary is None:
            return f"{self.folder}: nothing was measured"
        best = f"{self.best} is best in {self.summary.outcome.objective}" if self.best else "nothing is best"
        much = "" if self.ended is None else f" ({self.measured} of {self.inputs} inputs: {self.ended})"
        return f"{self.summary.settings['model']}: {best} of {len(self.ways)} ways{much}; {self.report}"

    def rows(self) -> list[Row]:
        return [_row(way) for way in self.ways]

    def text(self) -> str:
        """The ways worth a line, the decision, and where the rest is."""
        found = self.summary
        if found is None:
            return f"nothing was measured{f': {self.ended}' if self.ended else ''}"
        decision = found.outcome
        measured = decision.measured
        best, foretold = self.best, (decision.predicted or {}).get("winner")
        shown = {EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE, best, foretold}
        shown |= {one.name for one in measured.ranking[:3]} if measured else set()
        known = [way for way in found.ways if way.mode != "local" or way.name == EDGE_ONLY]
        worth = [way for way in known if way.name in shown] if len(known) > _FEW else known
        rows = [_cells(way, {"best": best, "predicted": foretold}) for way in worth]
        headers = ["way", "ms", "predicted", "up", "exact", "failed", ""]
        lines = [table(headers, rows, right=(1, 2, 3, 4, 5)), ""]
        if len(worth) < len(known):
            lines.append(
                f"{len(worth)} of {len(known)} ways: the best, and those to compare with; all are in the report"
            )
        if decision.median_error_percent is not None:
            lines.append(f"predicted against measured: {decision.median_error_percent:.1f} % off in the median")
        answered = sum(way.answered for way in found.ways)
        if (exact := sum(way.exact for way in found.ways)) != answered:
            lines.append(f"{answered - exact} of {answered} answers are not bit for bit the whole model's")
        for one in found.failures[:5]:
            lines.append(f"{one['count']} failed, the first at {one['cut']} with {one['input']}: {one['error']}")
        return "\n".join(printable(line) for part in lines for line in part.split("\n"))


def _cells(way: MeasuredWay, marks: Mapping[str, str | None]) -> list[str]:
    timed = way.timed
    return [
        printable(way.name),
        "-" if timed is None else milliseconds(timed.latency_ns),
        milliseconds(way.predicted.latency_ns) if way.predicted else "-",
        "-" if timed is None else size(round(timed.bytes_up)),
        f"{way.exact} of {way.answered}",
        str(way.failed or ""),
        ", ".join(word for word, name in marks.items() if name == way.name),
    ]


def _row(way: MeasuredWay) -> Row:
    timed, low, high = way.timed, None, None
    if timed is not None:
        low, _, high = timed.quartiles_ns
    return {
        "name": way.name,
        "mode": way.mode,
        "layer_id": way.layer_id,
        "latency_ns": way.latency_ns,
        "latency_q1_ns": low,
        "latency_q3_ns": high,
        "predicted_latency_ns": way.predicted.latency_ns if way.predicted else None,
        "bytes_up": timed.bytes_up if timed else None,
        "bytes_down": timed.bytes_down if timed else None,
        "edge_energy_j": way.edge_energy.value,
        "edge_energy_status": way.edge_energy.status,
        "cloud_energy_j": way.cloud_energy.value,
        "requests": way.requests,
        "failed": way.failed,
        "exact": way.exact,
    }
