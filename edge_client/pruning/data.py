"""Prepare the inputs that channels are chosen and evaluated on, in batches, and evaluate models on them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_client.user_input import NamedInput, labelled, named
from edge_client.user_text import option
from shared_hooks.errors import CutRefused, InputMismatch, SpecError
from shared_hooks.models import ModelSpec, find_inputs
from shared_hooks.models.inputs import to_device
from shared_hooks.selection import SCORINGS, Mask, Sample, best, capture, masked, score
from shared_hooks.selection.capture import Box, Captured, hooked, matched, place_of, run
from shared_hooks.selection.prune import unmasked
from shared_hooks.showing import short

Data = str | Path | Iterable[Any]
"""A folder or a glob of files; or pairs of an input in memory and its label."""


def find(folder: str, option: str) -> list[NamedInput]:
    """Return the input files of a folder (or glob), with their labels. Raises SpecError if there are none."""
    try:
        return named(find_inputs(folder))
    except InputMismatch as error:
        raise SpecError(f"{option}: {error}") from error


def separate(data: Data, calibration: Data | None) -> tuple[list[NamedInput], list[NamedInput]]:
    """Return (validation inputs, test inputs), without an input in both. Raises SpecError, InputMismatch.

    Without ``calibration`` every other input of each class is for validation, so that either half has all classes.
    """
    judged = _all(data, option("input"))
    if calibration is None:
        if len(judged) < 4:
            raise SpecError(
                f"{option('input')}: {len(judged)} files are too few to choose and test on; give {option('choose_by')}"
            )
        order = sorted(range(len(judged)), key=lambda at: judged[at].truth or "")
        first = set(order[0::2])
        return [judged[at] for at in sorted(first)], [one for at, one in enumerate(judged) if at not in first]
    chosen = _all(calibration, option("choose_by"))
    known = {one.digest(): one for one in chosen}
    for one in judged:
        if (twin := known.get(one.digest())) is not None:
            raise SpecError(
                f"{one.origin} is also in {option('choose_by')} ({twin.origin}): choose and test on different files"
            )
    return chosen, judged


def _all(data: Data, name: str) -> list[NamedInput]:
    return find(str(data), name) if isinstance(data, (str, Path)) else labelled(data, name)


def samples(
    spec: ModelSpec,
    items: Sequence[NamedInput],
    device: torch.device,
    batch: int,
    boxes: Mapping[str, list[Box]] | None,
) -> list[Sample]:
    """Return the inputs as calls of the model, in batches of up to ``batch`` if every tensor is a batch of one of one
    shape.

    With ``boxes`` (by file name; a file without any is not captured) one at a time.
    """
    made: list[Sample] = []
    waiting: list[Sample] = []

    def flush() -> None:
        if waiting:
            made.append(_joined(waiting))
            waiting.clear()

    for item in items:
        args, kwargs = item.read(spec)
        sample = Sample(to_device(args, device), to_device(kwargs, device), (item.truth,))
        if boxes is not None:
            made.append(dataclasses.replace(sample, boxes=boxes.get(item.file_name, []), name=item.file_name))
            continue
        if waiting and (len(waiting) == batch or _shapes(sample) != _shapes(waiting[0])):
            flush()
        waiting.append(sample)
        if _shapes(sample) is None:
            flush()
    flush()
    return made


def _shapes(sample: Sample) -> Any:
    """Return what must be equal within a batch; None for what cannot be batched."""
    values = [*enumerate(sample.args), *sample.kwargs.items()]
    tensors = [(name, value) for name, value in values if isinstance(value, torch.Tensor)]
    if not tensors or any(value.dim() == 0 or value.shape[0] != 1 for _, value in tensors):
        return None
    others = [(name, repr(value)) for name, value in values if not isinstance(value, torch.Tensor)]
    return [(name, tuple(value.shape), value.dtype) for name, value in tensors], others


def _joined(group: Sequence[Sample]) -> Sample:
    if len(group) == 1:
        return group[0]
    first = group[0]

    def join(values: Sequence[Any]) -> Any:
        return torch.cat(list(values)) if isinstance(values[0], torch.Tensor) else values[0]

    return Sample(
        tuple(join(column) for column in zip(*(one.args for one in group), strict=True)),
        {name: join([one.kwargs[name] for one in group]) for name in first.kwargs},
        tuple(label for one in group for label in one.labels),
    )


def boxes_of(truths: Mapping[str, list[Box]], predictions: Mapping[str, list[Box]] | None) -> dict[str, list[Box]]:
    """Return the true boxes by file name; with predictions, those that a prediction matches."""
    if predictions is None:
        return dict(truths)
    return {
        name: [prediction for prediction, _ in matched(predictions.get(name, []), boxes)]
        for name, boxes in truths.items()
    }


@dataclass(frozen=True)
class Judged:
    """A model's accuracy, and its agreement with the whole model; 0 to 1."""

    accuracy: float | None
    """None if no file has a label."""
    agreement: float

    @property
    def value(self) -> float:
        return self.agreement if self.accuracy is None else self.accuracy


def answers(spec: ModelSpec, model: nn.Module, given: Sequence[Sample]) -> list[str]:
    """Return the first label of every row. Raises InputMismatch if the output holds no class scores."""
    found: list[str] = []
    for sample in given:
        rows: dict[int, str] = {}
        for prediction in spec.postprocess(run(model, sample)):
            rows.setdefault(prediction.row, prediction.label)
        if len(rows) != max(len(sample.labels), 1):
            raise InputMismatch(
                f"{len(rows)} predictions for a batch of {len(sample.labels)}: prune needs class scores per input"
                f" ([postprocess] of the spec, {option('batch', 1)})"
            )
        found += [rows[row] for row in sorted(rows)]
    return found


