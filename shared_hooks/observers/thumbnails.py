"""Encode attention as a small greyscale picture that can travel: PNG of at most `SIDE` by `SIDE`, as base64.

Received ones are checked by their structure alone (`is_thumbnail`): nothing is decompressed until it is displayed, and
then no more than its header announces.
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

# Token ids as text, one by one. A tokenizer is foreign code: if it raises, only the text is lost.


REMEMBERED: Final = 1 << 16
"""Number of ids whose text is cached."""
LONGEST: Final = 200
"""Maximum characters of one token's text."""


class Texts:
    """``tokenizer``: has ``decode([id])``, or ``convert_ids_to_tokens([id])``. It is used by one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # fast tokenizers are not thread-safe
        self._text = lru_cache(REMEMBERED)(self._decoded)

    def of(self, ids: Sequence[int]) -> tuple[tuple[str, ...], str]:
        """Return the text of each id; or none at all, and why."""
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
        if not text and callable(convert):  # some decode an unknown id to an empty text
            token = convert([number])[0]
            if token is None:
                raise LookupError("it is not in the vocabulary")
            text = token if text is None else text
        if not isinstance(text, str):
            raise TypeError(f"it gave {type(text).__name__}")
        return text[:LONGEST]


SIDE = 64
TOKENS = (0, 1, 2, 5)
"""Numbers of tokens before the patches of an image: none, a class token, a distillation token as well, four
registers.
"""
MAX_TEXT = 8192
"""Maximum characters of base64: an incompressible picture of this size takes 5.7 thousand."""

_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def shrunk(weights: torch.Tensor) -> torch.Tensor:
    """Reduce (batch, heads, queries, keys) to the first item's mean over heads, with at most `SIDE` rows and columns.

    Each cell is the mean of those it covers. Stays on the device.
    """
    grid = weights[0].mean(0)
    return F.adaptive_avg_pool2d(grid[None], (min(SIDE, grid.shape[0]), min(SIDE, grid.shape[1])))[0]


def over_places(weights: torch.Tensor) -> torch.Tensor:
    """Reduce (batch, heads, queries, keys) to the attention of all queries to each image patch, in rows and columns.

    For keys that are the patches of one square image, after up to `TOKENS` others (a class token, registers); empty for
    all other keys, and for batches of more than one (windows of an image are no image).
    """
    keys = weights.shape[-1]
    for before in TOKENS:
        side = math.isqrt(max(0, keys - before))
        if len(weights) == 1 and 2 <= side <= SIDE and side * side == keys - before:
            return weights[0].mean((0, 1))[before:].reshape(side, side)
    return weights.new_empty(0, 0)


def encoded(grid: np.ndarray[Any, Any]) -> str:
    """Encode weights, queries downwards and keys to the right, as base64 of a PNG.

    White is the largest weight; brightness is the square root of the share of it, so that small weights are visible.
    """
    grid = np.nan_to_num(grid.astype(np.float64), posinf=0.0, neginf=0.0).clip(0.0)
    pixels = (np.sqrt(grid / max(grid.max(initial=0.0), 1e-12)) * 255).round().astype(np.uint8)
    from PIL import Image

    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode("ascii")


def is_thumbnail(text: Any) -> bool:
    """Return whether this is base64 of one complete, small greyscale PNG, as `encoded` makes. Decompresses nothing."""
    if not isinstance(text, str) or len(text) > MAX_TEXT or not _BASE64.fullmatch(text):
        return False
    try:
        return _is_small_png(base64.b64decode(text, validate=True))
    except (binascii.Error, struct.error):
        return False


def decoded(text: str) -> np.ndarray[Any, Any]:
    """Decode to (queries, keys), as shares of the largest weight. Raises BadFrame for an invalid or damaged
    thumbnail.
    """
    if not is_thumbnail(text):
        raise BadFrame("a heat map that is no small greyscale PNG")
    from PIL import Image

    try:
        with Image.open(io.BytesIO(base64.b64decode(text)), formats=["PNG"]) as picture:
            return (np.asarray(picture, dtype=np.float64) / 255) ** 2
    except (OSError, ValueError, SyntaxError, zlib.error) as error:
        raise BadFrame(f"a damaged heat map: {error}") from error


def _is_small_png(data: bytes) -> bool:
    """Return whether the data is IHDR, IDAT once or more, IEND and nothing else, each with its checksum."""
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
