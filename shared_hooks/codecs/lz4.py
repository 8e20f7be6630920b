"""LZ4, block format (https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md), without its size in front."""

from __future__ import annotations

import lz4.block

from shared_hooks.codecs.byte_codec import ByteCodec


class Lz4(ByteCodec):
    name = "lz4"
    grows = 255  # a match's length grows by 255 with every byte that describes it

    def compress(self, data: memoryview) -> memoryview:
        return memoryview(lz4.block.compress(data, store_size=False))

    def decompress(self, data: memoryview, nbytes: int) -> memoryview:
        try:
            found = memoryview(lz4.block.decompress(data, uncompressed_size=nbytes, return_bytearray=True))
        except lz4.block.LZ4BlockError as error:
            raise ValueError(str(error)) from error
        if len(found) != nbytes:
            raise ValueError(f"{len(found)} bytes where {nbytes} are due")
        return found
