"""Input files, images and tensors: what the model gets, and what a bad file answers."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from shared_hooks.errors import InputMismatch
from shared_hooks.models import InputItem, ModelSpec, find_inputs

Write = Callable[[str], ModelSpec]
BASE = 'id = "m"\nfactory = "net:linear"\n'


def gray(path: Path, *rows: list[int]) -> Path:
    Image.fromarray(np.array(rows, dtype=np.uint8)).save(path)
    return path


def test_scale_mean_std_and_channels(write_spec: Write, tmp_path: Path) -> None:
    path = gray(tmp_path / "x.png", [0, 51], [255, 102])
    (tensor,), kwargs = write_spec(BASE + "[preprocess]\nmean = [0, 0.5, 1]\nstd = [1, 0.5, 2]").preprocess(path)
    assert kwargs == {} and tensor.shape == (1, 3, 2, 2) and tensor.dtype == torch.float32
    torch.testing.assert_close(tensor[0, 0], torch.tensor([[0.0, 0.2], [1.0, 0.4]]))
    torch.testing.assert_close(tensor[0, 1], torch.tensor([[-1.0, -0.6], [1.0, -0.2]]))
    torch.testing.assert_close(tensor[0, 2], torch.tensor([[-0.5, -0.4], [0.0, -0.3]]))


def test_layout_dtype_keyword_and_scale(write_spec: Write, tmp_path: Path) -> None:
    path = gray(tmp_path / "x.png", [0, 255, 9])
    options = '[preprocess]\nmode = "L"\nlayout = "NHWC"\ndtype = "float16"\nkeyword = "pixels"\nscale = 255'
    args, kwargs = write_spec(BASE + options).preprocess(InputItem.of(path))
    assert args == () and kwargs["pixels"].dtype == torch.float16
    assert kwargs["pixels"].tolist() == [[[[0.0], [255.0], [9.0]]]]


def test_crop_keeps_the_aspect_ratio(write_spec: Write, tmp_path: Path) -> None:
    path = gray(tmp_path / "x.png", *([[0] * 40 + [255] * 40 + [0] * 40] * 40))
    spec = write_spec(BASE + '[preprocess]\nmode = "L"\nshorter_side = 20\nsize = [20, 18]\ninterpolation = "box"')
    (tensor,), _ = spec.preprocess(path)
    assert tensor.shape == (1, 1, 20, 18) and tensor.min() == 1.0


def test_exif_rotation_is_applied(write_spec: Write, tmp_path: Path) -> None:
    image = Image.new("L", (4, 2))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "x.jpg", exif=exif)
    (tensor,), _ = write_spec(BASE + '[preprocess]\nmode = "L"').preprocess(tmp_path / "x.jpg")
    assert tensor.shape == (1, 1, 4, 2)


def test_tensor_files_pass_through(write_spec: Write, tmp_path: Path) -> None:
    spec = write_spec(BASE + "[call_kwargs]\nflag = true\n[example.kwargs.ids]\nshape = [1]")
    np.save(tmp_path / "x.npy", np.array([[1.5, float("nan")]], dtype=">f4"))
    (tensor,), kwargs = spec.preprocess(tmp_path / "x.npy")
    assert tensor.dtype == torch.float32 and tensor[0, 0] == 1.5 and tensor[0, 1].isnan() and kwargs == {"flag": True}
    one, two = torch.ones(2), torch.zeros(3)
    save_file({"other": one}, tmp_path / "a.safetensors")
    save_file({"ids": one}, tmp_path / "b.safetensors")
    save_file({"0": one, "1": two, "mask": one.clone()}, tmp_path / "c.safetensors")
    assert len(spec.preprocess(tmp_path / "a.safetensors")[0]) == 1
    assert spec.preprocess(tmp_path / "b.safetensors")[1].keys() == {"ids", "flag"}
    args, kwargs = spec.preprocess(tmp_path / "c.safetensors")
    assert [len(arg) for arg in args] == [2, 3] and kwargs.keys() == {"mask", "flag"}


def test_bad_files_are_named(write_spec: Write, tmp_path: Path) -> None:
    spec = write_spec(BASE + "[preprocess]\nsize = 4")
    np.save(tmp_path / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "two.npz", a=np.ones(1), b=np.ones(1))
    (tmp_path / "archive.npy").write_bytes((tmp_path / "two.npz").read_bytes())
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "empty.npy").write_bytes(b"")
    np.save(tmp_path / "words.npy", np.array(["a"]))
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    save_file({"1": torch.ones(1), "x": torch.ones(1)}, tmp_path / "gap.safetensors")
    Image.fromarray(np.full((2, 2), 40000, dtype=np.uint16)).save(tmp_path / "deep.png")
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, "PNG")
    (tmp_path / "cut.png").write_bytes(whole.getvalue()[:200])
    for name in sorted(path.name for path in tmp_path.iterdir() if path.suffix in (".npy", ".png", ".safetensors")):
        with pytest.raises(InputMismatch, match=name.replace(".", r"\.")):
            spec.preprocess(tmp_path / name)
    with pytest.raises(InputMismatch, match=r"no such input: .*none\.png"):
        spec.preprocess(tmp_path / "none.png")


def test_an_image_without_preprocess(write_spec: Write, tmp_path: Path) -> None:
    path = gray(tmp_path / "x.png", [1])
    with pytest.raises(InputMismatch, match=r"x\.png: model m has no \[preprocess\] for images; give \.npy"):
        write_spec(BASE).preprocess(path)


def test_find_inputs(tmp_path: Path) -> None:
    for name in ("b_labelcat.png", "a.npy", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "labels.json").write_text('{"a.npy": 4}')
    expected = [("a.npy", "4"), ("b_labelcat.png", "cat")]
    assert [(item.name, item.truth) for item in find_inputs(tmp_path)] == expected
    assert [(item.name, item.truth) for item in find_inputs([tmp_path / "a.npy", f"{tmp_path}/*"])] == expected
    twice = find_inputs([tmp_path / "a.npy", tmp_path / "a.npy"], once=False)
    assert [item.name for item in twice] == ["a.npy", "a.npy"]
    for pattern, message in {
        "*.jpg": "no input file matches",
        "c.npy": r"no such input: .*c\.npy\. Did you mean a\.npy",
    }.items():
        with pytest.raises(InputMismatch, match=message):
            find_inputs(tmp_path / pattern)
    for name in ("classes/dog/b.png", "classes/cat/a.png", "classes/cat/c_labelfox.npy", "classes/none/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    classes = [(item.name, item.truth) for item in find_inputs(tmp_path / "classes")]
    assert classes == [("a.png", "cat"), ("c_labelfox.npy", "cat"), ("b.png", "dog")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputMismatch, match="empty holds no input"):
        find_inputs(tmp_path / "empty")
