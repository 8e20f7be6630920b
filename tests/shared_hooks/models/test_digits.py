"""The shipped model: it loads, it reads its images, and its training can be repeated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from shared_hooks.models import find_inputs, load_spec
from shared_hooks.models.digits import train

HERE = Path(train.__file__).parent


def test_weights_load_strictly_and_are_small() -> None:
    model = load_spec("digits").load_model("cpu")
    stored = load_file(HERE / "weights.safetensors")
    assert model.state_dict().keys() == stored.keys()
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert (HERE / "weights.safetensors").stat().st_size < 2_000_000


def test_the_shipped_images_are_recognised() -> None:
    spec = load_spec("digits")
    model = spec.load_model("cpu")
    items = find_inputs(HERE / "images")
    assert len(items) == train.SHIPPED_IMAGES
    right = 0
    with torch.inference_mode():
        for item in items:
            args, kwargs = spec.preprocess(item)
            best, *others = spec.postprocess(model(*args, **kwargs))
            assert len(others) == 2 and best.score >= others[0].score
            right += best.label == item.truth
    assert right >= 0.985 * len(items)


def test_the_shipped_images_are_the_first_held_out_ones() -> None:
    training, held_out = train.load_images()
    assert len(held_out) == train.HELD_OUT and len(training) + len(held_out) == 1797
    assert not {image.index for image in training} & {image.index for image in held_out}
    assert {path.name for path in (HERE / "images").iterdir()} == {
        image.file_name for image in held_out[: train.SHIPPED_IMAGES]
    }
    for image in held_out[: train.SHIPPED_IMAGES]:
        assert np.array_equal(np.asarray(Image.open(HERE / "images" / image.file_name)), image.pixels)


def test_all_held_out_images() -> None:
    assert train.accuracy(load_spec("digits").load_model("cpu"), train.load_images()[1]) >= 0.985


def test_training_and_preprocessing_see_the_same_numbers() -> None:
    image = train.load_images()[1][0]
    (tensor,), _ = load_spec("digits").preprocess(HERE / "images" / image.file_name)
    torch.testing.assert_close(tensor, train.as_tensors([image])[0], rtol=0, atol=1e-6)


def test_training_repeats_bit_for_bit() -> None:
    """Two epochs on a part of the images; `train.py --check` compares the whole training with the shipped weights."""
    training, _ = train.load_images()
    state = torch.random.get_rng_state()
    once, again = (train.train(training[:192], epochs=2, quiet=True).state_dict() for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert torch.equal(state, torch.random.get_rng_state())


def test_training_learns() -> None:
    training, held_out = train.load_images()
    model = train.train(training[:640], epochs=4, quiet=True)
    assert train.accuracy(model, held_out[:120]) > 0.5


def test_check_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--check", "--epochs", "0"]) == 1
    assert "tensors differ from the shipped weights" in capsys.readouterr().out


def test_example_is_the_same_in_every_process() -> None:
    first, second = load_spec("digits").example(), load_spec("digits").example()
    assert first is not None and second is not None
    assert torch.equal(first[0][0], second[0][0])
    assert first[0][0].shape == (1, 1, 32, 32)
