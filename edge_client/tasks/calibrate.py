"""Measure the accuracy that every codec costs at every cut, on the user's own inputs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from edge_client import interrupts
from edge_client.calibrating import inputs
from edge_client.calibrating.inputs import Data, inputs_of
from edge_client.calibrating.outputs import KINDS, MEANS
from edge_client.calibrating.study import State, Study, set_apart
from edge_client.options import CalibrateOptions
from edge_client.pages import counted, stem
from edge_client.pages import render as page_of
from edge_client.planning.codecs import (
    DOMINATED,
    CodecLoss,
    CutLosses,
    LossTable,
    chosen_from,
    loss_of,
    write,
)
from edge_client.screen import Row, Tabular, printable, size, table
from edge_client.screen import progress as bar
from edge_client.survey import Say
from edge_client.sweeping import settings
from edge_client.sweeping.records import choose
from edge_client.sweeping.settings import NAME, continued, installed
from edge_client.tasks.subject import Model, subject_of
from edge_client.user_input import LoadedModel, NamedInput
from edge_client.user_text import either, option
from shared_hooks.codecs import CODECS, check
from shared_hooks.codecs.basis import Basis
from shared_hooks.errors import CutRefused, SpecError, near
from shared_hooks.files import make_folder, write_text
from shared_hooks.options import takes

TEMPLATE: Final = Path(__file__).parent / "calibrate.html.j2"
MOST_CUTS: Final = 8
"""Cuts drawn in the report; the table has all."""


def render(table: LossTable, max_loss: float, warnings: Sequence[str] = ()) -> str:
    """Render the report as HTML. ``max_loss``: the allowed loss, 0 to 1."""
    model = printable(table.model.model_id)
    drawn = _drawn(table, max_loss)
    return page_of(
        TEMPLATE,
        (),
        {
            "file": stem(f"{model}-codecs"),
            "model": model,
            "kind": table.kind,
            "max_loss": max_loss,
            "cuts": [_series(cut, max_loss) for cut in drawn],
        },
        title=f"{model}: codecs",
        kicker="Isthmus calibrate",
        heading=f"{model}: what codecs cost at every cut",
        lead=f"Measured on {counted(table.inputs, 'input')}: head, codec and tail, against the whole model.",
        partial=" ".join(warnings) or None,
        contents=[("rate", "rate against loss"), ("codecs", "every cut")],
        cards=_cards(table, max_loss),
        meaning=MEANS.get(table.kind, table.kind),
        confidence=_percent(table.confidence),
        allowed=_percent(max_loss),
        left_out=len(table.cuts) - len(drawn),
        rows=_table(table, max_loss),
        refused=[(printable(cut.name), printable(cut.refused)) for cut in table.cuts if cut.refused],
    )


def _drawn(table: LossTable, max_loss: float) -> list[CutLosses]:
    """Return the cuts with the fewest bytes within the loss, one per frontier size, in the order of the layers."""
    sizes: dict[int, CutLosses] = {}
    for cut in table.cuts:
        known = sizes.get(cut.frontier_bytes)
        if cut.codecs and (known is None or _least(cut, max_loss) < _least(known, max_loss)):
            sizes[cut.frontier_bytes] = cut
    best = sorted(sizes.values(), key=lambda cut: _least(cut, max_loss))[:MOST_CUTS]
    return sorted(best, key=lambda cut: cut.layer_id)


def _least(cut: CutLosses, max_loss: float) -> float:
    return min((one.bytes_up for one in cut.codecs if one.within(max_loss)), default=float("inf"))


def _series(cut: CutLosses, max_loss: float) -> dict[str, Any]:
    points = sorted(cut.codecs, key=lambda one: (one.bytes_up, one.loss))
    return {"name": printable(cut.name), "points": [_point(one, max_loss) for one in points]}


def _point(one: CodecLoss, max_loss: float) -> dict[str, Any]:
    return {
        "codec": one.codec,
        "bytes": one.bytes_up,
        "loss": one.loss,
        "low": one.low,
        "high": one.high,
        "n": one.n,
        "within": one.within(max_loss),
    }


def _cards(table: LossTable, max_loss: float) -> list[dict[str, str]]:
    cards = []
    pairs = [(cut, one) for cut in table.cuts for one in cut.codecs]
    if within := [pair for pair in pairs if pair[1].within(max_loss)]:
        cut, one = min(within, key=lambda pair: pair[1].bytes_up)
        raw = next((each.bytes_up for each in cut.codecs if each.codec == "raw"), None)
        times = f", {raw / one.bytes_up:.1f} times fewer than raw there" if raw and one.bytes_up else ""
        figure, name = size(round(one.bytes_up)), f"{printable(cut.name)}, {one.codec}"
        cards.append(_card(f"Fewest bytes within {_percent(max_loss)}", figure, name, f"a request{times}"))
    if lossless := [pair for pair in pairs if pair[1].lossless]:
        cut, one = min(lossless, key=lambda pair: pair[1].bytes_up)
        figure, name = size(round(one.bytes_up)), f"{printable(cut.name)}, {one.codec}"
        cards.append(_card("Fewest bytes without loss", figure, name, "a request"))
    if table.whole_accuracy is not None:
        labelled = f"of {counted(table.labelled, 'labelled input')}"
        cards.append(_card("The whole model is right in", _percent(table.whole_accuracy), labelled, ""))
    return cards


def _card(title: str, figure: str, name: str, text: str) -> dict[str, str]:
    return {"title": title, "figure": figure, "name": name, "text": text}


def _table(table: LossTable, max_loss: float) -> tuple[list[str], list[list[str]], list[int]]:
    """Return (headers, rows, indices of rows within the loss)."""
    measures = list(dict.fromkeys(name for cut in table.cuts for one in cut.codecs for name in one.measures))
    headers = ["cut after", "codec", "bytes up", "smaller", "loss", "between", "accuracy", *measures, "inputs"]
    rows: list[list[str]] = []
    within: list[int] = []
    for cut in table.cuts:
        raw = next((one.bytes_up for one in cut.codecs if one.codec == "raw"), None)
        for one in cut.codecs:
            if one.within(max_loss):
                within.append(len(rows))
            rows.append(
                [
                    printable(cut.name),
                    one.codec,
                    size(round(one.bytes_up)),
                    f"{raw / one.bytes_up:.2f}x" if raw and one.bytes_up else "-",
                    "none" if one.lossless else _percent(one.loss),
                    "-" if one.lossless else f"{_percent(one.low)} and {_percent(one.high)}",
                    _percent(one.accuracy),
                    *("-" if name not in one.measures else f"{one.measures[name]:.4g}" for name in measures),
                    "-" if one.lossless else f"{one.n}{f' ({one.stopped})' if one.stopped else ''}",
                ]
            )
    return headers, rows, within


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.3g} %"


# The result of a calibration of codecs: the table, and its path.


@dataclass(frozen=True, repr=False)
class Calibrated(Tabular):
    """Result of `edge_client.calibrate`. A row is a codec at a cut.

    ``table``: the argument of `EdgeClient(calibration=...)`; ``max_loss``: the allowed loss; ``folder``: where
    calibration.json and report.html are, None if not written; ``warnings``: limits of the table.
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
        """The cut and codec with the fewest bytes within the allowed loss."""
        within = [(cut, one) for cut in self.table.cuts for one in cut.codecs if one.within(self.max_loss)]
        return min(within, key=lambda pair: pair[1].bytes_up, default=None)

    def best_at(self, cut: CutLosses) -> CodecLoss | None:
        """Return the codec with the fewest bytes within the allowed loss at a cut; None if nothing was measured."""
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
        """Return JSON data: the table's file, and the options."""
        return {**self.table.as_dict(), "max_loss": self.max_loss, "warnings": list(self.warnings)}

    def text(self) -> str:
        """Format a line per cut: the fewest bytes within the allowed loss."""
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
            *self._left_alone(),
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

    def _left_alone(self) -> list[str]:
        """Format the cuts at which no lossy codec was measured to the end."""
        names = [
            printable(cut.name)
            for cut in self.table.cuts
            if any(one.stopped == DOMINATED for one in cut.codecs)
            and all(one.lossless or one.stopped for one in cut.codecs)
        ]
        if not names:
            return []
        some = f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        return [f"lossy codecs after {some}: left, as earlier cuts need no more bytes; {option('cuts')} measures them"]


