"""Boxes become cells, predictions find their truths, and what is no box is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_hooks.errors import SpecError
from shared_hooks.selection.capture import Box, cells, iou, matched, read_boxes

corner = st.floats(0, 60, allow_nan=False)
boxes = st.builds(
    lambda x, y, width, height, label: Box(x, y, x + width, y + height, label),
    *(corner, corner, st.floats(0.5, 40), st.floats(0.5, 40), st.sampled_from("ab")),
)


def test_overlap_is_intersection_over_union() -> None:
    assert iou(Box(0, 0, 4, 4, "a"), Box(2, 0, 6, 4, "a")) == pytest.approx(8 / 24)
    assert iou(Box(0, 0, 4, 4, "a"), Box(4, 0, 6, 4, "a")) == 0


@given(boxes, boxes)
def test_overlap_is_symmetric_and_whole_with_itself(a: Box, b: Box) -> None:
    assert iou(a, b) == pytest.approx(iou(b, a))
    assert 0 <= iou(a, b) <= 1 + 1e-9 and iou(a, a) == pytest.approx(1)


def test_each_truth_is_found_once_by_the_surest_of_its_label() -> None:
    truth = Box(0, 0, 10, 10, "cat")
    sure, unsure = Box(0, 0, 10, 9, "cat", 0.9), Box(0, 0, 10, 10, "cat", 0.4)
    dog, far = Box(0, 0, 10, 10, "dog", 1.0), Box(0, 6, 10, 16, "cat", 1.0)
    assert matched([unsure, far, dog, sure], [truth]) == [(sure, truth)]


@given(st.lists(boxes, max_size=6), st.lists(boxes, max_size=6))
def test_matches_are_disjoint_and_overlap_enough(predictions: list[Box], truths: list[Box]) -> None:
    found = matched(predictions, truths)
    assert len(found) <= min(len(predictions), len(truths))
    assert all(iou(a, b) >= 0.5 and a.label == b.label for a, b in found)


def test_cells_follow_the_stride() -> None:
    assert cells(Box(8, 0, 24, 9, "a"), (32, 32), (4, 4)) == (slice(0, 2), slice(1, 3))
    assert cells(Box(31, 31, 32, 32, "a"), (32, 32), (4, 4)) == (slice(3, 4), slice(3, 4))
    assert cells(Box(-5, -5, 99, 99, "a"), (32, 32), (4, 2)) == (slice(0, 4), slice(0, 2))
    with pytest.raises(SpecError, match="outside the input"):
        cells(Box(40, 0, 50, 10, "a"), (32, 32), (4, 4))


@given(boxes)
def test_a_box_inside_touches_a_cell_or_more_and_only_such_that_it_overlaps(box: Box) -> None:
    rows, columns = cells(box, (64, 64), (8, 8))
    for part, low, high in ((rows, box.top, box.bottom), (columns, box.left, box.right)):
        assert 0 <= part.start < part.stop <= 8
        assert part.start * 8 <= low < (part.start + 1) * 8
        assert (part.stop - 1) * 8 < max(high, low + 8)


def test_boxes_are_read(tmp_path: Path) -> None:
    file = tmp_path / "boxes.json"
    file.write_text(json.dumps({"a.png": [[0, 1, 2, 3.5, "cat"], [0, 0, 1, 1, 7, 0.25]], "b.png": []}))
    assert read_boxes(file) == {"a.png": [Box(0, 1, 2, 3.5, "cat"), Box(0, 0, 1, 1, "7", 0.25)], "b.png": []}


@pytest.mark.parametrize(
    "text",
    [
        *("[", "[]", '{"a": 1}', '{"a": [1]}', '{"a": [[0, 0, 1, 1]]}', '{"a": [["0", 0, 1, 1, "x"]]}'),
        *('{"a": [[0, 0, 0, 1, "x"]]}', '{"a": [[0, 0, NaN, 1, "x"]]}', '{"a": [[0, 0, 1, 1, "x", true]]}'),
    ],
)
def test_invalid_box_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "boxes.json"
    file.write_text(text)
    with pytest.raises(SpecError, match="boxes.json"):
        read_boxes(file)
    with pytest.raises(SpecError):
        Box(0, 0, math.inf, 1, "x")
