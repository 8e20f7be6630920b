"""Small integers, most of them zero, as bytes: folded (0, -1, 1, -2 ...), without the zeros at the end, deflated.

Of deflate's strategies the shorter of two is taken: Huffman codes alone, or with runs. They cost a tenth of its search
for repetitions, and find as much. Deflate is in every Python on every machine (a range coder comes nearer to the
entropy, but those in the package index have none for Linux on ARM); its decoder needs not know the strategy.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

LARGEST = 32_767

Numbers = npt.NDArray[np.int32]


def pack(numbers: Numbers, wide: bool) -> bytes:
    """Numbers of up to 127, ``wide``: up to `LARGEST`. Nothing at all where all are zero."""
    folded = (numbers << 1) ^ (numbers >> 31)
    planes = [folded & 255, folded >> 8] if wide else [folded]
    data = b"".join(plane.astype(np.uint8).tobytes() for plane in planes).rstrip(b"\0")
    return min((_deflated(data, how) for how in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE)), key=len) if data else b""


def unpack(data: memoryview, count: int, wide: bool) -> Numbers:
    """``count`` numbers. Raises ValueError for more of them, before more is allocated."""
    nbytes = 2 * count if wide else count
    folded = np.zeros(nbytes, dtype=np.uint8)
    if len(data):
        found = _inflated(data, nbytes)
        folded[: len(found)] = np.frombuffer(found, dtype=np.uint8)
    wider = folded.astype(np.int32)
    if wide:
        wider = wider[:count] | wider[count:] << 8
    return (wider >> 1) ^ -(wider & 1)


def _inflated(data: memoryview, most: int) -> bytes:
    decoder = zlib.decompressobj(-15)
    try:
        found = decoder.decompress(data, max(1, most))
        if not decoder.eof:  # it may still owe its end mark
            found += decoder.decompress(decoder.unconsumed_tail, 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(found) > most or not decoder.eof or decoder.unused_data:
        raise ValueError("it holds more numbers than there are places")
    return found


def _deflated(data: bytes, strategy: int) -> bytes:
    coder = zlib.compressobj(6, zlib.DEFLATED, -15, 9, strategy)
    return coder.compress(data) + coder.flush()
