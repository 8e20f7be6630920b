"""Draw boxes, masks and pixel classes on a model's input image, as a spec's [draw] table says.

[draw] boxes = "0.boxes" # path of names and positions into the output; (n, 4) scores = "0.scores" # (n), or class
scores (n, classes) labels = "0.labels" # classes (n); absent: the best of the scores masks = "0.masks" # (n, H, W) or
(n, 1, H, W), 0 to 1 classes = "out" # of each pixel: scores (classes, H, W), or the class itself (H, W) format = "xyxy"
# or xywh, cxcywh unit = "pixels" # of the model's input; or "fraction", 0 to 1 threshold = 0.5 # minimum score
background = -1 # a class of the scores that is no object, or of the pixels that is left clear
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shared_hooks.config import Table, kind_of, looks_like_target, resolve
from shared_hooks.errors import InputMismatch, IsthmusError, SpecError, near

if TYPE_CHECKING:
    from PIL import Image

COLOURS = ((230, 25, 75), (60, 180, 75), (0, 130, 200), (245, 130, 48), (145, 30, 180), (70, 240, 240), (240, 50, 230))
"""Colours of the classes, repeated after the last."""
OPACITY = 0.5


@dataclass(frozen=True)
class Drawing:
    """What to draw, and where it is in an output; a leading batch dimension of one is dropped."""

    boxes: str | None = None
    scores: str | None = None
    labels: str | None = None
    masks: str | None = None
    classes: str | None = None
    format: str = "xyxy"
    unit: str = "pixels"
    threshold: float = 0.5
    background: int | None = None

    @classmethod
    def from_table(cls, table: Table) -> Drawing:
        """Read a spec's [draw] table. Raises SpecError."""
        paths = {name: table.take(name, str) for name in ("boxes", "scores", "labels", "masks", "classes")}
        threshold = table.take("threshold", float)
        made = cls(
            **paths,
            format=table.choice("format", ("xyxy", "xywh", "cxcywh"), "xyxy"),
            unit=table.choice("unit", ("pixels", "fraction"), "pixels"),
            threshold=0.5 if threshold is None else threshold,
            background=table.take("background", int),
        )
        table.done()
        if made.boxes is None and made.masks is None and made.classes is None:
            table.fail("boxes", "missing; expected where boxes, masks or classes are in the output")
        return made

    def __call__(self, output: object, picture: Image.Image, names: tuple[str, ...]) -> Image.Image:
        """Draw the results on ``picture``; ``names`` of classes. Raises InputMismatch if the output lacks them."""
        drawn = picture.convert("RGB")
        if self.classes is not None:
            drawn = self._pixels(drawn, _array(output, self.classes))
        boxes = None if self.boxes is None else _shaped(_array(output, self.boxes), 2, self.boxes)
        masks = None if self.masks is None else _masks(_array(output, self.masks), self.masks)
        count = len(boxes) if boxes is not None else len(masks) if masks is not None else 0
        if (boxes is not None and boxes.shape[1] != 4) or (masks is not None and len(masks) != count):
            shapes = ", ".join(str(one.shape) for one in (boxes, masks) if one is not None)
            raise InputMismatch(f"draw: expected (n, 4) boxes and as many masks, found {shapes}")
        scores, labels = self._judged(output, count)
        for at in np.flatnonzero((scores >= self.threshold) & (labels >= 0)).tolist():
            colour = COLOURS[labels[at] % len(COLOURS)]
            if masks is not None:
                drawn = _tinted(drawn, masks[at] > 0.5, colour)
            if boxes is not None and np.isfinite(boxes[at]).all():
                name = names[labels[at]] if labels[at] < len(names) else str(labels[at])
                _box(drawn, self._corners(boxes[at], drawn), colour, f"{name} {scores[at]:.2f}")
        return drawn

    def _judged(self, output: object, count: int) -> tuple[Any, Any]:
        """Return score and class of each; class -1 is none."""
        scores, labels = np.ones(count), np.zeros(count, dtype=np.int64)
        if self.scores is not None:
            scores = _array(output, self.scores)
            if scores.ndim == 3 or scores.shape == (1, count):
                scores = scores[0]
            if scores.ndim == 2 and scores.shape[1]:
                shares = np.exp(scores - scores.max(axis=1, keepdims=True))
                shares /= shares.sum(axis=1, keepdims=True)
                labels, scores = shares.argmax(axis=1), shares.max(axis=1)
                if self.background is not None:
                    labels = np.where(labels == self.background % shares.shape[1], -1, labels)
        if self.labels is not None:
            labels = _shaped(_array(output, self.labels), 1, self.labels).astype(np.int64)
        if scores.shape != (count,) or labels.shape != (count,):
            raise InputMismatch(
                f"draw: {count} were found, with scores of shape {scores.shape} and labels of shape {labels.shape}"
            )
        return scores, labels

    def _corners(self, box: Any, picture: Image.Image) -> list[int]:
        a, b, c, d = (float(value) for value in box)
        if self.format == "xywh":
            c, d = a + c, b + d
        elif self.format == "cxcywh":
            a, b, c, d = a - c / 2, b - d / 2, a + c / 2, b + d / 2
        wide, high = picture.size if self.unit == "fraction" else (1, 1)
        most = max(picture.size) * 4.0  # what lies further out is invisible, and a library's integers are bounded
        left, right = sorted(round(min(max(value * wide, -most), most)) for value in (a, c))
        top, bottom = sorted(round(min(max(value * high, -most), most)) for value in (b, d))
        return [left, top, right, bottom]

    def _pixels(self, picture: Image.Image, classes: Any) -> Image.Image:
        clear = self.background
        if classes.ndim == 4 or (classes.ndim == 3 and classes.shape[0] == 1):
            classes = classes[0]
        if classes.ndim == 3:
            clear = None if clear is None else clear % classes.shape[0]
            classes = classes.argmax(axis=0)
        classes = _shaped(classes, 2, str(self.classes)).astype(np.int64)
        for number in np.unique(classes).tolist():
            if number != clear:
                picture = _tinted(picture, classes == number, COLOURS[number % len(COLOURS)])
        return picture


