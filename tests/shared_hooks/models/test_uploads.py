"""Input files as bytes: read as the same file is read from disk, compared by a digest, and harmless when hostile."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from shared_hooks.config import Table
from shared_hooks.errors import InputMismatch, TooLarge
from shared_hooks.models import ModelSpec, load_spec, spec_from_table
from tests.shipped import IMAGES


def spec_of(folder: Path = Path(), **entries: Any) -> ModelSpec:
    return spec_from_table(Table({"id": "m", "factory": "torch.nn:Identity", **entries}, "test"), folder)


def image(kind: str, size: tuple[int, int] = (20, 30)) -> bytes:
    pixels = np.random.default_rng(1).integers(0, 255, (*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["png", "jpeg", "bmp", "gif", "tiff", "ppm"])
def test_an_image_is_read_as_from_disk(kind: str, tmp_path: Path) -> None:
    spec = spec_of(preprocess={"size": [8, 8], "mean": [0.5], "std": [0.2]}, call_kwargs={"extra": 3})
    path = tmp_path / f"input.{kind}"
    path.write_bytes(image(kind))
    (there,), kwargs_there = spec.preprocess(path)
    (here,), kwargs_here = spec.preprocess_bytes(path.suffix, path.read_bytes())
    assert torch.equal(there, here) and there.stride() == here.stride() and kwargs_there == kwargs_here == {"extra": 3}


def test_the_shipped_images_too() -> None:
    spec = load_spec("digits")
    for path in sorted(IMAGES.glob("*.png"))[:5]:
        assert torch.equal(spec.preprocess(path)[0][0], spec.preprocess_bytes(".PNG", path.read_bytes())[0][0])


def test_tensors_pass_through(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.save(tmp_path / "a.npy", array)
    data = (tmp_path / "a.npy").read_bytes()
    assert torch.equal(spec_of().preprocess_bytes(".npy", data)[0][0], torch.from_numpy(array))
    named = save({"ids": torch.arange(3), "mask": torch.ones(3)})
    assert spec_of().preprocess_bytes(".safetensors", named)[1]["ids"].tolist() == [0, 1, 2]


OWN = """
import torch
def read(path):
    data = path.read_bytes()
    if data == b"bad":
        raise ValueError("not mine")
    return torch.tensor([len(data)])
"""


def test_a_specs_own_callable_gets_a_path(tmp_path: Path) -> None:
    (tmp_path / "own_reading.py").write_text(OWN)
    spec = spec_of(tmp_path, preprocess="own_reading:read")
    assert spec.preprocess_bytes(".png", b"12345")[0][0].tolist() == [5]
    with pytest.raises(InputMismatch, match="not mine"):
        spec.preprocess_bytes(".png", b"bad")


def test_the_digest_tells_who_reads_otherwise() -> None:
    same = [load_spec("digits").preprocess_digest() for _ in range(2)]
    assert same[0] == same[1]
    others = [
        spec_of(),
        spec_of(preprocess={"size": 8}),
        spec_of(preprocess={"size": 9}),
        spec_of(preprocess={"size": 8, "interpolation": "nearest"}),
        spec_of(preprocess={"size": 8}, call_kwargs={"extra": 1}),
        spec_of(preprocess="tests.shared_hooks.models.test_uploads:spec_of"),
        spec_of(preprocess="tests.shared_hooks.models.test_uploads:image"),
    ]
    assert len({same[0], *(spec.preprocess_digest() for spec in others)}) == len(others) + 1


def huge_png(width: int, height: int) -> bytes:
    """A header that announces an enormous image, and hardly any data."""

    def block(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", zlib.compress(b"0")) + block(b"IEND", b"")


def huge_npy() -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 30, 1 << 8)})
    return file.getvalue() + b"123"


HOSTILE: list[tuple[str, Callable[[], bytes], type[Exception]]] = [
    (".exe", lambda: b"", InputMismatch),
    ("png", lambda: image("png"), InputMismatch),
    ("../../x.png", lambda: image("png"), InputMismatch),
    (".png", lambda: b"garbage", InputMismatch),
    (".png", lambda: b"", InputMismatch),
    (".png", lambda: image("png")[:-40], InputMismatch),
    (".png", lambda: huge_png(50_000, 50_000), InputMismatch),
    (".png", lambda: huge_png(5_000, 5_000), TooLarge),
    (".png", lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", InputMismatch),
    (".npy", lambda: b"garbage", InputMismatch),
    (".npy", lambda: b"", InputMismatch),
    (".npy", huge_npy, InputMismatch),
    (".npy", lambda: b"PK\x03\x04" + bytes(40), InputMismatch),
    (".safetensors", lambda: b"garbage", InputMismatch),
    (".safetensors", lambda: (1 << 60).to_bytes(8, "little") + b"{}", InputMismatch),
    (".safetensors", lambda: save({}), InputMismatch),
]


@pytest.mark.parametrize(("suffix", "data", "error"), HOSTILE)
def test_hostile_files_are_refused_by_name(suffix: str, data: Callable[[], bytes], error: type[Exception]) -> None:
    with pytest.raises(error):
        spec_of(preprocess={"size": 8}).preprocess_bytes(suffix, data(), max_bytes=1 << 20)


def test_a_model_without_preprocessing_takes_no_image() -> None:
    with pytest.raises(InputMismatch, match=r"has no \[preprocess\] for images"):
        spec_of().preprocess_bytes(".png", image("png"))


def test_invalid_image_has_a_constant_message() -> None:
    """Not with the address of an object in the server's memory."""
    spec = spec_of(preprocess={"size": [8, 8]})
    said = set()
    for _ in range(3):
        with pytest.raises(InputMismatch) as caught:
            spec.preprocess_bytes(".png", b"hello")
        said.add(str(caught.value))
    assert len(said) == 1 and " at 0x" not in said.pop()
