"""Files that announce little and take much: refused by name, within memory and time, and the next file is read."""

from __future__ import annotations

import io
import os
import random
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from shared_hooks import picture
from shared_hooks.errors import InputMismatch, TooLarge
from shared_hooks.models import load_spec
from shared_hooks.models.images import ImagePreprocess
from shared_hooks.models.inputs import read_tensors, tensors_of_bytes

MOST = 1_000_000


def npy(header: str) -> bytes:
    text = header.encode("latin1").ljust(118 - 1) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def described(descr: str, shape: str) -> bytes:
    return npy(f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}")


@pytest.mark.parametrize(
    "data",
    [
        described("|V0", "(1000000000000,)"),
        described("<U0", "(500000000,)"),
        described("|S0", "(500000000,)"),
        described("|V8", "(0,)"),
        described("|O", "(1,)"),
        described("<f4", "(1000000000000,)"),
        described("<f4", "(-1,)"),
        described("<M8[s]", "(0,)"),
        npy("{'descr': '<f4', 'shape': ("),
        npy("{'descr': '<f4', 'shape': (1,)"),
        npy("(" * 110),
        npy("[[[[['"),
        b"\x93NUMPY\x09\x09" + bytes(100),
        b"PK\x03\x04" + bytes(100),
        b"",
    ],
)
def test_an_array_whose_header_lies(data: bytes, tmp_path: Path) -> None:
    started = time.process_time()
    with pytest.raises(InputMismatch):
        tensors_of_bytes(data, ".npy", "it")
    path = tmp_path / "it.npy"
    path.write_bytes(data)
    with pytest.raises(InputMismatch, match=r"it\.npy"):
        read_tensors(path)
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize("dtype", ["bool", "int8", ">i4", "<f2", ">f8", "complex64", "uint8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_is_what_numpy_saved(dtype: str, shape: tuple[int, ...], order: Any) -> None:
    array = np.asarray(np.random.default_rng(1).integers(0, 2, shape), dtype=dtype, order=order)
    file = io.BytesIO()
    np.save(file, array)
    ((found,), _) = tensors_of_bytes(file.getvalue(), ".npy", "it")
    assert found.shape == shape and found.is_contiguous()
    assert np.array_equal(found.numpy(), array)


def tiff_of_a_huge_tile() -> bytes:
    """8 x 8 pixels in a tile of 40,000 x 40,000."""
    tags = [
        (256, 8),
        (257, 8),
        (258, 8),
        (259, 1),
        (262, 1),
        (277, 1),
        (322, 40000),
        (323, 40000),
        (324, 200),
        (325, 64),
    ]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\x00" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(300)


def tiff_of_many_tags() -> bytes:
    entries = b"".join(struct.pack("<HHII", 256 + n, 4, 1, 8) for n in range(12_000))
    return b"II*\x00" + struct.pack("<I", 8) + struct.pack("<H", 12_000) + entries + bytes(300)


def jpeg_of_many_scans() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2000, 2000), "red").save(file, "JPEG", progressive=True)
    data = file.getvalue()
    at = data.rindex(b"\xff\xda")
    end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return data[:at] + data[at:end] * 6400 + data[at:]


def large(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB" if kind != "GIF" else "P", (4000, 4000)).save(file, kind)
    return file.getvalue()


HOSTILE = {
    "a tile": tiff_of_a_huge_tile,
    "tags": tiff_of_many_tags,
    "scans": jpeg_of_many_scans,
    **{kind: (lambda kind=kind: large(kind)) for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM")},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_image_that_would_swell(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, before = HOSTILE[name](), psutil.Process().memory_info().rss
    started = time.monotonic()
    with pytest.raises((TooLarge, InputMismatch)):
        ImagePreprocess().of_bytes(data, "it", MOST)
    assert time.monotonic() - started < picture.SECONDS
    assert psutil.Process().memory_info().rss < before + (64 << 20)
    assert not capfd.readouterr().err
    assert decodes()


def decodes() -> bool:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return bool(ImagePreprocess().of_bytes(file.getvalue(), "it", MOST).shape == (1, 3, 8, 8))


def test_a_decoder_that_swells_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no header had said anything: the limit of memory holds."""
    decode = picture.Decoder()
    data = large("PNG")
    how = picture.How(
        mode="RGBA", size=(12_000, 12_000), shorter_side=None, interpolation="bilinear", max_pixels=1 << 24
    )
    try:
        with pytest.raises(picture.PictureRefused) as refused:
            decode(data, how)  # of 4000 x 4000, scaled to 12,000 x 12,000 of four bytes
        assert refused.value.kind == "TooLarge"
        assert decode(data, {**how, "size": (8, 8)})[1] == (8, 8)
    finally:
        decode.close()


def test_a_decoder_that_hangs_is_ended() -> None:
    decode = picture.Decoder(seconds=0.0)
    how = picture.How(mode="RGB", size=None, shorter_side=None, interpolation="bilinear", max_pixels=1 << 24)
    with pytest.raises(picture.PictureRefused, match="takes more than 0 s"):
        decode(large("PNG"), how)
    assert not decode._idle


def test_decoder_processes_are_reused() -> None:
    decode = picture.Decoder()
    how = picture.How(mode="L", size=(4, 4), shorter_side=None, interpolation="nearest", max_pixels=1 << 24)
    data = large("PNG")
    try:
        assert len({id(decode._idle[0]) for _ in range(3) if decode(data, how)}) == 1
        threads = [threading.Thread(target=decode, args=(data, how)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 1 <= len(decode._idle) <= 3
        os.kill(decode._idle[-1]._process.pid, 9)  # as a lack of memory would
        decode._idle[-1]._process.wait()
        assert decode(data, how)[0] == "L"
    finally:
        decode.close()
    assert not decode._idle


def files() -> dict[str, bytes]:
    found = {}
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF"):
        file = io.BytesIO()
        Image.effect_noise((24, 16), 60).convert("P" if kind == "GIF" else "RGB").save(file, kind)
        found["." + kind.lower()] = file.getvalue()
    file = io.BytesIO()
    np.save(file, np.ones((1, 1, 8, 8), dtype="float32"))
    return {**found, ".npy": file.getvalue(), ".safetensors": save({"0": torch.ones(1, 1, 8, 8)})}


@pytest.mark.parametrize("suffix", files())
def test_altered_files_are_read_or_refused_by_name(suffix: str) -> None:
    spec, data, dice = load_spec("digits"), files()[suffix], random.Random(3)
    before = psutil.Process().memory_info().rss
    for _ in range(150):
        altered = bytearray(data)
        for _ in range(dice.randint(1, 6)):
            altered[dice.randrange(min(len(altered), 200 if dice.random() < 0.8 else len(altered)))] = dice.randrange(
                256
            )
        try:
            spec.preprocess_bytes(
                suffix, bytes(altered[: dice.randint(1, len(altered)) if dice.random() < 0.2 else None])
            )
        except (InputMismatch, TooLarge):
            pass
    assert psutil.Process().memory_info().rss < before + (64 << 20)
