"""What `infer` takes, read as the command line reads files; and what it does not take, by name."""

from __future__ import annotations

import io
from collections import UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from edge_client import Call, EdgeClient, ModelChoice
from edge_client.inputs import InputReader
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models import Frame, FrameId, InputItem, ModelSpec, Prediction, load_spec
from tests.shipped import IMAGES

PICTURE = IMAGES / "0011_label1.png"


@pytest.fixture(scope="module")
def digits() -> Iterator[EdgeClient]:
    with EdgeClient(None, "digits", split="edge-only") as client:
        yield client


def picture() -> Any:
    with Image.open(PICTURE) as opened:
        opened.load()
        return opened


def png(path: Path, array: Any) -> Path:
    Image.fromarray(array).save(path)
    return path


def saved(path: Path, tensor: Tensor) -> Path:
    np.save(path, tensor.numpy()) if path.suffix == ".npy" else save_file({"image": tensor}, path)
    return path


KINDS = {
    "path": lambda: PICTURE,
    "text": lambda: str(PICTURE),
    "item": lambda: InputItem.of(PICTURE),
    "bytes": lambda: PICTURE.read_bytes(),
    "bytearray": lambda: bytearray(PICTURE.read_bytes()),
    "view": lambda: memoryview(PICTURE.read_bytes()),
    "picture": picture,
    "copied picture": lambda: picture().copy(),
    "frame": lambda: np.asarray(picture().convert("RGB")),
    "grey frame": lambda: np.asarray(picture().convert("L")),
    "grey frame with a channel": lambda: np.asarray(picture().convert("L"))[..., None],
    "frame with alpha": lambda: np.asarray(picture().convert("RGBA")),
    "frame the other way round": lambda: np.asarray(picture().convert("RGB"))[:, :, ::-1],
    "source's frame": lambda: Frame(FrameId("camera", 3), np.asarray(picture().convert("RGB"))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_are_what_the_command_line_makes_of_them(digits: EdgeClient, kind: str) -> None:
    assert digits.spec is not None
    args, kwargs = digits.spec.preprocess(PICTURE)
    expected = digits.infer(Call(args, kwargs))
    answer = digits.infer(KINDS[kind]())
    assert torch.equal(answer.output, expected.output)
    assert answer.result == digits.spec.postprocess(answer.output) and answer.result[0].label == "1"
    assert answer.times.prepare > 0 and answer.times.end_to_end == answer.measured_ns
    (one,) = digits.infer_many([KINDS[kind]()])
    assert torch.equal(one.output, expected.output)


@pytest.mark.parametrize("kind", ["tensor", "array", ".npy", ".npy bytes", ".safetensors", "keyword", "call", "tuple"])
def test_tensors_go_to_the_model_as_they_are(digits: EdgeClient, kind: str, tmp_path: Path) -> None:
    assert digits.spec is not None
    tensor = digits.spec.preprocess(PICTURE)[0][0]
    given: dict[str, Any] = {
        "tensor": tensor,
        "array": tensor.numpy()[..., ::-1][..., ::-1],
        ".npy": saved(tmp_path / "x.npy", tensor),
        ".npy bytes": saved(tmp_path / "y.npy", tensor).read_bytes(),
        ".safetensors": saved(tmp_path / "x.safetensors", tensor).read_bytes(),
        "call": Call((tensor,)),
        "tuple": (tensor,),
    }
    answer = digits.infer(image=tensor) if kind == "keyword" else digits.infer(given[kind])
    with torch.no_grad():
        assert torch.equal(answer.output, digits.wrapped.model(tensor))
    assert (answer.times.prepare == 0) == (kind == "tensor")


def test_a_folder_is_many(digits: EdgeClient) -> None:
    answers = list(digits.infer_many(str(IMAGES / "0[01]*")))
    assert len(answers) == len(list(IMAGES.glob("0[01]*"))) > 2
    assert all(isinstance(answer.result[0], Prediction) for answer in answers)


class Nothing:
    """No input."""


WRONG: dict[str, tuple[Any, str]] = {
    "none": (None, "type NoneType is not taken: expected a tensor, a numpy array, a PIL image, a frame"),
    "an object": (Nothing(), "Nothing is not taken"),
    "a set": ({1}, "infer_many takes several"),
    "a list of paths": ([str(PICTURE)], "infer_many takes several"),
    "a list of pictures": ([Image.new("L", (2, 2))], "infer_many takes several"),
    "a generator": ((one for one in ()), "infer_many takes several"),
    "a module": (nn.ReLU(), "ReLU is not taken"),
    "a file object": (io.BytesIO(b"x"), "give what its read"),
    "text that is no file": ("a nice cat", "no such input: a nice cat"),
    "a near name": (str(PICTURE) + "x", "Did you mean 0011_label1.png"),
    "a folder": (IMAGES, "is a folder: infer_many goes through its files"),
    "a video": ("clip.mp4", "is a video or a camera: infer_many"),
    "a camera": ("rtsp://me:secret@camera/1", "rtsp://.*camera/1 is a video or a camera"),
    "an address": ("https://example.org/cat.png", "fetch it, and give its bytes"),
    "bytes of nothing": (b"hello", "these 5 bytes are no picture"),
    "no bytes": (b"", "these 0 bytes are no picture"),
    "half a picture": (PICTURE.read_bytes()[:60], "cannot be read as an image"),
    "an array of text": (np.array(["a"]), "an array of <U1 is no tensor"),
    "an array of objects": (np.array([None]), "an array of object is no tensor"),
    "pixels of 32 bits": (Image.new("I", (8, 8)), "more than 8 bits"),
    "a dictionary with a wrong name": ({"image": torch.ones(1), "y": 1}, "the model has no argument 'y'"),
    "an encoding without tensors": (UserDict({"image": [1, 2]}), 'image is a list of numbers: .*return_tensors="pt"'),
}


@pytest.mark.parametrize("kind", WRONG)
def test_unsupported_input_is_reported_in_one_line(digits: EdgeClient, kind: str) -> None:
    item, said = WRONG[kind]
    with pytest.raises(InputMismatch, match=said) as caught:
        digits.infer(item)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
    (failure,) = digits.infer_many([item] if not isinstance(item, dict) else ["no such file"], failures="return")
    assert isinstance(failure.error, InputMismatch)  # type: ignore[union-attr]


def test_single_inputs_and_images_are_recognised(digits: EdgeClient) -> None:
    for one in (b"x", {"x": torch.ones(1)}):
        with pytest.raises(SpecError, match="infer_many takes several inputs, and this is one"):
            digits.infer_many(one)
    with pytest.raises(InputMismatch, match="argument 1 is of type PngImageFile"):
        digits.infer(picture(), torch.ones(1))
    with pytest.raises(InputMismatch, match="too many positional arguments: it takes image"):
        digits.infer(torch.ones(1), torch.ones(1))


class Text(nn.Module):
    """As a text model's forward is: keywords with defaults, and one that the spec's call_kwargs set."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, doubled: bool = False) -> Any:
        hidden = self.embed(input_ids) * (2 if doubled else 1)
        return hidden if attention_mask is None else hidden * attention_mask[..., None]


class Pair(nn.Module):
    """Takes one tuple, or one dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, both: Any) -> Any:
        values = list(both.values()) if isinstance(both, dict) else both
        out: Tensor = self.layer(values[0]) + values[1]
        return out


def reader(model: nn.Module, spec: ModelSpec | None = None, **switches: bool) -> InputReader:
    return InputReader(model, spec, **switches)


IDS, MASK = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 1, 0]])


