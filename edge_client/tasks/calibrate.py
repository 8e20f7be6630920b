"""`calibrate`: what every codec costs in answers at every cut, on the user's own inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.calibrating import inputs, page
from edge_client.calibrating.inputs import Data, inputs_of
from edge_client.calibrating.outputs import KINDS, MEANS
from edge_client.calibrating.study import Study, set_apart
from edge_client.given import Given
from edge_client.planning.codecs import CodecLoss, CutLosses, LossTable, chosen_from, loss_of, write
from edge_client.screen.progress import progress as bar
from edge_client.screen.text import printable, size, table
from edge_client.spoken import either, option
from edge_client.survey.loading import Loaded
from edge_client.sweeping import settings
from edge_client.sweeping.records import choose
from edge_client.tasks.subject import Model, Row, Tabular, subject_of
from shared_hooks.codecs import CODECS
from shared_hooks.codecs.basis import Basis
from shared_hooks.errors import CutRefused, SpecError, near

# What a calibration of codecs returns: the table, and where it was written.


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
        least = inputs.needed(max_loss, table.confidence) if max_loss else 0
        if max_loss and most < least:
            shown = inputs.share(0, most, table.confidence)[1]
            return (
                f"{most} inputs show a loss of {percent(shown)} at best; {percent(max_loss)} needs {least} of them, "
                "all unchanged: until then no lossy codec is used"
            )
        return None
    if max_loss and table.inputs < inputs.LEAST_FOR_MEANS:
        return (
            f"{table.inputs} inputs show nothing of a mean; {inputs.LEAST_FOR_MEANS} at least are needed: "
            "until then no lossy codec is used"
        )
    return None


DEFAULT_LOSS = 0.01


def calibrate(
    model: Model,
    inputs: Data,
    *,
    labels: str | Path | None = None,
    max_loss: str | float = DEFAULT_LOSS,
    codecs: str | Sequence[str] | None = None,
    cuts: str | None = None,
    every: int | None = None,
    kind: str | None = None,
    seconds: float | None = None,
    learn: int | None = None,
    output: str | Path | None = None,
    progress: bool = True,
) -> Calibrated:
    """What every codec loses at every cut of ``model``, on ``inputs`` (docs/calibration.md). In this process alone.

        found = edge_client.calibrate("digits", "held_out/", max_loss="0.5%", output="calibrated")
        found.to_polars()         # one row a codec and cut
        client = edge_client.EdgeClient(server, "digits", codec="auto", calibration=found.table, max_loss="0.5%")

    ``inputs``: a folder or a glob of files, a sub-folder a class; or a list of inputs as for `plan`, or of (input,
    label). ``labels``: a CSV file of names and labels. ``max_loss``: what is to be allowed, which says when a codec is
    too lossy to be measured to the end. ``codecs``: names, "a,b" or a list; None: all. ``cuts``: "a,b", or every n-th;
    None: all that are allowed. ``kind`` of the output: "classes", "embedding", "boxes" or "tensors"; None: found by the
    first one. ``seconds``: no input is begun after as many. ``learn``: of the inputs, so many are set apart for the
    codec "basis" to learn from; None: one of four, 200 at most, where there are enough. ``output``: a folder for
    calibration.json and report.html.

    Raises SpecError (a wrong word or file, no inputs, labels of no input, a loss out of range), InputMismatch (an
    output of another kind), UnknownLayer, CutRefused.
    """
    allowed = loss_of(max_loss)
    names = _codecs(codecs)
    if kind is not None and kind not in KINDS:
        raise SpecError(f"{option('kind', kind)}: must be one of {', '.join(KINDS)}.{near(kind, KINDS)}")
    if learn is not None and (type(learn) is not int or learn < 0):
        raise SpecError(f"{option('learn', learn)}: expected a number of inputs, from 0 up")
    items = inputs_of(inputs, labels)
    if learn is not None and learn >= len(items):
        raise SpecError(f"{option('learn', learn)}: of {len(items)} inputs none would be left to judge by")
    apart = set(set_apart(len(items), learn)) if Basis.name in names else set()
    learnt = [item for number, item in enumerate(items) if number in apart]
    items = [item for number, item in enumerate(items) if number not in apart]
    if output is not None:
        settings.check("jinja2")
    folder = _folder(output)
    subject = subject_of(model, items[:1])
    loaded = subject.load(on_inputs=subject.by_name is False)
    with loaded.wrapped, bar("inputs", len(items), progress) as advance:
        study = Study(loaded, _cuts(loaded, cuts, every), names, allowed, kind, seconds=seconds, learnt=learnt)
        table = study.run(items, lambda done, total: advance(""))
    few, strange = too_few(table, allowed), _strange(items, loaded) if table.kind == "classes" else None
    cut_short = f"{table.inputs} of {len(items)} inputs: the time was up" if table.inputs < len(items) else None
    found = Calibrated(table, allowed, folder, tuple(text for text in (cut_short, few, strange) if text is not None))
    if folder is not None:
        write(table, folder / "calibration.json")
        (folder / "report.html").write_text(page.render(table, allowed, found.warnings), encoding="utf-8")
    return found


def _strange(items: Sequence[Given], loaded: Loaded) -> str | None:
    """What to tell who labels inputs as what the model cannot answer; None where there is nothing, or nobody knows."""
    known = loaded.spec.labels
    wrong = sorted({one.truth for one in items if known and one.truth is not None} - {*known})
    if not wrong:
        return None
    return f'"{wrong[0]:.80}" is no label of the model: inputs so labelled count as wrong.{near(wrong[0], known)}'


def _codecs(wanted: str | Sequence[str] | None) -> list[str]:
    if wanted is None:
        return [*chosen_from(), Basis.name]
    names = [name.strip() for name in (wanted.split(",") if isinstance(wanted, str) else wanted)]
    wrong = next((name for name in names if name not in CODECS), None)
    if wrong is not None or not names:
        given = ",".join(names)
        listed = f"{', '.join(CODECS)}.{near(wrong or '', CODECS)}"
        raise SpecError(f'{option("codecs", given)}: "{wrong or ""}" is not one of {listed}')
    return list(dict.fromkeys(["raw", *names]))  # against which the others are shown


def _cuts(loaded: Loaded, cuts: str | None, every: int | None) -> list[str]:
    """By name; unless others are named with "input", and without the last layer, after which nothing runs."""
    plan = loaded.wrapped.plan(*loaded.args, **loaded.kwargs)
    chosen = choose(plan.cuts, cuts, every)
    if cuts is None:
        chosen = [one for one in chosen if one[1] < len(plan.layers) - 1]
    names = [name for name, _ in chosen]
    if cuts is not None and "input" not in [word.strip() for word in cuts.split(",")]:
        return names
    try:
        plan.cutting("input")
    except CutRefused:
        if cuts is not None:
            raise
        return names
    return ["input", *names]


def _folder(output: str | Path | None) -> Path | None:
    if output is None:
        return None
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"{option('output')}: {output} cannot be written: {error.strerror}") from error
    return Path(output)
