"""The files that channels are chosen by and judged on, in batches, and what a model says to them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models import InputItem, ModelSpec, find_inputs
from shared_hooks.models.example import to_device
from shared_hooks.selection.capture import Sample, run
from shared_hooks.selection.places import Box, matched


def find(folder: str, option: str) -> list[InputItem]:
    """The input files of a folder (or glob); with none in it, of its sub-folders, each named as its class."""
    root = Path(folder)
    try:
        return find_inputs(folder)
    except InputMismatch as error:
        classes = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        found = [dataclasses.replace(item, truth=path.name) for path in classes for item in _inside(path)]
        if not found:
            raise SpecError(f"{option}: {error}") from error
        return found


def _inside(path: Path) -> list[InputItem]:
    try:
        return find_inputs(path)
    except InputMismatch:
        return []


def separate(data: str, calibration: str | None) -> tuple[list[InputItem], list[InputItem]]:
    """(to choose by, to judge on). No file is in both, whatever it is called. Raises SpecError.

    Without ``calibration`` every other file of each class is to choose by, so that either half has all classes.
    """
    judged = find(data, "--data")
    if calibration is None:
        if len(judged) < 4:
            raise SpecError(f"--data: {len(judged)} files are too few to calibrate and test on; give --calibration")
        by_truth = sorted(judged, key=lambda item: item.truth or "")
        first = {item.path for item in by_truth[0::2]}
        return [item for item in judged if item.path in first], [item for item in judged if item.path not in first]
    chosen = find(calibration, "--calibration")
    known = {_digest(item): item for item in chosen}
    for item in judged:
        if (twin := known.get(_digest(item))) is not None:
            raise SpecError(f"{item.path} is also in --calibration ({twin.path}): choose and test on different files")
    return chosen, judged


def _digest(item: InputItem) -> str:
    try:
        return xxhash.xxh3_128_hexdigest(item.path.read_bytes())
    except OSError as error:
        raise SpecError(f"{item.path} cannot be read: {error.strerror}") from error


def samples(
    spec: ModelSpec, items: Sequence[InputItem], device: torch.device, batch: int, boxes: Mapping[str, list[Box]] | None
) -> list[Sample]:
    """The files as calls of the model. Up to ``batch`` go into one where every tensor is a batch of one of one shape.

    With ``boxes`` (by file name; a file without any is looked at nowhere) one at a time.
    """
    made: list[Sample] = []
    waiting: list[Sample] = []

    def flush() -> None:
        if waiting:
            made.append(_joined(waiting))
            waiting.clear()

    for item in items:
        args, kwargs = spec.preprocess(item)
        sample = Sample(to_device(args, device), to_device(kwargs, device), (item.truth,))
        if boxes is not None:
            made.append(dataclasses.replace(sample, boxes=boxes.get(item.name, []), name=item.name))
            continue
        if waiting and (len(waiting) == batch or _shapes(sample) != _shapes(waiting[0])):
            flush()
        waiting.append(sample)
        if _shapes(sample) is None:
            flush()
    flush()
    return made


def _shapes(sample: Sample) -> Any:
    """What must be equal to go into one batch; None for what cannot."""
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
    """The true boxes; with predictions, those of them that found a true one, by file name."""
    if predictions is None:
        return dict(truths)
    return {
        name: [prediction for prediction, _ in matched(predictions.get(name, []), boxes)]
        for name, boxes in truths.items()
    }


@dataclass(frozen=True)
class Judged:
    """How often a model is right, and how often it says what the whole model says; 0 to 1."""

    accuracy: float | None
    """None where no file has a truth."""
    agreement: float

    @property
    def value(self) -> float:
        return self.agreement if self.accuracy is None else self.accuracy


def answers(spec: ModelSpec, model: nn.Module, given: Sequence[Sample]) -> list[str]:
    """The first label of every row. Raises InputMismatch where the output holds no class scores."""
    found: list[str] = []
    for sample in given:
        rows: dict[int, str] = {}
        for prediction in spec.postprocess(run(model, sample)):
            rows.setdefault(prediction.row, prediction.label)
        if len(rows) != max(len(sample.labels), 1):
            raise InputMismatch(
                f"{len(rows)} predictions for a batch of {len(sample.labels)}: prune needs class scores per input"
                f" ([postprocess] of the spec, --batch 1)"
            )
        found += [rows[row] for row in sorted(rows)]
    return found


def judge(said: Sequence[str], whole: Sequence[str], given: Sequence[Sample]) -> Judged:
    """``said`` against the truths and against what the whole model said."""
    truths = [label for sample in given for label in sample.labels]
    known = [(one, truth) for one, truth in zip(said, truths, strict=True) if truth is not None]
    right = sum(one == truth for one, truth in known) / len(known) if known else None
    return Judged(right, sum(a == b for a, b in zip(said, whole, strict=True)) / len(said))


def by_class(given: Sequence[Sample], whole: Sequence[str]) -> list[Sample]:
    """The samples with the whole model's answers in place of truths, where no file has one."""
    if any(label is not None for sample in given for label in sample.labels):
        return list(given)
    rest = list(whole)
    made: dict[int, Sample] = defaultdict()
    for index, sample in enumerate(given):
        count = len(sample.labels)
        made[index] = dataclasses.replace(sample, labels=tuple(rest[:count]))
        del rest[:count]
    return list(made.values())