def test_dictionaries_and_encodings_are_keyword_arguments_and_tuples_positional_ones() -> None:
    read = reader(Text())
    for item in ({"input_ids": IDS, "attention_mask": MASK}, UserDict(input_ids=IDS.numpy(), attention_mask=MASK)):
        call = read.call((item,), {})
        assert call.args == () and torch.equal(call.kwargs["input_ids"], IDS)
        assert list(read.read(item).kwargs) == ["input_ids", "attention_mask"]
    assert read.call(((IDS, MASK),), {}).args == (IDS, MASK)
    assert read.call((IDS, MASK.numpy()), {"doubled": True}).kwargs == {"doubled": True}
    with pytest.raises(InputMismatch, match="the dictionary has attention_mask; the model takes input_ids"):
        read.call(({"attention_mask": MASK},), {})
    with pytest.raises(InputMismatch, match="no argument 'attention_masc'.*Did you mean attention_mask"):
        read.call(({"input_ids": IDS, "attention_masc": MASK},), {})


def test_a_model_that_takes_one_tuple_or_dictionary_still_gets_it() -> None:
    """The very same objects: what models took before, they take."""
    read, item = reader(Pair()), (torch.ones(2), torch.ones(2))
    named = {"left": item[0], "right": item[1]}
    kind = namedtuple("kind", "a b")(*item)
    for given in (item, named, kind, list(item)):
        (argument,) = read.call((given,), {}).args
        assert argument is given
    assert read.call((torch.ones(1), 3, "text", None), {"name": item}).kwargs["name"] is item
    assert read.read(7).args == (7,)


