"""Capture statistics of a layer's channels over a data set with a forward hook, without keeping activations."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from shared_hooks.errors import CutRefused, InputMismatch, SpecError
from shared_hooks.modules import ROOT, call_name, call_parts, fast_path_off, walk
from shared_hooks.tensors import Buffers, copied

# Where to look at a layer: object boxes as cells of its feature map, and predictions that found a true object.
#
# Boxes are (left, top, right, bottom) in pixels of the model's input, after preprocessing; right and bottom are
# exclusive.


IOU: Final = 0.5
"""Overlap (intersection over union) from which a prediction matches an object."""


@dataclass(frozen=True)
class Box:
    """One object's bounding box and label, and for a prediction its score."""

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
    """Return intersection over union, 0 to 1."""
    width = min(a.right, b.right) - max(a.left, b.left)
    height = min(a.bottom, b.bottom) - max(a.top, b.top)
    shared = max(width, 0.0) * max(height, 0.0)
    return shared / (_area(a) + _area(b) - shared)


def _area(box: Box) -> float:
    return (box.right - box.left) * (box.bottom - box.top)


def matched(predictions: Sequence[Box], truths: Sequence[Box], threshold: float = IOU) -> list[tuple[Box, Box]]:
    """Return (prediction, truth) of each prediction that matches an object of its label, by score; each truth once."""
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
    """Return (rows, columns) of the feature map that the box touches; sizes are (height, width), the stride their
    ratio.

    Raises SpecError for a box outside of the input.
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
    """Read the boxes of each input file, from JSON: {"file.png": [[left, top, right, bottom, label], ...]}.

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


@dataclass(frozen=True)
class Sample:
    """One call of the model: its inputs, the class of each row of its batch, and boxes to look into (batch of one)."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    labels: Sequence[str | None] = ()
    boxes: Sequence[Box] | None = None
    """None: everywhere; an empty list: nowhere."""
    name: str = ""
    """For messages."""


@dataclass(frozen=True)
class Captured:
    """Statistics of a layer's C channels. Per-channel numbers are float64 of shape (C,), over all values captured."""

    layer: str
    dim: int
    fill: torch.Tensor
    """The mean of all captured values, which replaces a channel that is not sent."""
    mean: torch.Tensor
    magnitude: torch.Tensor
    """The mean of the absolute values."""
    variance: torch.Tensor
    rows: torch.Tensor
    """(places, C): each channel's mean over one place: one box, or one whole row of a batch."""
    labels: tuple[str | None, ...]
    """The class of each place."""

    @property
    def channels(self) -> int:
        return int(self.fill.numel())


def place_of(model: nn.Module, layer: str, sample: Sample) -> tuple[str, int]:
    """Return (module, channel dimension) at which ``layer``'s output can be captured and masked.

    ``layer`` is a module's path, "relu#2" for its second call. A module that runs several times cannot be masked at one
    of its calls; if the call is the last step of a block that runs once, the block's output is the same tensor, and the
    block is used. For the dimension see `_Layout`. Raises CutRefused, and SpecError for an unknown layer.
    """
    calls: dict[str, list[tuple[Any, tuple[str, ...], int]]] = defaultdict(list)
    running: list[str] = []
    handles = []
    layout = _Layout()
    for module, info in walk(model, None).items():
        path = info.path
        if isinstance(module, torch.jit.ScriptModule):
            continue  # takes no hooks

        def before(module: nn.Module, args: Any, path: str = path) -> None:
            running.append(path)
            layout.reads(module, args[0] if args else None)

        def after(module: nn.Module, _args: Any, output: Any, path: str = path) -> None:
            running.pop()
            layout.gives(module, output)
            calls[path].append((output, tuple(running), layout.guess(output)))

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        run(model, sample)
    finally:
        for handle in handles:
            handle.remove()
    path, which = call_parts(layer)
    if not 1 <= which <= len(calls[path]):
        raise SpecError(f"layer {layer}: it did not run, or where no hook sees it")
    output, around, guess = calls[path][which - 1]
    if not isinstance(output, torch.Tensor) or output.dim() < 2:
        raise CutRefused(f"layer {layer}: its output is no tensor with channels")
    for candidate in (path, *reversed(around)):
        if candidate != ROOT and len(calls[candidate]) == 1 and calls[candidate][0][0] is output:
            return candidate, layout.dim(output, guess)
    raise CutRefused(
        f"layer {call_name(path, which)} runs {len(calls[path])} times, and no block that runs once ends with this call"
    )


