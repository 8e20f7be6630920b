"""Hidden states in fewer bits a number, where a loss is allowed: a codec of `shared_hooks.codecs`, as one uint8 tensor:

    size of the next (2 bytes, little endian), JSON [codec, dtype, shape, its parameters], its bytes

Each token has a step of its own; decoding gives the same numbers on every machine.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

import torch

from shared_hooks import codecs
from shared_hooks.codecs import Grain
from shared_hooks.codecs.codec import MAX_PARAMS
from shared_hooks.errors import MALFORMED, BadFrame, SpecError, TooLarge
from shared_hooks.tensors import dtype_name, dtype_named

CODECS: Final = ("int8", "int6", "int5", "int4")
MAX_DIMENSIONS: Final = 8
MAX_ELEMENTS: Final = 1 << 28
_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
_SIZE: Final = 2
_PER_ELEMENT: Final = 8
"""Bytes of memory that decoding takes for an element."""


def check(codec: str | None) -> str | None:
    """Raises SpecError for a codec that there is not."""
    if codec is not None and codec not in CODECS:
        raise SpecError(f"no codec {codec!r} for hidden states: there are {', '.join(CODECS)}")
    return codec


def encoded(tensor: torch.Tensor, codec: str) -> torch.Tensor | None:
    """One uint8 tensor on the CPU; None for what is sent as it is: other dtypes, few numbers, NaN and infinities, and
    what would not be smaller.
    """
    if tensor.dtype not in _FLOATS or not 0 < tensor.dim() <= MAX_DIMENSIONS or not tensor.numel():
        return None
    width = tensor.shape[-1]
    tokens = Grain(tensor.numel() // width, width, 1, False)
    coded = codecs.CODECS[codec].encode(tensor.detach().contiguous().view(-1), tokens)
    if coded is None:
        return None
    said = [codec, dtype_name(tensor.dtype), list(tensor.shape), list(coded.params)]
    head = json.dumps(said, separators=(",", ":")).encode()
    data = bytearray().join((len(head).to_bytes(_SIZE, "little"), head, coded.data))
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) < tensor.nbytes else None


def decoded(data: torch.Tensor, most_bytes: int) -> torch.Tensor:
    """The tensor, in its own dtype, on the CPU. Raises BadFrame, and TooLarge before memory beyond ``most_bytes``."""
    if data.dtype is not torch.uint8 or data.dim() != 1:
        raise BadFrame(f"malformed hidden state: {data.dtype} of shape {list(data.shape)}, not bytes")
    raw = memoryview(data.detach().cpu().contiguous().numpy())  # type: ignore[arg-type]
    end = _SIZE + int.from_bytes(raw[:_SIZE], "little")
    codec, dtype, shape, params = _head(bytes(raw[_SIZE:end]))
    count = math.prod(shape)
    if count > MAX_ELEMENTS or _PER_ELEMENT * count > most_bytes:
        raise TooLarge(f"a hidden state of {count} numbers is announced")
    try:
        codec.check(params, dtype, count, len(raw) - end)
        found = codec.decode(raw[end:], params, dtype, count)
    except ValueError as error:
        raise BadFrame(f"malformed hidden state: {error}") from error
    if not isinstance(found, torch.Tensor) or found.dtype is not dtype or found.shape != (count,):
        raise BadFrame("malformed hidden state: another one than announced")
    return found.view(shape)


def _head(text: bytes) -> tuple[codecs.Codec, torch.dtype, tuple[int, ...], tuple[int, ...]]:
    """Codec, dtype, shape and parameters."""
    try:
        name, dtype, shape, params = json.loads(text)
    except MALFORMED as error:
        raise BadFrame(f"malformed hidden state: {error!s:.100}") from error
    if name not in CODECS or not isinstance(dtype, str) or dtype_named(dtype) not in _FLOATS:
        raise BadFrame("malformed hidden state: no such codec or dtype")
    if not _numbers(shape, MAX_DIMENSIONS) or not shape or min(shape) < 1 or not _numbers(params, MAX_PARAMS):
        raise BadFrame("malformed hidden state: its sizes or parameters")
    return codecs.CODECS[name], dtype_named(dtype), tuple(shape), tuple(params)


def _numbers(found: Any, most: int) -> bool:
    return isinstance(found, list) and len(found) <= most and all(type(one) is int for one in found)
