"""Where to look at a layer: object boxes as cells of its feature map, and predictions that found a true object.

Boxes are (left, top, right, bottom) in pixels of the model's input, after preprocessing; right and bottom
are exclusive.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared_hooks.errors import SpecError

IOU: Final = 0.5
"""From this overlap on (intersection over union) a prediction has found the object."""


@dataclass(frozen=True)
class Box:
    """One object: where it is, what it is, and for a prediction how sure that is."""

    left: float
    top: float
    right: float
    bottom: float
    label: str
    score: float = 1.0

    def __post_init__(self) -> None:
        corners = (self.left, self.top, self.right, self.bottom, self.score)
        if not all(map(math.isfinite, corners)) or self.right <= self.left or self.bottom <= self.top:
            raise SpecError(f"a box is left, top, right, bottom with left < right and top < bottom, not {corners[:4]}")


def iou(a: Box, b: Box) -> float:
    """Intersection over union, 0 to 1."""
    width = min(a.right, b.right) - max(a.left, b.left)
    height = min(a.bottom, b.bottom) - max(a.top, b.top)
    shared = max(width, 0.0) * max(height, 0.0)
    return shared / (_area(a) + _area(b) - shared)


def _area(box: Box) -> float:
    return (box.right - box.left) * (box.bottom - box.top)


def matched(predictions: Sequence[Box], truths: Sequence[Box], threshold: float = IOU) -> list[tuple[Box, Box]]:
    """(prediction, truth) of each prediction that found an object of its label, surest first; each truth once."""
    left = list(truths)
    found = []
    for prediction in sorted(predictions, key=lambda box: -box.score):
        candidates = [truth for truth in left if truth.label == prediction.label]
        truth = max(candidates, key=lambda truth: iou(prediction, truth), default=None)
        if truth is not None and iou(prediction, truth) >= threshold:
            left.remove(truth)
            found.append((prediction, truth))
    return found


def cells(box: Box, input_size: tuple[int, int], feature_size: tuple[int, int]) -> tuple[slice, slice]:
    """(rows, columns) of the feature map that the box touches; sizes are (height, width), the stride their ratio.

    Raises SpecError for a box that lies wholly outside the input.
    """
    if box.right <= 0 or box.bottom <= 0 or box.left >= input_size[1] or box.top >= input_size[0]:
        raise SpecError(
            f"the box {(box.left, box.top, box.right, box.bottom)} lies outside the input of"
            f" {input_size[1]} x {input_size[0]} pixels"
        )
    rows = _range(box.top, box.bottom, input_size[0] / feature_size[0], feature_size[0])
    return rows, _range(box.left, box.right, input_size[1] / feature_size[1], feature_size[1])


def _range(first: float, last: float, stride: float, count: int) -> slice:
    start = min(max(math.floor(first / stride), 0), count - 1)
    return slice(start, min(max(math.ceil(last / stride), start + 1), count))


def read_boxes(path: Path | str) -> Mapping[str, list[Box]]:
    """The boxes of each input file, from JSON: {"file.png": [[left, top, right, bottom, label], ...]}.

    Predictions have a sixth entry, the score. Raises SpecError.
    """
    try:
        known = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(known, dict) or not all(isinstance(boxes, list) for boxes in known.values()):
        raise SpecError(f'{path}: expected {{"file.png": [[left, top, right, bottom, label], ...]}}')
    return {name: [_box(entry, f"{path}: {name}") for entry in boxes] for name, boxes in known.items()}


def _box(entry: object, where: str) -> Box:
    numbers = [*entry[:4], *entry[5:]] if isinstance(entry, list) and len(entry) in (5, 6) else [None]
    if not isinstance(entry, list) or not all(type(number) in (int, float) for number in numbers):
        raise SpecError(f"{where}: expected [left, top, right, bottom, label] and for predictions a score")
    try:
        left, top, right, bottom = map(float, entry[:4])
        return Box(left, top, right, bottom, str(entry[4]), float(entry[5]) if len(entry) == 6 else 1.0)
    except (SpecError, OverflowError) as error:
        raise SpecError(f"{where}: {error}") from error
