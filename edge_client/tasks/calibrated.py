"""What a calibration of codecs returns: the table, and where it was written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.calibrating import intervals
from edge_client.calibrating.outputs import MEANS
from edge_client.planning.loss_table import CodecLoss, CutLosses, LossTable
from edge_client.screen.table import table
from edge_client.screen.text import printable, size
from edge_client.spoken import either
from edge_client.tasks.tabular import Row, Tabular


@dataclass(frozen=True, repr=False)
class Calibrated(Tabular):
    """`edge_client.calibrate` returns it. A row is a codec at a cut.

    ``table``: what `EdgeClient(calibration=...)` takes; ``max_loss``: what was allowed; ``folder``: where
    calibration.json and report.html lie, None for nowhere; ``warnings``: what makes the table less useful.
    """

    table: LossTable
    max_loss: float
    folder: Path | None
    warnings: tuple[str, ...] = ()

    shown = {  # noqa: RUF012
        "name": "cut after",
        "codec": "codec",
        "bytes_up": "bytes up",
        "loss": "loss",
        "loss_high": "at most",
        "accuracy": "accuracy",
        "within": "within",
    }

    @property
    def smallest(self) -> tuple[CutLosses, CodecLoss] | None:
        """The fewest bytes of all that lose no more than was allowed."""
        within = [(cut, one) for cut in self.table.cuts for one in cut.codecs if one.within(self.max_loss)]
        return min(within, key=lambda pair: pair[1].bytes_up, default=None)

    def best_at(self, cut: CutLosses) -> CodecLoss | None:
        """The fewest bytes at a cut that lose no more than was allowed; None where nothing was measured."""
        return min((one for one in cut.codecs if one.within(self.max_loss)), key=lambda one: one.bytes_up, default=None)

    def title(self) -> str:
        found, inputs = self.smallest, self.table.inputs
        best = f"; fewest bytes within it: {size(round(found[1].bytes_up))}, {_named(*found)}" if found else ""
        return f"{self.table.model.model_id}: codecs on {inputs} inputs, {percent(self.max_loss)} loss allowed{best}"

    def rows(self) -> list[Row]:
        return [
            {
                "name": cut.name,
                "layer_id": cut.layer_id,
                "frontier_bytes": cut.frontier_bytes,
                "codec": one.codec,
                "lossless": one.lossless,
                "n": one.n,
                "bytes_up": one.bytes_up,
                "loss": one.loss,
                "loss_low": one.low,
                "loss_high": one.high,
                "accuracy": one.accuracy,
                **{name: one.measures.get(name) for name in self._measures},
                "within": one.within(self.max_loss),
                "stopped": one.stopped,
            }
            for cut in self.table.cuts
            for one in cut.codecs
        ]

    @property
    def _measures(self) -> list[str]:
        return list(dict.fromkeys(name for cut in self.table.cuts for one in cut.codecs for name in one.measures))

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: the table's file, with what was asked for."""
        return {**self.table.as_dict(), "max_loss": self.max_loss, "warnings": list(self.warnings)}

    def text(self) -> str:
        """A line a cut: the fewest bytes within the loss that was allowed."""
        known, lines = self.table, []
        for cut in (one for one in known.cuts if not one.refused):
            best = self.best_at(cut)
            raw = next((one for one in cut.codecs if one.codec == "raw"), None)
            times = f"{raw.bytes_up / best.bytes_up:.1f}x" if best and raw and best.bytes_up else "-"
            sizes = [size(cut.frontier_bytes), *([size(round(best.bytes_up)), times] if best else ["-", "-"])]
            bounds = [percent(best.loss), percent(best.high)] if best else ["-", "-"]
            lines.append([printable(cut.name), best.codec if best else "-", *sizes, *bounds])
        headers = ["cut after", "codec", "frontier", "bytes up", "smaller", "loss", "at most"]
        whole = "" if known.whole_accuracy is None else f"; the whole model is right in {percent(known.whole_accuracy)}"
        below = [
            f"loss: {MEANS.get(known.kind, known.kind)}; {known.inputs} inputs, {known.labelled} with a label{whole}",
            f"at most: with {percent(known.confidence)} confidence, for each line by itself",
            *(f"refused: {printable(cut.name)}: {printable(cut.refused)}" for cut in known.cuts if cut.refused),
        ]
        if self.folder is not None:
            file = self.folder / "calibration.json"
            taken = either(
                f"--codec auto --calibration {file} --max-loss {percent(self.max_loss).replace(' ', '')}",
                f'EdgeClient(..., codec="auto", calibration="{file}", max_loss={self.max_loss:g})',
            )
            below += [f"written to {self.folder}: calibration.json, report.html; use it with {taken}"]
        return "\n".join([table(headers, lines, right=(2, 3, 4, 5, 6)), "", *below])


def _named(cut: CutLosses, one: CodecLoss) -> str:
    return f"{printable(cut.name)} with {one.codec}"


def percent(share: float | None) -> str:
    """As people read a share; three digits."""
    return "-" if share is None else f"{100 * share:.3g} %"


def too_few(table: LossTable, max_loss: float) -> str | None:
    """What to tell who has too few inputs to show that a loss is no more than ``max_loss``; None for enough."""
    if table.kind == "classes":
        most = max((one.n for cut in table.cuts for one in cut.codecs), default=0) or table.inputs
        least = intervals.needed(max_loss, table.confidence) if max_loss else 0
        if max_loss and most < least:
            shown = intervals.share(0, most, table.confidence)[1]
            return (
                f"{most} inputs show a loss of {percent(shown)} at best; {percent(max_loss)} needs {least} of them, "
                "all unchanged: until then no lossy codec is used"
            )
        return None
    if max_loss and table.inputs < intervals.LEAST_FOR_MEANS:
        return (
            f"{table.inputs} inputs show nothing of a mean; {intervals.LEAST_FOR_MEANS} at least are needed: "
            "until then no lossy codec is used"
        )
    return None
