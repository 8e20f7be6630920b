"""Several runs of bytes as one, each as Zstandard makes it where that is smaller.

In front of each run stands its size, doubled, and one more where it is compressed: little endian, seven bits a byte.
How large each is when it is read again the reader knows, and no more is made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import zstandard

from shared_hooks.codecs.byte_codec import ByteCodec

# Zstandard (RFC 8878), one frame that says how large its content is.

GROWS = 1 << 15
"""A block of 4 bytes stands for 128 KiB at most."""
_LEVEL = 1  # more costs three times the time for a few per cent: docs/decisions/0024-codecs.md
_FEW_PLACES = 8
"""The logarithm of a small match table's size: hardly any repetition is found, which is as good for symbols, and
faster.
"""


class _Tools(threading.local):
    """A compressor serves one thread; making one takes longer than a small tensor."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        few = zstandard.ZstdCompressionParameters.from_level(_LEVEL, hash_log=_FEW_PLACES)
        self.of_symbols = zstandard.ZstdCompressor(compression_params=few)
        self.decompressor = zstandard.ZstdDecompressor()


_tools = _Tools()


def compressed(data: memoryview) -> memoryview:
    """``data`` (one byte or more) as one frame."""
    return memoryview(_tools.compressor.compress(data))


def compressed_symbols(data: memoryview) -> memoryview:
    """The same for bytes that tell by how frequent they are, not by what they repeat: Huffman's code."""
    return memoryview(_tools.of_symbols.compress(data))


def decompressed(data: memoryview, nbytes: int) -> memoryview:
    """The ``nbytes`` bytes (one or more), not writable. Raises ValueError before anything else is allocated."""
    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size != nbytes or frame.dict_id:
            raise ValueError(f"not a frame of {nbytes} bytes")
        # the result is the window: a frame that names a larger one gets none
        found = _tools.decompressor.decompress(data, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(found) != nbytes:
        raise ValueError(f"not a frame of {nbytes} bytes")
    return memoryview(found)


class Zstd(ByteCodec):
    name = "zstd"
    grows = GROWS

    def compress(self, data: memoryview) -> memoryview:
        return compressed(data)

    def decompress(self, data: memoryview, nbytes: int) -> memoryview:
        return memoryview(bytearray(decompressed(data, nbytes)))


Bytes = npt.NDArray[np.uint8]
_LEAST = 32
"""Bytes; no fewer become smaller."""
_MOST_DIGITS = 7  # a size of up to 2^48 bytes


def joined(runs: Iterable[Bytes]) -> memoryview:
    """The runs, in order; each is contiguous and may be empty."""
    found: list[bytes | memoryview] = []
    for run in runs:
        plain = run.data.cast("B")
        packed = compressed_symbols(plain) if len(plain) >= _LEAST else plain
        smaller = len(packed) < len(plain)
        found.append(_number(2 * len(packed if smaller else plain) + smaller))
        found.append(packed if smaller else plain)
    return memoryview(b"".join(found))


def parted(data: memoryview, sizes: Sequence[int]) -> list[Bytes]:
    """The runs, of ``sizes`` bytes; they must not be written. Raises ValueError before more than that is made."""
    found = []
    at = 0
    for size in sizes:
        number, at = _read(data, at)
        run = data[at : at + (number >> 1)]
        at += number >> 1
        if at > len(data):
            raise ValueError("truncated")
        if number & 1 and size:
            run = decompressed(run, size)
        elif len(run) != size:
            raise ValueError(f"{len(run)} bytes where {size} are due")
        found.append(np.frombuffer(run, dtype=np.uint8))
    if at != len(data):
        raise ValueError("bytes behind the last run")
    return found


def least(total: int) -> int:
    """So many bytes at least are needed to stand for ``total`` ones."""
    return total // GROWS


def _number(value: int) -> bytes:
    digits = bytearray()
    while value >= 128:
        digits.append(128 | value & 127)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _read(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for number, digit in enumerate(data[at : at + _MOST_DIGITS]):
        value |= (digit & 127) << 7 * number
        if digit < 128:
            return value, at + number + 1
    raise ValueError("a size without an end")