def entry(output: object, path: str) -> object:
    """Return the entry of ``output`` at ``path``, names and positions joined by dots. Raises InputMismatch."""
    found = output
    for word in path.split("."):
        if isinstance(found, Mapping):
            known = {str(key): value for key, value in found.items()}
        elif isinstance(found, (tuple, list)) and not hasattr(found, "_fields"):
            known = {str(at): value for at, value in enumerate(found)}
        else:
            known = {name: value for name, value in _attributes(found).items() if not name.startswith("_")}
        if word not in known:
            there = ", ".join([*known][:8]) or type(found).__name__
            raise InputMismatch(f'draw: "{path}" is not in the output: there is {there}.{near(word, known)}')
        found = known[word]
    return found


def _attributes(value: object) -> dict[str, Any]:
    fields = getattr(value, "_fields", None)
    if isinstance(value, torch.Tensor):
        return {}
    return {name: getattr(value, name) for name in fields} if fields else dict(getattr(value, "__dict__", {}))


def _array(output: object, path: str) -> Any:
    found = entry(output, path)
    if not isinstance(found, torch.Tensor) or found.is_complex():
        raise InputMismatch(f'draw: "{path}" is {type(found).__name__}; expected a tensor of real numbers')
    return np.nan_to_num(found.detach().cpu().to(torch.float32).numpy(), nan=-1.0)


def _shaped(array: Any, rank: int, path: str) -> Any:
    """Return the array without a leading batch dimension of one."""
    if array.ndim == rank + 1 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != rank:
        raise InputMismatch(f'draw: "{path}": expected {rank} dimensions, found {array.shape}')
    return array


def _masks(array: Any, path: str) -> Any:
    """Return (n, H, W) from masks with a leading batch dimension of one, or a channel dimension of one."""
    if array.ndim == 4 and array.shape[1] == 1:
        return array[:, 0]
    return _shaped(array, 3, path)


def _tinted(picture: Image.Image, where: Any, colour: tuple[int, int, int]) -> Image.Image:
    from PIL import Image

    mask = Image.fromarray((where * (255 * OPACITY)).astype(np.uint8)).resize(picture.size, Image.Resampling.NEAREST)
    return Image.composite(Image.new("RGB", picture.size, colour), picture, mask)


