"""Detect an output's kind, and compare it with the whole model's: a number, the loss, and other measures.

classes     the share of rows whose top class changed; Kullback-Leibler divergence of the scores (nats)
embedding   1 - cosine of a row; relative error
boxes       1 - IoU of the boxes, an unmatched one counting 0
tensors     the relative error of all numbers together; cosine
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from shared_hooks.errors import InputMismatch, SpecError, near
from shared_hooks.models import ModelSpec
from shared_hooks.tensors import flatten

KINDS: Final = ("classes", "embedding", "boxes", "tensors")
MEANS: Final[Mapping[str, str]] = {
    "classes": "share of inputs whose first class changes",
    "embedding": "1 - cosine with the whole model's embedding",
    "boxes": "1 - overlap (IoU) with the whole model's boxes",
    "tensors": "relative error of the output",
}
EMBEDDINGS: Final = ("sentence_embedding", "pooler_output", "text_embeds", "image_embeds", "embeddings")
"""Names of embeddings in outputs."""
LEAST_SCORE: Final = 0.5
"""Minimum score of a detection."""
_UNIT: Final = 1e-3


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """Comparison of one row. ``loss``: 0 if nothing changed; ``right``, ``whole_right``: by its label, if it
    has one.
    """

    loss: float
    measures: Mapping[str, float] = field(default_factory=dict)
    right: bool | None = None
    whole_right: bool | None = None


def kind_of(output: Any, spec: ModelSpec, labelled: bool) -> str:
    """Return one of `KINDS`: by the spec, else by names and shapes."""
    if _boxes(output) is not None:
        return "boxes"
    if spec.ranks_classes or labelled or _entry(output, "logits") is not None:
        if _first(spec, output):
            return "classes"
        if labelled:
            raise InputMismatch("there are labels, but no class scores in the output to compare with them")
    if _named_embedding(output) is not None:
        return "embedding"
    if isinstance(output, torch.Tensor) and output.dim() == 2 and output.is_floating_point():
        lengths = output.double().norm(dim=1)
        is_unit = bool(((lengths - 1).abs() < _UNIT).all())
        return "embedding" if is_unit and bool((output < 0).any()) else "classes"
    return "tensors"


class Compare(Protocol):
    """Compares an input's whole output with another one, row by row. Raises InputMismatch for another kind."""

    def __call__(self, whole: Any, other: Any, label: str | None = None) -> list[ComparedRow]: ...


def comparer(kind: str, spec: ModelSpec) -> Compare:
    """Return the comparison of outputs of ``kind``. Raises SpecError."""
    known: dict[str, Compare] = {
        "classes": lambda whole, other, label=None: _classes(spec, whole, other, label),
        "embedding": lambda whole, other, label=None: _embeddings(whole, other),
        "boxes": lambda whole, other, label=None: _detections(whole, other),
        "tensors": lambda whole, other, label=None: [_tensors(whole, other)],
    }
    if kind not in known:
        raise SpecError(f'kind="{kind:.60}": must be one of {", ".join(KINDS)}.{near(kind, KINDS)}')
    return known[kind]


def _classes(spec: ModelSpec, whole: Any, other: Any, label: str | None) -> list[ComparedRow]:
    before, after = _first(spec, whole), _first(spec, other)
    if not before:
        raise InputMismatch("no class scores in the output")
    divergences = _divergences(whole, other)
    rows = []
    for at, name in enumerate(before):
        now = after[at] if at < len(after) else None
        measures = {"kl": divergences[at]} if at < len(divergences) else {}
        truths = (None, None) if label is None else (now == label, name == label)
        rows.append(ComparedRow(float(now != name), measures, *truths))
    return rows


def _first(spec: ModelSpec, output: Any) -> list[str]:
    """Return the first label of every row."""
    found: dict[int, str] = {}
    for one in spec.postprocess(output):
        if not math.isnan(one.score):
            found.setdefault(one.row, one.label)
    return [found[row] for row in sorted(found)]


def _divergences(whole: Any, other: Any) -> list[float]:
    scores = [_scores(each) for each in (whole, other)]
    if scores[0] is None or scores[1] is None or scores[0].shape != scores[1].shape:
        return []
    p, q = (torch.log_softmax(one.double(), dim=-1) for one in scores if one is not None)
    found: list[float] = (p.exp() * (p - q)).sum(dim=-1).clamp(min=0).tolist()
    return [_bounded(value) for value in found]


def _scores(output: Any) -> torch.Tensor | None:
    found = output if isinstance(output, torch.Tensor) else _entry(output, "logits")
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor) or found.dim() not in (1, 2) or not found.numel():
        return None
    return found.reshape(-1, found.shape[-1])


def _embeddings(whole: Any, other: Any) -> list[ComparedRow]:
    pairs = [_embedding(each) for each in (whole, other)]
    if pairs[0] is None:
        raise InputMismatch("no embedding in the output: expected a tensor (rows, features)")
    if pairs[1] is None or pairs[0].shape != pairs[1].shape:
        return [ComparedRow(1.0) for _ in pairs[0]]
    return [_numbers(a, b, by_cosine=True) for a, b in zip(*pairs, strict=True)]


def _embedding(output: Any) -> torch.Tensor | None:
    found = output if isinstance(output, torch.Tensor) else _named_embedding(output)
    if found is None:
        floats = [one for one in flatten(output)[1] if one.is_floating_point() and one.dim() >= 1]
        found = floats[0] if floats else None
    if not isinstance(found, torch.Tensor) or not found.is_floating_point() or not found.numel():
        return None
    return found.reshape(1, -1) if found.dim() < 2 else found.flatten(1)


