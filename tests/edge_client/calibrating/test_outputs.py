"""The kinds of outputs, and how far one is from another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edge_client.calibrating.outputs import comparer, kind_of
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models import ModelSpec

PLAIN = ModelSpec("m", "a test", Path(), "")
LABELLED = ModelSpec("m", "a test", Path(), "", labels=("cat", "dog", "owl"))
UNIT = torch.nn.functional.normalize(torch.randn(2, 8), dim=1)
BOX = {
    "boxes": torch.tensor([[0.0, 0.0, 10.0, 10.0], [20.0, 20.0, 30.0, 30.0], [0.0, 0.0, 1.0, 1.0]]),
    "labels": torch.tensor([1, 2, 1]),
    "scores": torch.tensor([0.9, 0.8, 0.1]),
}


@pytest.mark.parametrize(
    ("output", "spec", "labelled", "kind"),
    [
        (torch.randn(2, 3), LABELLED, False, "classes"),
        (torch.randn(2, 3) * 9, PLAIN, False, "classes"),
        (SimpleNamespace(logits=torch.randn(1, 4)), PLAIN, False, "classes"),
        (UNIT, PLAIN, False, "embedding"),
        (UNIT, PLAIN, True, "classes"),
        ({"last_hidden_state": torch.randn(1, 5, 8), "pooler_output": torch.randn(1, 8)}, PLAIN, False, "embedding"),
        ([BOX], PLAIN, False, "boxes"),
        (SimpleNamespace(logits=torch.randn(1, 7, 4), pred_boxes=torch.rand(1, 7, 4)), PLAIN, False, "boxes"),
        (torch.randn(1, 5, 8), PLAIN, False, "tensors"),
        ((torch.randn(1, 2, 3, 3), torch.arange(4)), PLAIN, False, "tensors"),
    ],
)
def test_the_kind_is_found_by_spec_names_and_shape(output: Any, spec: ModelSpec, labelled: bool, kind: str) -> None:
    assert kind_of(output, spec, labelled) == kind


@pytest.mark.parametrize("kind", ["classes", "embedding", "tensors"])
def test_nothing_is_lost_where_nothing_changed(kind: str) -> None:
    output = torch.randn(3, 4)
    assert [row.loss for row in comparer(kind, LABELLED)(output, output.clone())] == [0.0] * (
        1 if kind == "tensors" else 3
    )


def test_classes_lose_where_the_first_changes_and_are_reported_by_their_label() -> None:
    whole, other = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.0]]), torch.tensor([[2.9, 1.0, 0.0], [0.0, 1.0, 2.0]])
    same, changed = comparer("classes", LABELLED)(whole, other, label="owl")
    assert (same.loss, changed.loss) == (0.0, 1.0)
    assert (changed.right, changed.whole_right) == (True, False)
    assert same.measures["kl"] < changed.measures["kl"]
    lost = comparer("classes", LABELLED)(whole, torch.full((2, 3), float("nan")))
    assert [row.loss for row in lost] == [1.0, 1.0]


def test_embeddings_lose_by_their_angle_and_tensors_by_their_error() -> None:
    whole = torch.tensor([[1.0, 0.0]])
    (turned,) = comparer("embedding", PLAIN)(whole, torch.tensor([[1.0, 1.0]]))
    assert turned.loss == pytest.approx(1 - 0.5**0.5)
    (longer,) = comparer("embedding", PLAIN)(whole, torch.tensor([[2.0, 0.0]]))
    assert longer.loss == pytest.approx(0) and longer.measures["relative_error"] == pytest.approx(1)
    (error,) = comparer("tensors", PLAIN)({"a": torch.tensor([3.0, 4.0])}, {"a": torch.tensor([3.0, 3.5])})
    assert error.loss == pytest.approx(0.1)
    (other_shape,) = comparer("tensors", PLAIN)(torch.zeros(3), torch.zeros(4))
    assert other_shape.loss == 1.0


def test_boxes_lose_what_does_not_overlap_and_what_is_not_found() -> None:
    compare = comparer("boxes", PLAIN)
    assert compare([BOX], [BOX])[0].loss == pytest.approx(0)
    moved = {**BOX, "boxes": BOX["boxes"] + torch.tensor([[0.0, 5.0, 0.0, 5.0], [0.0] * 4, [0.0] * 4])}
    assert compare([BOX], [moved])[0].loss == pytest.approx((1 - 1 / 3) / 2)
    renamed = {**BOX, "labels": torch.tensor([3, 2, 1])}
    assert compare([BOX], [renamed])[0].loss == pytest.approx(1 / 2)
    nothing = {name: tensor[:0] for name, tensor in BOX.items()}
    assert compare([BOX], [nothing])[0].loss == 1.0
    assert compare([nothing], [nothing])[0].loss == 0.0


def test_an_output_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(InputMismatch, match="no boxes"):
        comparer("boxes", PLAIN)(torch.zeros(1, 3), torch.zeros(1, 3))
    with pytest.raises(InputMismatch, match="labels, but no class scores"):
        kind_of(torch.zeros(1, 2, 3), PLAIN, True)
    with pytest.raises(SpecError, match="must be one of classes"):
        comparer("clases", PLAIN)
