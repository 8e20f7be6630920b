"""Zstandard (RFC 8878), one frame that says how large its content is."""

from __future__ import annotations

import threading

import zstandard

from shared_hooks.codecs.byte_codec import ByteCodec

GROWS = 1 << 15
"""A block of 4 bytes stands for 128 KiB at most."""
_LEVEL = 1  # more costs three times the time for a few per cent: docs/decisions/0024-codecs.md
_FEW_PLACES = 8
"""Of a table of 2**8 places: hardly any repetition is found, which is as good for symbols, and faster."""


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