def judge(predicted: Sequence[str], whole: Sequence[str], given: Sequence[Sample]) -> Judged:
    """Compare ``predicted`` with the labels and with the whole model's answers."""
    truths = [label for sample in given for label in sample.labels]
    known = [(one, truth) for one, truth in zip(predicted, truths, strict=True) if truth is not None]
    right = sum(one == truth for one, truth in known) / len(known) if known else None
    return Judged(right, sum(a == b for a, b in zip(predicted, whole, strict=True)) / len(predicted))


def by_class(given: Sequence[Sample], whole: Sequence[str]) -> list[Sample]:
    """Return the samples with the whole model's answers as labels, if no file has one."""
    if any(label is not None for sample in given for label in sample.labels):
        return list(given)
    rest = list(whole)
    made: dict[int, Sample] = defaultdict()
    for index, sample in enumerate(given):
        count = len(sample.labels)
        made[index] = dataclasses.replace(sample, labels=tuple(rest[:count]))
        del rest[:count]
    return list(made.values())


# Every scoring at every number of channels, evaluated; and for each number the one best on the calibration data.


RANDOM = "random"


@dataclass(frozen=True)
class MaskRow:
    """One evaluated mask. ``seed`` is for the random control, for which ``calibration`` is None."""

    scoring: str
    seed: int
    keep: int
    judged: Judged
    calibration: Judged | None
    mask: Mask


@short
@dataclass(frozen=True)
class Trial:
    """All evaluated masks."""

    captured: Captured
    module: str
    whole: Judged
    rows: tuple[MaskRow, ...]
    unavailable: Mapping[str, str]
    """Scorings that do not apply, and why."""

    @property
    def split(self) -> str:
        """Where a masked model is cut."""
        return f"{self.module}.select"

    @property
    def keeps(self) -> list[int]:
        """The numbers of channels tried, ascending."""
        return sorted({row.keep for row in self.rows})

    def chosen(self, keep: int) -> MaskRow | None:
        """Return the best on the validation data, of equal ones the first; a random one only if there is no other."""
        rows = [row for row in self.rows if row.keep == keep]
        known = [row for row in rows if row.calibration is not None]
        return max(
            known, key=lambda row: row.calibration.value if row.calibration else 0.0, default=next(iter(rows), None)
        )


def keeps_of(text: str | None, channels: int) -> list[int]:
    """Parse ``keep``: numbers from 1 to the layer's channels, ascending. Raises SpecError."""
    if text is None:
        return sorted({max(1, channels // 4), max(1, channels // 2), max(1, 3 * channels // 4)})
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= channels for part in parts):
        raise SpecError(f"{option('keep', text)}: expected numbers from 1 to {channels}, the layer's channels")
    return sorted({int(part) for part in parts})


def scorings_of(text: str | None) -> list[str]:
    """Parse ``scores``; the random control is always added last. Raises SpecError."""
    names = [name.strip() for name in text.split(",")] if text else list(SCORINGS)
    for name in names:
        if name not in SCORINGS:
            raise SpecError(f'{option("scores")}: no scoring "{name}"; there is {", ".join(SCORINGS)}')
    return [*dict.fromkeys(name for name in names if name != RANDOM), RANDOM]


def try_all(
    spec: ModelSpec,
    model: nn.Module,
    layer: str,
    calibration: Sequence[Sample],
    places: Sequence[Sample] | None,
    data: Sequence[Sample],
    scorings: Sequence[str],
    keeps: Callable[[int], list[int]],
    seeds: int,
    on_step: Callable[[int, int], None],
) -> Trial:
    """Evaluate all scorings. ``places``: validation inputs with boxes, None: everywhere; ``keeps`` gets the
    channels.
    """
    whole_calibration, whole = answers(spec, model, calibration), answers(spec, model, data)
    labelled = by_class(calibration, whole_calibration)
    module, dim = place_of(model, layer, labelled[0])
    captured = capture(model, layer, labelled if places is None else places)
    rows: list[MaskRow] = []
    unavailable: dict[str, str] = {}
    numbers = keeps(captured.channels)
    _check_reached(model, Mask(module, dim, tuple(range(captured.channels)), (0.0,) * captured.channels), labelled[0])
    plans = [(name, seed) for name in scorings for seed in range(seeds if name == RANDOM else 1)]
    done = 0
    for name, seed in plans:
        try:
            scores = score(name, captured, model, calibration[0], seed)
        except (CutRefused, InputMismatch) as error:
            unavailable[name] = str(error)
            done += len(numbers)
            continue
        for keep in numbers:
            mask = Mask(module, dim, tuple(best(scores, keep)), tuple(captured.fill.float().tolist()))
            masked(model, mask)
            try:
                judged = judge(answers(spec, model, data), whole, data)
                own = None
                if name != RANDOM:
                    own = judge(answers(spec, model, calibration), whole_calibration, calibration)
            finally:
                unmasked(model)
            rows.append(MaskRow(name, seed, keep, judged, own, mask))
            done += 1
            on_step(done, len(plans) * len(numbers))
    return Trial(captured, module, judge(whole, whole, data), tuple(rows), unavailable)


def _check_reached(model: nn.Module, mask: Mask, sample: Sample) -> None:
    """Raise CutRefused if the model calls the layer by a reference of its own, which a mask cannot follow."""
    seen: list[int] = []
    masked(model, mask)
    try:
        hooked(model, mask.split, lambda output: seen.append(output.dim()), sample)
    finally:
        unmasked(model)
    if not seen:
        raise CutRefused(
            f"layer {mask.module}: a mask after it would not run: the model keeps the layer in a list or the like"
            " that is not an nn.ModuleList, and calls it there"
        )
