"""Attention as a small greyscale picture that may travel: PNG of at most `SIDE` by `SIDE`, as base64.

What comes from elsewhere is checked by its structure alone (`is_thumbnail`): nothing is decompressed until somebody
wants to see it, and then no more than its header says.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
import struct
import threading
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F

from shared_hooks.errors import BadFrame

# Ids of tokens as text, each by itself. A tokenizer is anybody's code: what it raises costs the text alone.


REMEMBERED: Final = 1 << 16
"""Ids whose text is kept."""
LONGEST: Final = 200
"""Characters of one token's text."""


class Texts:
    """``tokenizer``: has ``decode([id])``, or ``convert_ids_to_tokens([id])``. Threads are served one at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # fast tokenizers are not for several threads
        self._text = lru_cache(REMEMBERED)(self._decoded)

    def of(self, ids: Sequence[int]) -> tuple[tuple[str, ...], str]:
        """The text of each id; or none at all, and why."""
        number = -1
        try:
            with self._lock:
                return tuple([self._text(number := one) for one in ids]), ""
        except Exception as error:
            return (), f"the tokenizer has no text for id {number}: {type(error).__name__}: {error}"[:300]

    def _decoded(self, number: int) -> str:
        decode = getattr(self._tokenizer, "decode", None)
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        text = decode([number]) if callable(decode) else None
        if not text and callable(convert):  # some decode what they do not know to nothing
            token = convert([number])[0]
            if token is None:
                raise LookupError("it is not in the vocabulary")
            text = token if text is None else text
        if not isinstance(text, str):
            raise TypeError(f"it gave {type(text).__name__}")
        return text[:LONGEST]


SIDE = 64
TOKENS = (0, 1, 2, 5)
"""That stand before the places of a picture: none, a class token, one of distillation as well, four registers."""
MAX_TEXT = 8192
"""Characters of base64: a picture of this size that does not compress takes 5.7 thousand."""

_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def shrunk(weights: torch.Tensor) -> torch.Tensor:
    """(batch, heads, queries, keys) -> the mean over heads of the first item, in at most `SIDE` rows and columns.

    Each cell is the mean of those it stands for. Stays on the device.
    """
    grid = weights[0].mean(0)
    return F.adaptive_avg_pool2d(grid[None], (min(SIDE, grid.shape[0]), min(SIDE, grid.shape[1])))[0]


def over_places(weights: torch.Tensor) -> torch.Tensor:
    """(batch, heads, queries, keys) -> what all queries give to each place of a picture, in rows and columns.

    For keys that are the places of one square picture, behind up to `TOKENS` others (a class token, registers); empty
    for all other keys, and where the batch holds more than one (windows of a picture are no picture).
    """
    keys = weights.shape[-1]
    for before in TOKENS:
        side = math.isqrt(max(0, keys - before))
        if len(weights) == 1 and 2 <= side <= SIDE and side * side == keys - before:
            return weights[0].mean((0, 1))[before:].reshape(side, side)
    return weights.new_empty(0, 0)


def encoded(grid: np.ndarray[Any, Any]) -> str:
    """Weights, queries downwards and keys to the right, as base64 of a PNG.

    White is the greatest of them; a brightness is the square root of a share of it, so that small weights can be seen.
    """
    grid = np.nan_to_num(grid.astype(np.float64), posinf=0.0, neginf=0.0).clip(0.0)
    pixels = (np.sqrt(grid / max(grid.max(initial=0.0), 1e-12)) * 255).round().astype(np.uint8)
    from PIL import Image

    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode("ascii")


def is_thumbnail(text: Any) -> bool:
    """Whether this is what `encoded` makes: base64 of one whole greyscale PNG that is small. Decompresses nothing."""
    if not isinstance(text, str) or len(text) > MAX_TEXT or not _BASE64.fullmatch(text):
        return False
    try:
        return _is_small_png(base64.b64decode(text, validate=True))
    except (binascii.Error, struct.error):
        return False


def decoded(text: str) -> np.ndarray[Any, Any]:
    """(queries, keys), as shares of the greatest weight. Raises BadFrame for what is no thumbnail, or is damaged."""
    if not is_thumbnail(text):
        raise BadFrame("a heat map that is no small greyscale PNG")
    from PIL import Image

    try:
        with Image.open(io.BytesIO(base64.b64decode(text)), formats=["PNG"]) as picture:
            return (np.asarray(picture, dtype=np.float64) / 255) ** 2
    except (OSError, ValueError, SyntaxError, zlib.error) as error:
        raise BadFrame(f"a damaged heat map: {error}") from error


def _is_small_png(data: bytes) -> bool:
    """IHDR, IDAT once or more, IEND, nothing else; each with its checksum."""
    if not data.startswith(_SIGNATURE):
        return False
    kinds: list[bytes] = []
    at = len(_SIGNATURE)
    while at < len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        body = data[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack_from(">I", data, at + 8 + length)
        if zlib.crc32(kind + body) != checksum:
            return False
        if not kinds:
            width, height, *form = struct.unpack(">II5B", body)
            # 8 bits of grey, the one compression and filter there are, not interlaced
            if kind != b"IHDR" or not 0 < width <= SIDE or not 0 < height <= SIDE or form != [8, 0, 0, 0, 0]:
                return False
        kinds.append(kind)
        at += 12 + length
    return len(kinds) >= 3 and set(kinds[1:-1]) == {b"IDAT"} and kinds[-1] == b"IEND"