class _Layout:
    """Finds the channel dimension of an output, 1 or the last one, from the layers around it.

    Convolutions, batch and group normalisations use dimension 1; linear layers, embeddings and layer normalisations the
    last one. For other modules' outputs, the next such layer that reads this very tensor decides. Otherwise the
    dimension is the one whose size matches the channels of the last such layer before; if both or neither match, it is
    that layer's. Before any such layer, dimension 1, and the last one of three.
    """

    _FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
    _LAST = (nn.Linear, nn.Embedding, nn.LayerNorm)

    def __init__(self) -> None:
        self._channels = self._dim = 0
        self._dims: dict[int, int] = {}

    def reads(self, module: nn.Module, value: Any) -> None:
        """Called before ``module`` runs."""
        if known := self._of(module):
            self._dims.setdefault(id(value), known)

    def gives(self, module: nn.Module, output: Any) -> None:
        """Called after ``module`` has run; the caller keeps outputs alive, so that an id means one tensor."""
        if not isinstance(output, torch.Tensor) or output.dim() < 2:
            return
        known = self._of(module)
        if known:
            self._dim, self._channels = known, output.shape[known]
            self._dims[id(output)] = known

    def guess(self, output: Any) -> int:
        """Return a guess from the layers before."""
        if not isinstance(output, torch.Tensor) or output.dim() < 3:
            return 1
        if not self._dim:
            return -1 if output.dim() == 3 else 1
        fits = [dim for dim in (1, -1) if output.shape[dim] == self._channels]
        return fits[0] if len(fits) == 1 else self._dim

    def dim(self, output: torch.Tensor, guess: int) -> int:
        """Return the dimension when the model has run."""
        return 1 if output.dim() == 2 else self._dims.get(id(output), guess)

    def _of(self, module: nn.Module) -> int:
        return 1 if isinstance(module, self._FIRST) else -1 if isinstance(module, self._LAST) else 0


def capture(model: nn.Module, layer: str, samples: Iterable[Sample]) -> Captured:
    """Return statistics of ``layer``'s channels over ``samples``; sums are float64 on the CPU. The model is unchanged.

    Raises CutRefused or SpecError for a layer that cannot be captured, InputMismatch if there were no values.
    """
    samples = list(samples)
    if not samples:
        raise InputMismatch("no calibration inputs")
    module, dim = place_of(model, layer, samples[0])
    sums = _Sums()
    for sample in samples:
        if sample.boxes is not None and len(sample.labels) > 1:
            raise InputMismatch("with boxes, one input at a time")
        hooked(model, module, lambda output, sample=sample: sums.add(output, dim, sample), sample)  # type: ignore[misc]
    if sums.total.count == 0 or not sums.rows:
        raise InputMismatch(f"layer {layer}: no calibration input has a box")
    looked = sums.looked
    mean = looked.values / looked.count
    captured = Captured(
        layer=layer,
        dim=dim,
        fill=sums.total.values / sums.total.count,
        mean=mean,
        magnitude=looked.absolute / looked.count,
        variance=(looked.squares / looked.count - mean**2).clamp(min=0),
        rows=torch.stack(sums.rows),
        labels=tuple(sums.labels),
    )
    bad = (~captured.rows.isfinite()).any(0) | ~captured.fill.isfinite()
    if bad.any():
        raise InputMismatch(f"layer {layer}: NaN or Inf in channels {bad.nonzero().flatten().tolist()[:8]}")
    return captured


def hooked(model: nn.Module, module: str, look: Callable[[torch.Tensor], None], sample: Sample) -> Any:
    """Run the model once, passing ``module``'s output to ``look``, and return the model's output."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor):
            raise CutRefused(f"layer {module}: its output is no tensor")
        look(output)

    handle = model.get_submodule(module).register_forward_hook(hook)
    try:
        return run(model, sample)
    finally:
        handle.remove()


def run(model: nn.Module, sample: Sample) -> Any:
    """Return the model's output, computed as Isthmus serves it; on copies, as a model may write to its inputs."""
    args, kwargs = copied(sample.args, dict(sample.kwargs))
    with torch.no_grad(), fast_path_off(), same_buffers(model):
        return model(*args, **kwargs)


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Restore what a model in training mode writes to its buffers (batch statistics)."""
    buffers = Buffers(model) if any(module.training for module in model.modules()) else None
    try:
        yield
    finally:
        if buffers is not None:
            buffers.restore()


class _Moments:
    """Sums over values, per channel."""

    def __init__(self) -> None:
        self.count = 0
        self.values = self.absolute = self.squares = torch.zeros(())

    def add(self, values: torch.Tensor) -> None:
        """Add ``values``: (C, any number)."""
        self.count += values.shape[1]
        self.values = self.values + values.sum(1)
        self.absolute = self.absolute + values.abs().sum(1)
        self.squares = self.squares + values.square().sum(1)


class _Sums:
    def __init__(self) -> None:
        self.total, self.looked = _Moments(), _Moments()
        self.rows: list[torch.Tensor] = []
        self.labels: list[str | None] = []

    def add(self, output: torch.Tensor, dim: int, sample: Sample) -> None:
        features = output.detach().movedim(dim, 1).to("cpu", torch.float64)
        self.total.add(features.transpose(0, 1).flatten(1))
        labels = list(sample.labels) or [None] * len(features)
        if sample.boxes is None:
            if len(labels) != len(features):
                raise InputMismatch(f"{len(labels)} labels for a batch of {len(features)}")
            for row, label in zip(features, labels, strict=True):
                self._look(row.reshape(len(row), -1), label)
            return
        size = next((one.shape[-2:] for one in (*sample.args, *sample.kwargs.values()) if _is_image(one)), None)
        if features.dim() != 4 or len(features) != 1 or size is None:
            raise InputMismatch("boxes need an image (1, C, H, W) as input and a layer that gives (1, C, H, W)")
        for box in sample.boxes:
            try:
                rows, columns = cells(box, (size[0], size[1]), (features.shape[2], features.shape[3]))
            except SpecError as error:
                raise SpecError(f"{sample.name}: {error}" if sample.name else str(error)) from error
            self._look(features[0, :, rows, columns].flatten(1), box.label)

    def _look(self, values: torch.Tensor, label: str | None) -> None:
        self.looked.add(values)
        self.rows.append(values.mean(1))
        self.labels.append(label)


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4
