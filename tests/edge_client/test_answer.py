"""`Answer`: the raw output and the result; shown shortly, in a notebook too; and it travels without anybody's code."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251 - what people do with answers: nothing of it comes from elsewhere
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edge_client import Answer, EdgeClient, Failure
from shared_hooks.errors import SpecError
from tests.shared_hooks.shown import check, read

PICTURE = Path(__file__).parents[2] / "shared_hooks" / "models" / "digits" / "images" / "0011_label1.png"
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def answer() -> Iterator[Answer]:
    with EdgeClient(None, "digits", split="edge-only") as client:
        assert repr(client).startswith("EdgeClient(server=None, model=digits, split='edge-only'")
        yield client.infer(PICTURE)


def test_answer_is_shown_in_a_line_and_in_a_notebook(answer: Answer) -> None:
    assert "tensor(1x10 float32)" in repr(answer) and "best '1'" in repr(answer)
    text = read(answer._repr_html_())
    assert "edge compute" in text and "label" in text
    check(answer, Failure(3, "x" * 10_000, SpecError("y" * 10_000)))


def test_labels_are_text(answer: Answer) -> None:
    other = copy.replace(answer) if hasattr(copy, "replace") else copy.copy(answer)
    object.__setattr__(other, "_result", [type(answer.result[0])(HOSTILE, 0, 0.5)])
    assert HOSTILE in read(other._repr_html_())


def test_a_result_that_fails_is_raised_where_it_is_asked_for(answer: Answer) -> None:
    def wrong(output: object) -> None:
        raise SpecError("no scores")

    other = Answer(**{name: getattr(answer, name) for name in answer.__match_args__ if name != "postprocess"})
    object.__setattr__(other, "postprocess", wrong)
    check(other)
    with pytest.raises(SpecError, match="no scores"):
        _ = other.result


def test_pickled_answer_has_no_code(answer: Answer) -> None:
    other = pickle.loads(pickle.dumps(answer))  # noqa: S301
    assert other.result == answer.result and other.postprocess is None
    assert torch.equal(other.output, answer.output) and other.times == answer.times