def spec_of(tmp_path: Path, more: str = "") -> ModelSpec:
    path = tmp_path / "text.toml"
    target = "tests.edge_client.inputs.test_inputs:Text"
    path.write_text(f'id = "text"\nfactory = "{target}"\n{more}\n[call_kwargs]\ndoubled = true\n')
    return load_spec(path)


def test_the_specs_constants_are_given_and_give_way(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    read = reader(Text(), spec)
    for item in (IDS, {"input_ids": IDS}, (IDS,), IDS.numpy()):
        assert read.call((item,), {}).kwargs["doubled"] is True
    assert read.call((IDS,), {"doubled": False}).kwargs == {"doubled": False}
    assert read.call((IDS, MASK, False), {}).kwargs == {}  # it is given by its place
    assert read.read(Call((IDS,))).kwargs == {}
    assert reader(Text(), spec, call_kwargs=False).call((IDS,), {}).kwargs == {}
    with EdgeClient(None, spec, split="edge-only") as client:
        doubled = client.infer(IDS)
        assert torch.equal(doubled.output, 2 * client.infer(IDS, doubled=False).output)
        assert doubled.result is doubled.output  # the spec says nothing, and there are no class scores


def test_each_part_can_be_switched_off() -> None:
    tensor = torch.rand(1, 1, 8, 8)
    lettered = replace(load_spec("digits"), labels=tuple("abcdefghij"))
    for labels, said in ((True, "b"), (False, "1")):
        with EdgeClient(None, lettered, split="edge-only", labels=labels) as client:
            assert client.infer(PICTURE).result[0].label == said
    with EdgeClient(None, "digits", split="edge-only", preprocess=False) as client:
        for item in (PICTURE, PICTURE.read_bytes(), picture()):
            with pytest.raises(InputMismatch, match="with preprocess=False none does: give a tensor"):
                client.infer(item)
        call = client._reader.read(np.asarray(picture().convert("RGB")))
        assert call.args[0].dtype == torch.uint8  # as it is
        assert client.infer(Call(load_spec("digits").preprocess(PICTURE)[0])).result[0].label == "1"
    with EdgeClient(None, "digits", split="edge-only", postprocess=False) as client:
        answer = client.infer(PICTURE)
        assert answer.result is answer.output
    module = load_spec("digits").load_model()
    with EdgeClient(None, ModelChoice(module, model_id="mine"), split="edge-only") as client:
        with pytest.raises(InputMismatch, match="with a client made with a module none does"):
            client.infer(PICTURE)
        answer = client.infer(tensor)
        assert answer.result is answer.output