def _named(cut: CutLosses, one: CodecLoss) -> str:
    return f"{printable(cut.name)} with {one.codec}"


def percent(share: float | None) -> str:
    """Format a share as per cent, with three digits."""
    return "-" if share is None else f"{100 * share:.3g} %"


def too_few(table: LossTable, max_loss: float) -> str | None:
    """Return a warning if there are too few inputs to show that a loss is within ``max_loss``; else None."""
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


@takes(CalibrateOptions)
def calibrate(model: Model, inputs: Data, *, options: CalibrateOptions) -> Calibrated:
    """Measure what every codec loses at every cut of ``model``, on ``inputs`` (docs/calibration.md), in this process.

        found = edge_client.calibrate("digits", "held_out/", max_loss="0.5%", output="calibrated")
        found.to_polars()         # one row a codec and cut
        client = edge_client.EdgeClient(server, "digits", codec="auto", calibration=found.table, max_loss="0.5%")

    ``inputs``: a folder or a glob of files, a sub-folder per class; or a list of inputs as for `plan`, or of (input,
    label). ``labels``: a CSV file of names and labels. ``max_loss``: the loss to be allowed; a codec far beyond it is
    not measured to the end. ``codecs``: names, "a,b" or a list; None: all. ``cuts``: "a,b", one of which may be "c + d"
    along branches, or every n-th; None: all allowed ones. ``kind`` of the output: "classes", "embedding", "boxes" or
    "tensors"; None: detected on the first output. ``seconds``: no input is begun after as many. ``learn``: number of
    inputs set apart to calibrate the codec "basis"; None: one of four, at most 200, if there are enough. ``output``: a
    folder for calibration.json and report.html, written while it runs; the same call resumes an interrupted run,
    ``fresh`` starts over. ``say`` receives lines for people.

    Cuts and codecs given by name are measured on all inputs. Of the others, a few inputs show which are worth it: a
    codec that sends no fewer bytes than another at that cut or an earlier one, and loses no less, is dropped.

    Raises SpecError (an invalid option or file, no inputs, labels of no input, a loss out of range), InputMismatch (an
    output of another kind), UnknownLayer, CutRefused.
    """
    allowed = loss_of(options.max_loss)
    names = _codecs(options.codecs)
    if options.kind is not None and options.kind not in KINDS:
        raise SpecError(
            f"{option('kind', options.kind)}: must be one of {', '.join(KINDS)}.{near(options.kind, KINDS)}"
        )
    if options.learn is not None and (type(options.learn) is not int or options.learn < 0):
        raise SpecError(f"{option('learn', options.learn)}: expected a number of inputs, from 0 up")
    if options.fresh and options.output is None:
        raise SpecError(f"{option('fresh')} is for {option('output')}: nothing is kept without it")
    items = inputs_of(inputs, options.labels)
    if options.learn is not None and options.learn >= len(items):
        raise SpecError(f"{option('learn', options.learn)}: of {len(items)} inputs none would be left to judge by")
    apart = set(set_apart(len(items), options.learn)) if Basis.name in names else set()
    learnt = [item for number, item in enumerate(items) if number in apart]
    judged = [item for number, item in enumerate(items) if number not in apart]
    if options.output is not None:
        settings.check("jinja2")
    folder = None if options.output is None else make_folder(options.output, option("output"))
    subject = subject_of(model, judged[:1])
    loaded = subject.load(on_inputs=subject.by_name is False)
    with loaded.wrapped, ExitStack() as stack:
        study = Study(
            loaded,
            _cuts(loaded, options.cuts, options.every),
            names,
            allowed,
            options.kind,
            seconds=options.seconds,
            learnt=learnt,
            every_cut=options.cuts is not None,
            every_codec=options.codecs is not None,
        )
        keep = None
        if folder is not None:
            keep = stack.enter_context(_Kept(folder, _settings(study, items), options.fresh, options.say))
            if keep.state is None:
                options.say(f"what is measured is kept in {folder}: the same {either('command', 'call')} continues")
        found = _run(study, judged, keep, allowed, options.progress)
    return found