def _box(picture: Image.Image, corners: list[int], colour: tuple[int, int, int], text: str) -> None:
    from PIL import ImageDraw

    pen = ImageDraw.Draw(picture)
    pen.rectangle(corners, outline=colour, width=max(1, max(picture.size) // 300))
    at = (max(corners[0], 0), max(corners[1] - 11, 0))
    shown = text.encode("latin-1", "replace").decode("latin-1")  # the characters of the built-in font
    pen.rectangle(pen.textbbox(at, shown), fill=colour)
    pen.text(at, shown, fill=(255, 255, 255))


# From a model's output to predictions: the built-in ranking of class scores.


@dataclass(frozen=True)
class Prediction:
    """One prediction: class, class label and score; ``row`` numbers the inputs of a batch."""

    label: str
    index: int
    score: float
    row: int = 0


@dataclass(frozen=True)
class TopK:
    """Returns the ``top_k`` highest class scores per row, best first, as probabilities if ``softmax``.

    ``output`` is the key of a dictionary, an attribute, or a position in a sequence; None: the tensor itself, "logits"
    if there is one, else the first entry of a sequence.
    """

    top_k: int = 5
    softmax: bool = True
    output: str | int | None = None
    strict: bool = True
    """False without [postprocess] in the spec: then other outputs have no predictions, and raise no error."""

    @classmethod
    def from_table(cls, table: Table) -> TopK:
        """Read a spec's [postprocess] table. Raises SpecError."""
        top_k = table.take("top_k", int)
        softmax = table.take("softmax", bool)
        output = table.take_any("output")
        if output is not None and (isinstance(output, bool) or not isinstance(output, (str, int))):
            table.fail("output", f"expected the name or position of the scores in the output, found {kind_of(output)}")
        if top_k is not None and top_k < 1:
            table.fail("top_k", f"expected an integer of at least 1, found {top_k}")
        table.done()
        return cls(5 if top_k is None else top_k, softmax is not False, output)

    def __call__(self, output: object, labels: tuple[str, ...]) -> list[Prediction]:
        """Return predictions from scores of shape (classes,) or (rows, classes), any real dtype.

        NaN scores are kept. Raises InputMismatch if ``strict`` and the output holds no such scores.
        """
        scores = self._scores(output)
        if scores is None or scores.dim() not in (1, 2) or scores.numel() == 0 or scores.is_complex():
            if not self.strict:
                return []
            what = type(output).__name__ if scores is None else f"a tensor of shape {tuple(scores.shape)}"
            raise InputMismatch(f"postprocess: expected class scores (rows, classes) in the output, found {what}")
        rows = scores.detach().reshape(-1, scores.shape[-1]).to("cpu", torch.float32)
        if self.softmax:
            rows = torch.softmax(rows, dim=1)
        best = torch.topk(rows, min(self.top_k, rows.shape[1]), dim=1)
        return [
            Prediction(labels[index] if index < len(labels) else str(index), index, score, row)
            for row, (values, indices) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True))
            for score, index in zip(values, indices, strict=True)
        ]

    def _scores(self, output: object) -> torch.Tensor | None:
        if isinstance(output, torch.Tensor):
            return output
        found: object = None
        if self.output is not None:
            found = _entry(output, self.output)
        elif (found := _entry(output, "logits")) is None:
            found = _entry(output, 0)
        return found if isinstance(found, torch.Tensor) else None


def _entry(output: object, key: str | int) -> object:
    if isinstance(key, str):
        return output.get(key) if isinstance(output, Mapping) else getattr(output, key, None)
    if isinstance(output, (tuple, list)) and -len(output) <= key < len(output):
        return output[key]
    return None


def read_labels(value: object, folder: Path, table: Table) -> tuple[str, ...]:
    """Read a spec's ``labels``: a list of strings, or a file beside the spec (one per line, or JSON). Raises
    SpecError.
    """
    expected = "expected a list of strings, or a file with one label a line or a JSON list"
    if value is None:
        return ()
    if isinstance(value, str):
        path = folder / value
        try:
            text = path.read_text(encoding="utf-8")
            value = json.loads(text) if path.suffix == ".json" else text.splitlines()
        except OSError as error:
            table.fail("labels", f"{path} cannot be read: {error.strerror or error}")
        except ValueError as error:
            raise SpecError(f"{table.origin}: labels: {path}: {error}; {expected}") from error
    if not isinstance(value, list) or not all(isinstance(label, str) for label in value):
        table.fail("labels", f"{expected}; found {kind_of(value)}")
    return tuple(value)


# The tokenizer that a spec names: ``module:callable``, or a folder that ``transformers`` reads. No downloads.


def load_tokenizer(reference: str, folder: Path, where: str) -> Any:
    """Load an object with ``decode`` or ``convert_ids_to_tokens``. ``where`` prefixes messages. Raises SpecError."""
    made = _made(reference, folder, where) if looks_like_target(reference) else _read(folder / reference, where)
    if not any(callable(getattr(made, name, None)) for name in ("decode", "convert_ids_to_tokens")):
        raise SpecError(
            f'{where}: "{reference}" gave {kind_of(made)}, which has no decode and no convert_ids_to_tokens'
        )
    return made


def _made(reference: str, folder: Path, where: str) -> Any:
    make = resolve(reference, folder, where)
    try:
        return make()
    except IsthmusError:
        raise
    except Exception as error:
        raise SpecError(f'{where}: "{reference}" raised {type(error).__name__}: {error}') from error


def _read(path: Path, where: str) -> Any:
    if not path.is_dir():
        raise SpecError(f'{where}: expected "module:callable" or a folder that AutoTokenizer reads; no folder {path}')
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise SpecError(f"{where}: a folder needs transformers: {error}") from error
    try:
        # code in the folder is not run
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise SpecError(f"{where}: {path}: {type(error).__name__}: {error}") from error
