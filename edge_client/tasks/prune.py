"""Score a layer's channels, evaluate every choice, write masks and smaller models, and measure them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from edge_client.options import PruneOptions
from edge_client.pruning import data as files
from edge_client.pruning import page
from edge_client.pruning.data import Data, Trial, answers, judge, keeps_of, scorings_of, try_all
from edge_client.pruning.page import PruneReport, ServedWay, Smaller, accuracy_table, served_table, structural_table
from edge_client.pruning.page import serve as through_a_server
from edge_client.screen import Row, Tabular, printable, table
from edge_client.screen import progress as bar
from edge_client.tasks.subject import Model, Subject, subject_of
from edge_client.user_input import NamedInput, cut_of
from edge_client.user_text import either, option
from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.files import make_folder, write_text
from shared_hooks.models import ModelSpec, pick_device
from shared_hooks.options import takes
from shared_hooks.selection import Sample, write_mask, write_pruned
from shared_hooks.selection.capture import read_boxes
from shared_hooks.selection.channels import needs_scikit
from shared_hooks.selection.prune import pruned, space_of

if TYPE_CHECKING:
    from torch import nn


# The result of a pruning: every choice, evaluated; and what was written and served.


@dataclass(frozen=True, repr=False)
class Pruned(Tabular):
    """Result of `edge_client.prune`. A row is one choice: a scoring, a seed of the random one, a number of channels.

    ``report``: all results; ``folder``: where masks, smaller models and report.html are, None if not written.
    """

    report: PruneReport
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
        """The best scoring on the validation inputs, by number of channels."""
        trial = self.report.trial
        return {keep: row.scoring for keep in trial.keeps if (row := trial.chosen(keep)) is not None}

    @property
    def all_exact(self) -> bool:
        """Whether every answer of the service equals the same model's in one process; True if nothing was served."""
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
        """Return JSON data."""
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


@takes(PruneOptions)
def prune(model: Model, split: str | int, inputs: Data, *, options: PruneOptions) -> Pruned:
    """Find which channels of the layer ``split`` are worth sending (docs/pruning.md). Needs the extra "prune".

        found = edge_client.prune("digits", "stage2.0.conv2", "held_out/", choose_by="training/", output="chosen")
        found.to_pandas()     # one row a scoring, seed and number of channels
        found.chosen          # the best scoring on the validation inputs, for every number of channels

    ``inputs``: a folder or a glob of files, a sub-folder per class, on which every choice is evaluated; or a list of
    (input, label), inputs as for `plan`. ``choose_by``: the same, for validation; None: every other input of each
    class. ``keep``: numbers of channels; ``scores``: scorings, ``seeds`` of the random control. ``boxes`` and
    ``predictions``: JSON files of objects. ``structural``: also remove the channels from the model. ``output``: a
    folder for masks, smaller models and report.html. ``requests`` of each go through a server started here, unless
    ``serve`` is False; a module cannot be served this way.

    Raises SpecError (``inputs`` and ``choose_by`` share an input, an invalid number), UnknownLayer, CutRefused,
    InputMismatch (the output holds no class scores).
    """
    scorings = scorings_of(_words(options.scores))
    if "clusters" in scorings:
        needs_scikit()
    numbers = _words(options.keep)
    if options.predictions and not options.boxes:
        raise SpecError(f"{option('predictions')} needs {option('boxes')}, the true ones")
    chosen_by, judged_on = files.separate(inputs, options.choose_by)
    truths = read_boxes(str(options.boxes)) if options.boxes else None
    predicted = read_boxes(str(options.predictions)) if options.predictions else None
    places_of = None if truths is None else files.boxes_of(truths, predicted)
    subject = subject_of(model, judged_on[:1])
    if subject.spec.selection is not None:
        raise SpecError(f"{option('selection')}: prune begins with the whole model")
    device = pick_device(subject.choice.device)
    layer = _layer(subject, str(split))
    spec = subject.spec
    whole = spec.load_model(device)
    if places_of is not None and not any(one.file_name in places_of for one in chosen_by):
        named = ", ".join(list(places_of)[:3]) or "no file"
        raise SpecError(f"{option('boxes')} names {named}, but no input to choose by such as {chosen_by[0].file_name}")
    calibrating = files.samples(spec, chosen_by, device, options.batch, None)
    if options.structural:  # refused now rather than after all masks have been evaluated
        few = min(keeps_of(numbers, space_of(whole, layer, calibrating[0]).channels))
        pruned(whole, layer, range(few), calibrating[:1])
    places = None if places_of is None else files.samples(spec, chosen_by, device, 1, places_of)
    samples = files.samples(spec, judged_on, device, options.batch, None)
    folder = None if options.output is None else make_folder(options.output, option("output"))
    if options.serve and not subject.by_name:
        raise SpecError("a module of this process cannot be served by another one: give the model by its name or file")
    with bar("masks", None, options.progress) as advance:
        trial = try_all(
            spec,
            whole,
            layer,
            calibrating,
            places,
            samples,
            scorings,
            lambda channels: keeps_of(numbers, channels),
            options.seeds,
            lambda done, total: advance("", done=done, total=total),
        )
    with ExitStack() as stack:
        into = folder or Path(stack.enter_context(TemporaryDirectory(prefix="isthmus-prune-")))
        ways, smaller = _write(options.structural, spec, whole, layer, trial, calibrating, samples, into)
        go = subject.by_name if options.serve is None else options.serve
        served = through_a_server(spec, ways, _spread(judged_on, options.requests), subject.choice) if go else []
    report = PruneReport(
        model=printable(spec.model_id),
        layer=layer,
        trial=trial,
        calibration_inputs=len(chosen_by),
        inputs=len(judged_on),
        random_seeds=options.seeds,
        smaller=tuple(smaller),
        served=tuple(served),
        files=() if folder is None else tuple(str(way.selection) for way in ways if way.selection is not None),
    )
    if folder is not None:
        write_text(folder / "report.html", page.render(report))
    return Pruned(report, folder)


