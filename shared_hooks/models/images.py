"""Preprocess an image file to a batch of one."""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import torch

from shared_hooks import picture
from shared_hooks.config import Table
from shared_hooks.errors import InputMismatch, TooLarge
from shared_hooks.frames import Pixels
from shared_hooks.models.inputs import IMAGE_SUFFIXES, TENSOR_SUFFIXES
from shared_hooks.picture import MAX_PIXELS as MAX_PIXELS

if TYPE_CHECKING:
    from PIL import Image


# A frame: one picture of a video or a camera, in memory.

_IN_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}
_FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")  # of PIL.Image.Resampling, in lower case
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class ImagePreprocess:
    """Image file -> tensor (1, C, H, W), or (1, H, W, C) with layout "NHWC".

    Steps: EXIF rotation, mode, resize (the shorter side to ``shorter_side`` and a centre crop of ``size``; without
    ``shorter_side`` directly to ``size``), 0..255 to 0..``scale``, ``(value - mean) / std``.
    """

    size: tuple[int, int] | None = None
    """(height, width) in pixels; None: the image's own."""
    shorter_side: int | None = None
    mode: str = "RGB"
    interpolation: str = "bilinear"
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    layout: str = "NCHW"
    dtype: torch.dtype = torch.float32
    keyword: str | None = None
    """Name of the model's keyword argument for the image; None: the first positional argument."""

    @classmethod
    def from_table(cls, table: Table, dtype: torch.dtype) -> ImagePreprocess:
        """Read a spec's [preprocess] table; ``dtype`` is the default of its own. Raises SpecError."""
        mode = table.choice("mode", _CHANNELS, "RGB")
        shorter_side = table.take("shorter_side", int)
        size = _size(table)
        if shorter_side is not None and (size is None or shorter_side < max(size)):
            table.fail("shorter_side", "needs size, and must not be smaller than it")
        scale = table.take("scale", float)
        named = table.choice("dtype", DTYPES, "")
        made = cls(
            size=size,
            shorter_side=shorter_side,
            mode=mode,
            interpolation=table.choice("interpolation", _FILTERS, "bilinear"),
            scale=1.0 if scale is None else scale,
            mean=_per_channel(table, "mean", mode, 0.0),
            std=_per_channel(table, "std", mode, 1.0),
            layout=table.choice("layout", ("NCHW", "NHWC"), "NCHW"),
            dtype=DTYPES[named] if named else dtype,
            keyword=table.take("keyword", str),
        )
        if 0.0 in made.std:
            table.fail("std", "must not be 0")
        table.done()
        return made

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of every image's tensor; None if it depends on the image."""
        if self.size is None:
            return None
        channels = _CHANNELS[self.mode]
        return (1, *self.size, channels) if self.layout == "NHWC" else (1, channels, *self.size)

    def __call__(self, path: Path) -> torch.Tensor:
        """Preprocess a file. Raises InputMismatch if it is not an image or has no 8-bit channels."""
        return self._tensor(self.seen(path))

    def seen(self, path: Path) -> Image.Image:
        """Return the image as the model sees it: rotated, resized, cropped. Raises InputMismatch."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise InputMismatch(f"no such input: {path}") from None
        except OSError as error:
            raise InputMismatch(f"{path} cannot be read as an image: {error}") from error
        return self._decoded(data, str(path), picture.MAX_OWN_PIXELS)

    def of_bytes(self, data: bytes, name: str, max_pixels: int) -> torch.Tensor:
        """Preprocess the bytes of an untrusted image file.

        Raises TooLarge before decoding or scaling to more than ``max_pixels``.
        """
        return self._tensor(self._decoded(data, name, max_pixels))

    def of_pixels(self, pixels: Pixels) -> torch.Tensor:
        """Preprocess a frame in memory."""
        from PIL import Image

        return self._tensor(self._resize(Image.fromarray(pixels).convert(self.mode)))

    def of_image(self, image: Image.Image) -> torch.Tensor:
        """Preprocess an opened image. Raises InputMismatch."""
        from PIL import ImageOps

        if image.mode.startswith(("I", "F")):
            raise InputMismatch(
                f"a picture with pixels of more than 8 bits (mode {image.mode}); convert it, or give an array"
            )
        try:
            return self._tensor(self._resize(ImageOps.exif_transpose(image).convert(self.mode)))
        except (OSError, ValueError, SyntaxError) as error:  # Pillow decodes lazily
            raise InputMismatch(f"the picture cannot be read: {error}") from error

    def _decoded(self, data: bytes, name: str, max_pixels: int) -> Image.Image:
        from PIL import Image

        how: picture.How = {
            "mode": self.mode,
            "size": self.size,
            "shorter_side": self.shorter_side,
            "interpolation": self.interpolation,
            "max_pixels": max_pixels,
        }
        try:
            mode, size, pixels = picture.decode(data, how)
        except picture.PictureRefused as error:
            if error.kind == "TooLarge":
                raise TooLarge(f"{name}: {error}") from None
            if error.kind == "deep":
                raise InputMismatch(f"{name} {error}") from None
            raise InputMismatch(f"{name} cannot be read as an image: {error}") from None
        return Image.frombytes(mode, size, pixels)

    def _tensor(self, image: Image.Image) -> torch.Tensor:
        pixels = np.array(image, dtype=np.float32).reshape(image.height, image.width, _CHANNELS[self.mode])
        values = torch.from_numpy(pixels) * (self.scale / 255.0)
        values = (values - torch.tensor(self.mean)) / torch.tensor(self.std)
        if self.layout == "NCHW":
            values = values.permute(2, 0, 1)
        # canonical strides, also with one channel: a plan is made for exact strides
        return values.to(self.dtype).clone(memory_format=torch.contiguous_format).unsqueeze(0)

    def _resize(self, image: Image.Image) -> Image.Image:
        return picture.resized(image, self.size, self.shorter_side, self.interpolation)


def as_png(pixels: Pixels) -> bytes:
    """Encode a frame as PNG, quickly rather than small, for callables that need a file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _size(table: Table) -> tuple[int, int] | None:
    expected = "an integer or [height, width], in pixels"
    if "size" not in table:
        table.take_any("size")
        return None
    value = table.take_any("size")
    pair = [value, value] if type(value) is int else value
    if isinstance(pair, list) and len(pair) == 2 and all(type(side) is int and 0 < side <= 16384 for side in pair):
        return (pair[0], pair[1])
    table.fail("size", f"expected {expected}, found {value!r}")


