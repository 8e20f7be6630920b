"""Class scores to predictions."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from shared_hooks.errors import InputMismatch
from shared_hooks.models.drawing import Prediction, TopK


@dataclass
class Output:
    logits: torch.Tensor


SCORES = torch.tensor([[0.0, 2.0, 1.0]])


@pytest.mark.parametrize("output", [SCORES, SCORES[0], {"logits": SCORES}, Output(SCORES), (SCORES, None), [SCORES]])
def test_where_scores_are_found(output: object) -> None:
    assert TopK(top_k=2, softmax=False)(output, ("a", "b")) == [Prediction("b", 1, 2.0), Prediction("2", 2, 1.0)]


def test_named_output_and_softmax() -> None:
    found = TopK(output="aux")({"logits": SCORES, "aux": torch.tensor([[3.0, 1.0]])}, ())
    assert [prediction.index for prediction in found] == [0, 1]
    assert sum(prediction.score for prediction in found) == pytest.approx(1.0)
    assert TopK(output=-1)((None, SCORES), ())[0].index == 1


def test_a_batch_has_rows() -> None:
    found = TopK(top_k=1)(torch.tensor([[0.0, 1.0], [3.0, 1.0]]), ())
    assert [(prediction.row, prediction.index) for prediction in found] == [(0, 1), (1, 0)]


def test_nan_passes_through() -> None:
    found = TopK(top_k=1)(torch.tensor([[float("nan"), 1.0]]), ())
    assert found[0].score != found[0].score


@pytest.mark.parametrize("output", [None, torch.ones(1, 2, 3), torch.ones(()), torch.ones(1, 0), {"x": SCORES}, ()])
def test_outputs_without_scores(output: object) -> None:
    assert TopK(strict=False)(output, ()) == []
    with pytest.raises(InputMismatch, match="postprocess: expected class scores"):
        TopK()(output, ())
