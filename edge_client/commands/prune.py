"""``edge-client prune``: score a layer's channels, judge every choice, write masks and smaller models, measure them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from edge_client.commands import exits
from edge_client.commands.loading import choice_of, cut_of, load
from edge_client.commands.output import check_json_target, table, write_json
from edge_client.model_choice import ModelChoice
from edge_client.pruning import data, page
from edge_client.pruning.data import answers, find, judge
from edge_client.pruning.page import accuracy_table, served_table, structural_table
from edge_client.pruning.report import Report, Smaller
from edge_client.pruning.served import Way, serve
from edge_client.pruning.trial import Trial, keeps_of, scorings_of, try_all
from edge_client.screen.progress import progress
from edge_client.screen.text import one_line, printable
from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.models import InputItem, ModelSpec, pick_device
from shared_hooks.selection import Sample, write_mask, write_pruned
from shared_hooks.selection.clusters import needs_scikit
from shared_hooks.selection.places import read_boxes
from shared_hooks.selection.prune import pruned, space_of

if TYPE_CHECKING:
    from torch import nn


def main(options: argparse.Namespace) -> int:
    """Choose, judge, measure, write; exit status."""

    check_json_target(options.json)
    scorings = scorings_of(options.scores)
    if "clusters" in scorings:
        needs_scikit()
    if options.selection is not None:
        raise SpecError("--selection: prune begins with the whole model")
    if options.predictions and not options.boxes:
        raise SpecError("--predictions needs --boxes, the true ones")
    chosen_by, judged_on = data.separate(options.data, options.calibration)
    truths = read_boxes(options.boxes) if options.boxes else None
    predicted = read_boxes(options.predictions) if options.predictions else None
    boxes = None if truths is None else data.boxes_of(truths, predicted)
    device = pick_device(options.device)
    choice = choice_of(options)
    layer, spec = _layer(choice, options.split, options.data)
    model = spec.load_model(device)
    if boxes is not None and not any(item.name in boxes for item in chosen_by):
        named = ", ".join(list(boxes)[:3]) or "no file"
        raise SpecError(f"--boxes names {named}, but no calibration input such as {chosen_by[0].name}")
    calibration = data.samples(spec, chosen_by, device, options.batch, None)
    if options.structural:  # refused now, not when all masks have been judged
        few = min(keeps_of(options.keep, space_of(model, layer, calibration[0]).channels))
        pruned(model, layer, range(few), calibration[:1])
    places = None if boxes is None else data.samples(spec, chosen_by, device, 1, boxes)
    samples = data.samples(spec, judged_on, device, options.batch, None)
    folder = _folder(options.out)
    with progress("masks", None, not options.no_progress) as advance:
        trial = try_all(
            spec,
            model,
            layer,
            calibration,
            places,
            samples,
            scorings,
            lambda channels: keeps_of(options.keep, channels),
            options.seeds,
            lambda done, total: advance(f"of {total}"),
        )
    with ExitStack() as stack:
        into = folder or Path(stack.enter_context(TemporaryDirectory(prefix="isthmus-prune-")))
        ways, smaller = _write(options.structural, spec, model, layer, trial, calibration, samples, into)
        served = serve(spec, ways, _spread(judged_on, options.requests), choice) if options.serve else []
    report = Report(
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
        (folder / "report.html").write_text(page.render(report), encoding="utf-8")
    if options.json:
        write_json(report.as_dict(), options.json, options.stdout)
    if options.json != "-":
        _print(report, folder, options.stdout)
    return exits.OK if report.all_exact else exits.SOME_FAILED


def _layer(choice: ModelChoice, split: str, data: str) -> tuple[str, ModelSpec]:
    """The layer's name, and the spec. Planned on the first of ``data`` where the spec has no example."""

    given = None if choice.spec().example() is not None else [str(find(data, "--data")[0].path)]
    loaded = load(choice, given)
    with loaded.wrapped as wrapped:
        cut = cut_of(split, wrapped)
        if cut == "input":
            raise CutRefused("--split input: no layer runs before it")
        known = [layer.name for layer in wrapped.layers]
        name = cut if isinstance(cut, str) else known[cut]
        if name not in known:
            raise CutRefused(f"--split {split}: the model does not run it")
        return name, loaded.spec


def _folder(out: str | None) -> Path | None:
    if out is None:
        return None
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"--out: {out} cannot be written: {error.strerror}") from error
    return Path(out)


def _spread(items: Sequence[InputItem], count: int) -> list[InputItem]:
    """``count`` of them, from all parts."""
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
) -> tuple[list[Way], list[Smaller]]:
    """Of every number of channels the chosen mask, and with --structural the smaller model: what there is to serve, and
    how the smaller models are judged.
    """

    whole = answers(spec, model, samples)
    ways, smaller = [Way("whole", trial.captured.channels, layer, None)], []
    for keep in trial.keeps:
        row = trial.chosen(keep)
        assert row is not None  # every number that was tried has a row
        path = into / f"mask-{keep}.safetensors"
        write_mask(path, model, row.mask, layer)
        ways.append(Way("mask", keep, row.mask.split, path))
        if not structural:
            continue
        cut_out = pruned(model, layer, row.mask.keep, calibration)
        path = into / f"pruned-{keep}.safetensors"
        write_pruned(path, model, cut_out, layer)
        ways.append(Way("pruned", keep, layer, path))
        judged = judge(answers(spec, cut_out, samples), whole, samples)
        lost = trial.whole.value - judged.value
        smaller.append(Smaller(keep, row.scoring, judged, lost, _parameters(cut_out), _parameters(model)))
    return ways, smaller


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _print(report: Report, folder: Path | None, stdout: Any) -> None:

    def say(text: str) -> None:
        print(text, file=stdout)

    say(f"{report.model}: {report.channels} channels of {report.layer}")
    say(f"chosen by {report.calibration_inputs} inputs, judged on {report.inputs} others")
    say(f"the whole model's {report.metric}: {100 * report.trial.whole.value:.2f} %\n")
    headers, rows = accuracy_table(report)
    say(f"{report.metric} in %, by channels kept (* = preferred by the calibration inputs)")
    say(table(headers, rows, right=range(1, len(headers))))
    for name, why in report.trial.unavailable.items():
        print(f"edge-client: {name} is not available: {one_line(why)}", file=sys.stderr)
    if report.smaller:
        say("\ncut out of the model")
        headers, rows = structural_table(report)
        say(table(headers, rows, right=(0, 2, 3, 4)))
    if report.served:
        headers, rows = served_table(report)
        say("\nthrough a server on this machine")
        say(table(headers, rows, right=range(1, len(headers))))
    if folder is not None:
        say(f"\nwritten to {folder}: report.html, {', '.join(Path(file).name for file in report.files)}")
        say(f"served by both sides with --selection FILE; cut a masked model at {report.trial.split}")