def _per_channel(table: Table, key: str, mode: str, default: float) -> tuple[float, ...]:
    count = _CHANNELS[mode]
    values = table.take_list(key, float, f"one number for each of the {count} channels of mode {mode}")
    if values is None:
        return (default,) * count
    if len(values) not in (1, count):
        table.fail(key, f"expected 1 or {count} numbers for mode {mode}, found {len(values)}")
    return tuple(values) * (count if len(values) == 1 else 1)


def picture_as_png(image: Image.Image) -> bytes:
    """Encode a picture as PNG, lossless where PNG has its mode, else as RGB."""
    from PIL import ImageOps

    file, turned = io.BytesIO(), ImageOps.exif_transpose(image)
    (turned if turned.mode in _IN_PNG else turned.convert("RGB")).save(file, "PNG", compress_level=1)
    return file.getvalue()


# Input files that arrive as bytes: read as the same file would be read here, and within bounds.
#
# Both sides must read alike for an answer to be the model's own, so they compare a digest of how they read: the
# spec's settings, the code of its own callable, and the libraries that decode. Nothing is written to disk, except for
# a spec's own callable, which takes a path.


SUFFIXES = IMAGE_SUFFIXES | TENSOR_SUFFIXES
BYTES_PER_PIXEL = 4


def check_suffix(suffix: str) -> str:
    """Return ``suffix`` in lower case. Raises InputMismatch if input files cannot have it."""
    if suffix.lower() not in SUFFIXES:
        raise InputMismatch(
            f"{suffix[:20]!r} is not a suffix of an input file; expected one of {', '.join(sorted(SUFFIXES))}"
        )
    return suffix.lower()


@contextmanager
def as_path(suffix: str, data: bytes) -> Iterator[Path]:
    """Write the bytes to a temporary file while in the block, for a callable that takes a path."""
    with tempfile.TemporaryDirectory(prefix="isthmus-input-") as folder:
        path = Path(folder) / f"input{suffix}"
        path.write_bytes(data)
        yield path


def digest(settings: Any, own: Callable[..., Any] | None, constants: Mapping[str, Any]) -> str:
    """Return a hexadecimal digest of how files are read: ``settings`` and ``constants`` by their text, ``own`` by its
    source.
    """
    known = {
        "settings": repr(settings),
        "constants": repr(sorted(constants.items())),
        "own": _source(own) if own else None,
        "libraries": libraries(),
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def libraries() -> dict[str, str | None]:
    """Return the versions of the libraries that decode files."""
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
