"""Several runs of bytes as one, each as Zstandard makes it where that is smaller.

In front of each run stands its size, doubled, and one more where it is compressed: little endian, seven bits a byte.
How large each is when it is read again the reader knows, and no more is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from shared_hooks.codecs.zstd import GROWS, compressed_symbols, decompressed

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