def _words(value: str | int | Sequence[object] | None) -> str | None:
    if value is None or isinstance(value, (str, int)):
        return None if value is None else str(value)
    return ",".join(map(str, value))


def _layer(subject: Subject, split: str) -> str:
    """Return the layer's name. Planned on the first input if the spec has no example."""

    loaded = subject.load()
    with loaded.wrapped as wrapped:
        cut = cut_of(split, wrapped)
        if cut == "input":
            raise CutRefused(f"{option('split', 'input')}: no layer runs before it")
        known = [layer.name for layer in wrapped.layers]
        found = wrapped.resolve(cut)
        name = str(cut) if found is None else known[found.layer_id]  # for a block, its last layer
        if name not in known:
            raise CutRefused(f"{option('split', split)}: the model does not run it")
        return name


def _spread(items: Sequence[NamedInput], count: int) -> list[NamedInput]:
    """Return ``count`` items, evenly spread."""
    return list(items[:: max(1, len(items) // count)][:count])


def _write(
    structural: bool,
    spec: ModelSpec,
    model: nn.Module,
    layer: str,
    trial: Trial,
    calibration: Sequence[Sample],
    samples: Sequence[Sample],
    into: Path,
) -> tuple[list[ServedWay], list[Smaller]]:
    """Write the chosen mask for every number of channels, and with --structural the smaller model.

    Returns what can be served, and the evaluation of the smaller models.
    """

    whole = answers(spec, model, samples)
    ways, smaller = [ServedWay("whole", trial.captured.channels, layer, None)], []
    for keep in trial.keeps:
        row = trial.chosen(keep)
        assert row is not None  # every number that was tried has a row
        path = into / f"mask-{keep}.safetensors"
        write_mask(path, model, row.mask, layer)
        ways.append(ServedWay("mask", keep, row.mask.split, path))
        if not structural:
            continue
        cut_out = pruned(model, layer, row.mask.keep, calibration)
        path = into / f"pruned-{keep}.safetensors"
        write_pruned(path, model, cut_out, layer)
        ways.append(ServedWay("pruned", keep, layer, path))
        judged = judge(answers(spec, cut_out, samples), whole, samples)
        lost = trial.whole.value - judged.value
        smaller.append(Smaller(keep, row.scoring, judged, lost, _parameters(cut_out), _parameters(model)))
    return ways, smaller


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