def _named_embedding(output: Any) -> torch.Tensor | None:
    found = (_entry(output, name) for name in EMBEDDINGS)
    return next((one for one in found if isinstance(one, torch.Tensor) and one.is_floating_point()), None)


def _tensors(whole: Any, other: Any) -> ComparedRow:
    (form, mine), (its_form, its) = flatten(whole), flatten(other)
    if form != its_form or [one.shape for one in mine] != [one.shape for one in its]:
        return ComparedRow(1.0)
    floats = [one.is_floating_point() or one.is_complex() for one in mine]
    if not any(floats):
        changed = sum(int((a != b).sum()) for a, b in zip(mine, its, strict=True))
        return ComparedRow(changed / max(1, sum(one.numel() for one in mine)))
    a, b = (
        torch.cat([_real(one) for one, is_float in zip(tensors, floats, strict=True) if is_float])
        for tensors in (mine, its)
    )
    return _numbers(a, b, by_cosine=False)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double().flatten()


def _numbers(a: torch.Tensor, b: torch.Tensor, *, by_cosine: bool) -> ComparedRow:
    a, b = a.double(), b.double()
    length, its, off = float(a.norm()), float(b.norm()), float((a - b).norm())
    if not math.isfinite(length + its):  # NaN and infinities where the whole model has them count as no loss
        a, b = torch.nan_to_num(a, 0.0, 0.0, 0.0), torch.nan_to_num(b, 0.0, 0.0, 0.0)
        length, its, off = float(a.norm()), float(b.norm()), float((a - b).norm())
    error = 0.0 if off == 0 else _bounded(off / length) if length else 1.0
    cosine = 1.0 if off == 0 else float(a @ b) / (length * its) if length and its else 0.0
    loss = max(0.0, 1 - cosine) if by_cosine else error
    return ComparedRow(loss, {"cosine": cosine, "relative_error": error})


def _detections(whole: Any, other: Any) -> list[ComparedRow]:
    before, after = _boxes(whole), _boxes(other)
    if before is None:
        raise InputMismatch("no boxes in the output: expected boxes with scores, as torchvision and DETR give them")
    if after is None or len(after) != len(before):
        return [ComparedRow(1.0) for _ in before]
    return [_overlap(a, b) for a, b in zip(before, after, strict=True)]


def _overlap(mine: _Found, its: _Found) -> ComparedRow:
    """Match boxes greedily, the largest IoU first, within a class."""
    if not len(mine.boxes) or not len(its.boxes):
        return ComparedRow(0.0 if len(mine.boxes) == len(its.boxes) else 1.0)
    overlaps = _iou(mine.boxes, its.boxes) * (mine.classes[:, None] == its.classes[None, :])
    total, matched = 0.0, []
    for _ in range(min(overlaps.shape)):
        value, at = overlaps.flatten().max(dim=0)
        if float(value) <= 0:
            break
        row, column = divmod(int(at), overlaps.shape[1])
        overlaps[row, :] = overlaps[:, column] = -1
        total += float(value)
        matched.append(float(value))
    most = max(len(mine.boxes), len(its.boxes))
    found = sum(one >= LEAST_SCORE for one in matched) / len(mine.boxes)
    return ComparedRow(1 - total / most, {"iou": total / len(matched) if matched else 0.0, "found": found})


def _iou(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return IoU of boxes (x0, y0, x1, y1): (len(a), len(b))."""
    low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    common = (high - low).clamp(min=0).prod(dim=2)
    areas = [(one[:, 2:] - one[:, :2]).clamp(min=0).prod(dim=1) for one in (a, b)]
    return common / (areas[0][:, None] + areas[1][None, :] - common).clamp(min=1e-12)


@dataclass(frozen=True)
class _Found:
    """Detections in one image: (n, 4) corners, and n classes."""

    boxes: torch.Tensor
    classes: torch.Tensor


def _boxes(output: Any) -> list[_Found] | None:
    """Return detections in torchvision's form (a list of {"boxes", "labels", "scores"}), or DETR's (pred_boxes and
    logits).
    """
    if isinstance(output, Mapping) and "boxes" in output and "scores" in output:
        output = [output]
    if isinstance(output, (list, tuple)) and output and all(_is_detection(one) for one in output):
        return [_kept(one["boxes"], one["scores"], one.get("labels")) for one in output]
    boxes, logits = _entry(output, "pred_boxes"), _entry(output, "logits")
    if logits is None:
        logits = _entry(output, "pred_logits")
    if not isinstance(boxes, torch.Tensor) or not isinstance(logits, torch.Tensor) or boxes.shape[-1:] != (4,):
        return None
    scores, classes = torch.softmax(logits.float(), dim=-1)[..., :-1].max(dim=-1)
    middle, size = boxes[..., :2], boxes[..., 2:]
    corners = torch.cat([middle - size / 2, middle + size / 2], dim=-1)
    return [_kept(*one) for one in zip(corners, scores, classes, strict=True)]


def _is_detection(one: Any) -> bool:
    return isinstance(one, Mapping) and all(isinstance(one.get(name), torch.Tensor) for name in ("boxes", "scores"))


def _kept(boxes: torch.Tensor, scores: torch.Tensor, classes: torch.Tensor | None) -> _Found:
    sure = scores >= LEAST_SCORE
    names = torch.zeros_like(scores, dtype=torch.int64) if classes is None else classes
    return _Found(boxes[sure].double(), names[sure])


def _entry(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _bounded(value: float) -> float:
    """Bound NaN and infinities."""
    return value if math.isfinite(value) else 1e9
