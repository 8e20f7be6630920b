"""Input files that come as bytes from elsewhere: read as the same file would be read here, and within bounds.

Both sides must read alike for an answer to be the model's own, so they compare a digest of how they read: the spec's
settings, the code of its own callable, and the libraries that decode. Nothing is written to disk, except for a spec's
own callable, which takes a path.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from shared_hooks.errors import InputMismatch, TooLarge
from shared_hooks.models.inputs import IMAGE_SUFFIXES, TENSOR_SUFFIXES

SUFFIXES = IMAGE_SUFFIXES | TENSOR_SUFFIXES
IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""The only decoders that bytes from elsewhere reach: of Pillow's others, one starts Ghostscript."""
BYTES_PER_PIXEL = 4
MAX_PIXELS = 25_000_000
"""Of an image; what is compressed well may take seconds to decode."""


def check_suffix(suffix: str) -> str:
    """``suffix`` in lower case. Raises InputMismatch for one that input files do not have."""
    if suffix.lower() not in SUFFIXES:
        raise InputMismatch(
            f"{suffix[:20]!r} is not a suffix of an input file; expected one of {', '.join(sorted(SUFFIXES))}"
        )
    return suffix.lower()


def check_tensors(data: bytes, suffix: str, max_bytes: int) -> None:
    """Raises TooLarge for a .npy header that announces more than ``max_bytes``, before memory is taken for it."""
    if len(data) > max_bytes:
        raise TooLarge(f"a file of {len(data)} bytes; at most {max_bytes} are taken")
    if suffix != ".npy":
        return  # safetensors compares its header with the size of the file before it takes memory
    try:
        file = io.BytesIO(data)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except (ValueError, OSError, EOFError):
        return  # no array: the reader says so
    announced = dtype.itemsize
    for size in shape:
        announced *= size
    if announced > len(data):
        raise InputMismatch(f"a .npy file of {len(data)} bytes announces an array of {announced}")


def check_image(width: int, height: int, max_pixels: int, what: str = "an image") -> None:
    """Raises TooLarge for more pixels, before they are decoded."""
    if width * height > max_pixels:
        raise TooLarge(f"{what} of {width} x {height} pixels; at most {max_pixels} are taken")


@contextmanager
def as_path(suffix: str, data: bytes) -> Iterator[Path]:
    """The bytes as a file for a callable that takes a path; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="isthmus-input-") as folder:
        path = Path(folder) / f"input{suffix}"
        path.write_bytes(data)
        yield path


def digest(settings: Any, own: Callable[..., Any] | None, constants: Mapping[str, Any]) -> str:
    """Of how files are read (hexadecimal): ``settings`` and ``constants`` by their text, ``own`` by its source."""
    known = {
        "settings": repr(settings),
        "constants": repr(sorted(constants.items())),
        "own": _source(own) if own else None,
        "libraries": libraries(),
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def libraries() -> dict[str, str | None]:
    """Versions of what decodes files."""
    import PIL
    from PIL import features

    return {
        "Pillow": PIL.__version__,
        **{name: features.version(name) for name in ("jpg", "libjpeg_turbo", "zlib", "webp", "libtiff")},
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
    }


def _source(own: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(own)
    except (OSError, TypeError):
        return f"{own.__module__}:{getattr(own, '__qualname__', type(own).__qualname__)}, whose source is not at hand"