def _run(study: Study, items: Sequence[NamedInput], keep: _Kept | None, max_loss: float, progress: bool) -> Calibrated:
    """Run the study and save it, however it ends."""

    def made(table: LossTable, *, ended: str | None = None) -> Calibrated:
        if ended is None and not study.complete:
            ended = "the time was up"
        more = None if ended is None else f"{table.inputs} of {len(items)} inputs: {ended}"
        strange = _strange(items, study.loaded) if table.kind == "classes" else None
        texts = tuple(text for text in (more, too_few(table, max_loss), strange) if text is not None)
        return Calibrated(table, max_loss, None if keep is None else keep.folder, texts)

    def written() -> None:
        if keep is not None and study.last is not None and keep.is_due():
            keep.write(study.last, made(study.table(), ended="so far"))

    try:
        with bar("codecs at cuts", 1, progress) as advance:
            table = study.run(
                items,
                lambda now: advance("", done=now.done, total=now.total, left=now.left),
                None if keep is None else keep.state,
                written,
            )
    except KeyboardInterrupt:
        interrupts.acknowledge()
        if keep is not None and study.last is not None:
            keep.write(study.last, made(study.back(), ended="interrupted"))
        raise
    found = made(table)
    if keep is not None and study.last is not None:
        keep.write(study.last, found)
    return found


