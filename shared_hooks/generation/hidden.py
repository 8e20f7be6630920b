"""Codecs for hidden states: fewer bits a number, where a loss is allowed.

A row (one token) is cut into groups of channels; a group is divided by its largest value, rounded to so many bits, and
the numbers are written by how frequent they are (zlib's Huffman coder). One uint8 tensor comes of it:

    bits, number of dimensions (1 byte each), dtype's name (12), sizes (4 each), scales (bfloat16), numbers

in little endian.

Both directions are sums and products in float32 on the CPU, the same on every machine.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import torch

from shared_hooks.errors import BadFrame, SpecError, TooLarge
from shared_hooks.tensors import dtype_name, dtype_named

CODECS = {"int8": 8, "int6": 6, "int5": 5, "int4": 4}
GROUP = 128
LEAST = 64
"""Elements; what is smaller is sent as it is."""
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 28
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_NAME = 12


def check(codec: str | None) -> str | None:
    """Raises SpecError for a codec that there is not."""
    if codec is not None and codec not in CODECS:
        raise SpecError(f"no codec {codec!r} for hidden states: there are {', '.join(CODECS)}")
    return codec


def encoded(tensor: torch.Tensor, codec: str) -> torch.Tensor | None:
    """One uint8 tensor (bytes); None for what is sent as it is: other dtypes, few numbers, NaN and infinities, and
    what would not be smaller.
    """
    if tensor.dtype not in _FLOATS or not 0 < tensor.dim() <= MAX_DIMENSIONS or tensor.numel() < LEAST:
        return None
    bits, width = CODECS[codec], tensor.shape[-1]
    most = (1 << (bits - 1)) - 1
    groups = _grouped(tensor.detach().to("cpu", torch.float32).reshape(-1, width))
    scales = (groups.abs().amax(-1, keepdim=True) / most).to(torch.bfloat16)
    if not bool(torch.isfinite(scales).all()) or not bool(torch.isfinite(groups).all()):
        return None
    # a group of zeros stays zeros
    divisor = torch.where(scales > 0, scales.to(torch.float32), torch.ones((), dtype=torch.float32))
    numbers = (groups / divisor).round_().clamp_(-most, most)
    symbols = (numbers + most).to(torch.uint8).reshape(len(groups), -1)[:, :width].contiguous()
    coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    packed = coder.compress(symbols.numpy().tobytes()) + coder.flush()
    name = dtype_name(tensor.dtype).encode()
    head = struct.pack(f"<BB{_NAME}s{tensor.dim()}I", bits, tensor.dim(), name, *tensor.shape)
    data = b"".join((head, scales.view(torch.int16).numpy().tobytes(), packed))
    if len(data) >= tensor.numel() * tensor.itemsize:
        return None
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decoded(data: torch.Tensor, most_bytes: int) -> torch.Tensor:
    """The tensor, in its own dtype, on the CPU. Raises BadFrame, and TooLarge before memory beyond ``most_bytes``."""
    raw = data.detach().cpu().contiguous().numpy().tobytes()
    bits, dtype, shape, at = _head(raw)
    count = 1
    for size in shape:
        count *= size
    if count > MAX_ELEMENTS or 8 * count > most_bytes:
        raise TooLarge(f"a hidden state of {count} numbers is announced")
    if dtype not in _FLOATS or not count:
        raise BadFrame("malformed hidden state: its dtype or sizes")
    rows, per_row = count // shape[-1], -(-shape[-1] // GROUP)
    end = at + 2 * rows * per_row
    if len(raw) < end:
        raise BadFrame("malformed hidden state: its scales")
    scales = (np.frombuffer(raw[at:end], dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    if not np.isfinite(scales).all():
        raise BadFrame("malformed hidden state: its scales")
    most = (1 << (bits - 1)) - 1
    symbols = _unpacked(raw[end:], count).reshape(rows, shape[-1])
    numbers = torch.from_numpy(symbols.copy()).to(torch.float32) - most
    if bool((numbers > most).any()):
        raise BadFrame("malformed hidden state: a number beyond its bits")
    spread = torch.from_numpy(scales.reshape(rows, per_row)).repeat_interleave(GROUP, dim=1)[:, : shape[-1]]
    found: torch.Tensor = (numbers * spread).to(dtype).reshape(shape)
    return found


def _head(raw: bytes) -> tuple[int, torch.dtype, tuple[int, ...], int]:
    """Bits, dtype, sizes, and where the scales begin."""
    try:
        bits, dimensions, name = struct.unpack_from(f"<BB{_NAME}s", raw)
        if bits not in CODECS.values() or not 0 < dimensions <= MAX_DIMENSIONS:
            raise BadFrame("malformed hidden state: no such codec")
        shape = struct.unpack_from(f"<{dimensions}I", raw, 2 + _NAME)
        return bits, dtype_named(name.rstrip(b"\0").decode("ascii")), shape, 2 + _NAME + 4 * dimensions
    except (struct.error, UnicodeDecodeError) as error:
        raise BadFrame(f"malformed hidden state: {error}") from error


def _grouped(rows: torch.Tensor) -> torch.Tensor:
    """(rows, groups, GROUP), the last group filled with zeros."""
    count, width = rows.shape
    missing = -width % GROUP
    filled = torch.nn.functional.pad(rows, (0, missing)) if missing else rows
    return filled.reshape(count, -1, GROUP)


def _unpacked(packed: bytes, count: int) -> np.ndarray:
    """Exactly ``count`` bytes: never more than that is written, whatever the data say."""
    decoder = zlib.decompressobj(-15)
    try:
        found = decoder.decompress(packed, count)
        if not decoder.eof and decoder.decompress(decoder.unconsumed_tail, 1):
            raise BadFrame("malformed hidden state: more numbers than there are places")
    except zlib.error as error:
        raise BadFrame(f"malformed hidden state: {error}") from error
    if len(found) != count or not decoder.eof or decoder.unused_data:
        raise BadFrame("malformed hidden state: its numbers")
    return np.frombuffer(found, dtype=np.uint8)
