"""[draw]: boxes in every format, masks, classes of pixels, with and without a batch; what is not there is named."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from shared_hooks.config import Table
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models import load_spec
from shared_hooks.models.drawing import COLOURS, Drawing

WHITE = (255, 255, 255)
Found = namedtuple("Found", "boxes scores")


@dataclass
class Output:
    pred_boxes: Any
    logits: Any


def drawing(**keys: Any) -> Drawing:
    return Drawing.from_table(Table(keys, "net.toml", "draw"))


def drawn(how: Drawing, output: object, names: tuple[str, ...] = ()) -> Image.Image:
    return how(output, Image.new("RGB", (100, 60), WHITE), names)


def is_box(picture: Image.Image) -> bool:
    """Around (20, 20) to (80, 50), of the first class."""
    edges = ((80, 30), (20, 40), (60, 50))
    return all(picture.getpixel(at) == COLOURS[0] for at in edges) and picture.getpixel((50, 40)) == WHITE


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(
    ("format", "unit", "box"),
    [
        ("xyxy", "pixels", [20, 20, 80, 50]),
        ("xywh", "pixels", [20, 20, 60, 30]),
        ("cxcywh", "pixels", [50, 35, 60, 30]),
        ("cxcywh", "fraction", [0.5, 35 / 60, 0.6, 0.5]),
        ("xyxy", "pixels", [80, 50, 20, 20]),
    ],
)
def test_every_format(format: str, unit: str, box: list[float], batch: bool) -> None:
    boxes = torch.tensor([box], dtype=torch.float32)
    output = {"boxes": boxes[None] if batch else boxes}
    assert is_box(drawn(drawing(boxes="boxes", format=format, unit=unit), output))


def test_outputs_as_libraries_have_them() -> None:
    box, far = [20.0, 20.0, 80.0, 50.0], [5.0, 5.0, 9.0, 9.0]
    lists = [{"boxes": torch.tensor([box, far]), "scores": torch.tensor([0.9, 0.4]), "labels": torch.tensor([0, 3])}]
    picture = drawn(drawing(boxes="0.boxes", scores="0.scores", labels="0.labels"), lists, ("ship",))
    assert is_box(picture) and picture.getpixel((5, 7)) == WHITE
    scores = torch.tensor([[[9.0, 0.0, 0.0], [0.0, 0.0, 9.0]]])  # the last class is no object
    output = Output(torch.tensor([[box, far]]), scores)
    assert is_box(drawn(drawing(boxes="pred_boxes", scores="logits", background=-1), output))
    assert is_box(drawn(drawing(boxes="boxes", scores="scores"), Found(torch.tensor([box]), torch.ones(1))))


def test_masks_and_classes_tint() -> None:
    half = torch.zeros(1, 1, 6, 10)
    half[..., 5:] = 1
    picture = drawn(drawing(masks="masks"), {"masks": half})
    assert picture.getpixel((10, 30)) == WHITE != picture.getpixel((90, 30))
    scores = torch.cat([1 - half, half], dim=1)
    for classes in (scores, scores[0], scores.argmax(1), scores.argmax(1)[0]):
        picture = drawn(drawing(classes="out", background=0), {"out": classes})
        assert picture.getpixel((10, 30)) == WHITE != picture.getpixel((90, 30))


def test_values_that_are_none_are_left_out() -> None:
    nan, huge = float("nan"), 1e30
    boxes = torch.tensor([[nan, 1, 2, 3], [-huge, 0, huge, 4], [20, 20, 80, 50]])
    assert is_box(drawn(drawing(boxes="b", scores="s"), {"b": boxes, "s": torch.tensor([0.9, nan, 0.9])}))
    assert drawn(drawing(boxes="b"), {"b": torch.empty(0, 4)}).getpixel((1, 1)) == WHITE
    drawn(drawing(boxes="b"), {"b": boxes[1:2]}, ("naïve – 船",))


@pytest.mark.parametrize(
    ("keys", "output", "said"),
    [
        (
            {"boxes": "box"},
            {"boxes": torch.ones(1, 4)},
            '"box" is not in the output: there is boxes. Did you mean boxes?',
        ),
        ({"boxes": "1"}, (torch.ones(1, 4),), '"1" is not in the output: there is 0.'),
        ({"boxes": "a.b"}, {"a": torch.ones(1)}, "there is Tensor"),
        ({"boxes": "a"}, {"a": [1, 2]}, '"a" is list'),
        ({"boxes": "a"}, {"a": torch.ones(2, 5)}, "expected (n, 4) boxes"),
        ({"boxes": "a"}, {"a": torch.ones(4)}, "expected 2 dimensions"),
        (
            {"boxes": "a", "scores": "s"},
            {"a": torch.ones(2, 4), "s": torch.ones(3)},
            "2 were found, with scores of shape (3,)",
        ),
        ({"classes": "a"}, {"a": torch.ones(7)}, "expected 2 dimensions"),
    ],
)
def test_missing_file_is_named(keys: dict[str, Any], output: object, said: str) -> None:
    with pytest.raises(InputMismatch) as wrong:
        drawn(drawing(**keys), output)
    assert said in str(wrong.value)


@pytest.mark.parametrize("keys", [{}, {"scores": "s"}, {"boxes": 3}, {"boxes": "a", "format": "xyyx"}, {"box": "a"}])
def test_wrong_tables(keys: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="net.toml: draw"):
        drawing(**keys)


def test_without_the_table(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no \\[draw\\]"):
        load_spec("digits").draw(tmp_path / "x.png", None)