# The folder of a running calibration: the journal, and the table and page of what is measured so far.


FORMAT: Final = "isthmus calibration 1"
KEPT_SECONDS: Final = 10.0
KEPT_SHARE: Final = 0.05
"""Maximum share of time spent on writing: a long calibration is saved less often."""


class _Kept:
    """A calibration's files in ``folder``; ``state``: earlier results. Raises SpecError for the folder of another
    study.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], fresh: bool, say: Say) -> None:
        self.folder = folder
        self.state: State | None = None
        self._began = self._last = time.monotonic()
        self._file, lines = continued(folder / NAME, "calibration", FORMAT, settings, fresh)
        if lines:
            self.state = lines[-1]["state"]
            say(
                f"{folder}: all is measured already; {option('fresh')} measures it again"
                if self.state["complete"]
                else f"{folder}: continuing after {self.state['inputs']} inputs"
            )

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def is_due(self) -> bool:
        """Return whether it is time to write."""
        now = time.monotonic()
        return now - self._last >= max(KEPT_SECONDS, KEPT_SHARE * (now - self._began))

    def write(self, state: State, found: Calibrated) -> None:
        self._file.write({"state": state})
        write(found.table, self.folder / "calibration.json")
        text = render(found.table, found.max_loss, found.warnings)
        write_text(self.folder / "report.html", text)
        self._last = time.monotonic()


def _settings(study: Study, items: Sequence[NamedInput]) -> dict[str, Any]:
    """Return all that the results depend on. A run is resumed only if all of it is the same."""
    wrapped = study.loaded.wrapped
    return {
        "model": study.loaded.spec.model_id,
        "weights": wrapped.weights_hash(),
        "code": wrapped.environment().get("model_code"),
        "plan": study.loaded.plan_digest,
        "device": str(wrapped.device),
        "torch": str(torch.__version__),
        "isthmus": installed("isthmus"),
        "loss allowed": study.max_loss,
        "kind": study.kind,
        "codecs": list(study.codecs),
        "all codecs to the end": study.every_codec,
        "cuts": list(study.cuts),
        "all cuts to the end": study.every_cut,
        "learnt from": [item.name for item in study.learnt],
        "inputs": [[item.name, item.digest(), item.truth] for item in items],
    }


def _strange(items: Sequence[NamedInput], loaded: LoadedModel) -> str | None:
    """Return a warning about labels that the model does not know; None if there are none, or its labels are unknown."""
    known = loaded.spec.labels
    wrong = sorted({one.truth for one in items if known and one.truth is not None} - {*known})
    if not wrong:
        return None
    return f'"{wrong[0]:.80}" is no label of the model: inputs so labelled count as wrong.{near(wrong[0], known)}'


def _codecs(wanted: str | Sequence[str] | None) -> list[str]:
    if wanted is None:
        return [*chosen_from(), Basis.name]
    names = [name.strip() for name in (wanted.split(",") if isinstance(wanted, str) else wanted)]
    wrong = next((name for name in names if name not in CODECS and ":" not in name), None)
    if wrong is not None or not names:
        given = ",".join(names)
        listed = f"{', '.join(CODECS)}.{near(wrong or '', CODECS)}"
        raise SpecError(f'{option("codecs", given)}: "{wrong or ""}" is not one of {listed}')
    return list(dict.fromkeys(["raw", *map(check, names)]))  # the baseline of the others


def _cuts(loaded: LoadedModel, cuts: str | None, every: int | None) -> list[str]:
    """Return the cuts by name. By default without "input", and without the last layer, after which nothing runs."""
    plan = loaded.plan
    chosen = choose(loaded.cuts, cuts, every if cuts is not None else every or 1, plan.resolve)
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
