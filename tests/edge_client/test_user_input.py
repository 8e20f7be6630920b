"""Whatever form an input comes in, the model gets the same, and two that differ are distinguished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from edge_client.call import Call
from edge_client.user_input import labelled, named_inputs
from shared_hooks.errors import InputMismatch
from shared_hooks.models import load_spec

IMAGE = Path("shared_hooks/models/digits/images/0011_label1.png").resolve()


def test_a_file_its_bytes_its_picture_and_its_tensor_are_one_input() -> None:
    spec = load_spec("digits")
    (wanted,), _ = spec.preprocess(IMAGE)
    for value in (IMAGE, str(IMAGE), IMAGE.read_bytes(), Image.open(IMAGE), wanted, wanted.numpy(), (wanted,)):
        (one,) = named_inputs(value)
        (found,), kwargs = one.read(spec)
        assert torch.equal(found, wanted) and kwargs == {}, type(value).__name__
        assert one.read(spec)[0][0] is not wanted  # nobody else's


def test_a_list_is_several_and_a_tuple_one() -> None:
    both = named_inputs([np.zeros(3), {"x": np.zeros(3)}])
    assert [one.name for one in both] == ["input 0", "input 1"]
    assert len(named_inputs((np.zeros(3), np.zeros(3)))) == 1
    assert [one.truth for one in named_inputs(IMAGE.parent)][:1] == ["1"] and named_inputs(None) == []
    assert len(named_inputs([str(IMAGE), str(IMAGE)])) == 1


def test_a_digest_is_of_what_the_input_holds() -> None:
    picture = Image.open(IMAGE)
    values: list[Any] = [
        *(np.zeros(3), np.ones(3), np.zeros(3, np.float32), np.zeros((1, 3))),
        *(
            (np.zeros(3), 1),
            {"x": np.zeros(3)},
            Call((), {"y": np.zeros(3)}),
            b"abc",
            b"abd",
            picture,
            picture.rotate(90),
        ),
    ]
    digests = [one.digest() for one in named_inputs(values)]
    assert len(set(digests)) == len(values) and all(digests)
    assert named_inputs(np.zeros(3))[0].digest() == named_inputs(torch.zeros(3, dtype=torch.float64))[0].digest()


def test_pairs_have_labels_and_what_is_none_is_reported() -> None:
    found = labelled([(np.zeros(3), 7), (np.zeros(3), torch.tensor(8)), (np.zeros(3), None)], "data")
    assert [one.truth for one in found] == ["7", "8", None]
    with pytest.raises(InputMismatch, match="entry 1 is no such pair"):
        labelled([(np.zeros(3), 7), np.zeros(3)], "data")
    with pytest.raises(InputMismatch, match="of type int is not taken: expected a tensor"):
        named_inputs([3])
