"""What a pruning returns: every choice, judged; what was written and served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.pruning.page import accuracy_table, served_table, structural_table
from edge_client.pruning.report import Report
from edge_client.screen.table import table
from edge_client.spoken import either
from edge_client.tasks.tabular import Row, Tabular


@dataclass(frozen=True, repr=False)
class Pruned(Tabular):
    """`edge_client.prune` returns it. A row is one choice: a scoring, a seed of the random one, a number of channels.

    ``report``: all that was found; ``folder``: where masks, smaller models and report.html lie, None for nowhere.
    """

    report: Report
    folder: Path | None

    shown = {  # noqa: RUF012
        "scoring": "scoring",
        "seed": "seed",
        "keep": "channels",
        "accuracy": "accuracy",
        "agreement": "agreement",
        "preferred": "preferred",
    }

    @property
    def chosen(self) -> dict[int, str]:
        """The scoring that the calibration data prefer, by number of channels."""
        trial = self.report.trial
        return {keep: row.scoring for keep in trial.keeps if (row := trial.chosen(keep)) is not None}

    @property
    def all_exact(self) -> bool:
        """Whether every answer of the service was the same model's in one process; True where nothing was served."""
        return self.report.all_exact

    def title(self) -> str:
        report = self.report
        kept = ", ".join(f"{keep} by {scoring}" for keep, scoring in self.chosen.items())
        return f"{report.model}: {report.channels} channels of {report.layer}; preferred: {kept}"

    def rows(self) -> list[Row]:
        trial = self.report.trial
        return [
            {
                "scoring": row.scoring,
                "seed": row.seed,
                "keep": row.keep,
                "channels": self.report.channels,
                "accuracy": row.judged.accuracy,
                "agreement": row.judged.agreement,
                "loss_points": 100 * (trial.whole.value - row.judged.value),
                "calibration": None if row.calibration is None else row.calibration.value,
                "preferred": self.chosen.get(row.keep) == row.scoring,
            }
            for row in trial.rows
        ]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return self.report.as_dict()

    def text(self) -> str:
        report = self.report
        headers, rows = accuracy_table(report)
        lines = [
            f"{report.model}: {report.channels} channels of {report.layer}",
            f"chosen by {report.calibration_inputs} inputs, judged on {report.inputs} others",
            f"the whole model's {report.metric}: {100 * report.trial.whole.value:.2f} %\n",
            f"{report.metric} in %, by channels kept (* = preferred by the calibration inputs)",
            table(headers, rows, right=range(1, len(headers))),
        ]
        if report.smaller:
            headers, rows = structural_table(report)
            lines += ["\ncut out of the model", table(headers, rows, right=(0, 2, 3, 4))]
        if report.served:
            headers, rows = served_table(report)
            lines += ["\nthrough a server on this machine", table(headers, rows, right=range(1, len(headers)))]
        if self.folder is not None:
            written = ", ".join(Path(file).name for file in report.files)
            lines.append(f"\nwritten to {self.folder}: report.html, {written}")
            taken = either("--selection FILE", "ModelChoice(..., selection=FILE)")
            lines.append(f"served by both sides with {taken}; cut a masked model at {report.trial.split}")
        return "\n".join(lines)
