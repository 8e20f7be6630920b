"""Arrays as tensors, and what a file's bytes begin with."""

from __future__ import annotations

import sys
from pathlib import PurePath
from typing import Any, Final

import numpy as np
import torch

from shared_hooks.errors import InputMismatch

_BEGINNINGS: Final = (
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"\xff\xd8\xff", ".jpg"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II*\0", ".tif"),
    (b"MM\0*", ".tif"),
    (b"\x93NUMPY", ".npy"),
    *((b"P%d" % number, ".ppm") for number in range(1, 7)),
)
_CHANNELS: Final = (1, 3, 4)


def suffix_of(data: bytes) -> str:
    """The suffix of a file with these bytes. Raises InputMismatch for what is no picture and holds no tensors."""
    for beginning, suffix in _BEGINNINGS:
        if data.startswith(beginning):
            return suffix
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data):
        return ".safetensors"
    raise InputMismatch(
        f"these {len(data)} bytes are no picture (PNG, JPEG, GIF, BMP, TIFF, WebP, PPM), no .npy and no .safetensors;"
        " of a raw frame give the array"
    )


def is_picture(value: object) -> bool:
    """Whether it is Pillow's; nobody has one before Pillow is imported."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def looks_like_a_frame(array: Any) -> bool:
    """uint8 pixels: (height, width) or (height, width, channels)."""
    shape = array.shape
    return bool(array.dtype == np.uint8 and (len(shape) == 2 or (len(shape) == 3 and shape[2] in _CHANNELS)))


def tensor_of(array: Any) -> torch.Tensor:
    """A copy, in the machine's byte order and dense: what `.npy` files give, too. Raises InputMismatch."""
    if array.dtype.hasobject or array.dtype.kind in "SUVMm":
        raise InputMismatch(f"an array of {array.dtype} is no tensor: expected numbers")
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError as error:
        raise InputMismatch(f"an array of {array.dtype} is no tensor: {error}") from error


def plain(value: Any, where: str) -> Any:
    """A model's argument: arrays in it as tensors, all else as it is, and the same object where there are none.

    Raises InputMismatch for what would have to be read first, which only an input by itself is.
    """
    if isinstance(value, (torch.Tensor, str)) or value is None:
        return value
    if isinstance(value, np.ndarray):
        return tensor_of(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (bytes, bytearray, memoryview, PurePath)) or is_picture(value):
        raise InputMismatch(
            f"{where} is of type {type(value).__name__}: a picture or a file is read where it is the only input;"
            " here give a tensor or an array"
        )
    kind = type(value)
    if kind in (list, tuple):
        made = [plain(one, where) for one in value]
        return value if all(new is old for new, old in zip(made, value, strict=True)) else kind(made)
    if kind is dict:
        entries = {name: plain(one, where) for name, one in value.items()}
        return value if all(entries[name] is value[name] for name in value) else entries
    return value
