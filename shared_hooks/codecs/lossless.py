"""The bytes as they are."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import lz4.block
import numpy as np
import numpy.typing as npt
import torch
import zstandard

from shared_hooks.codecs.codec import Codec, Coded, Grain, Param
from shared_hooks.tensors.staging import to_host

# `ByteCodec`: a codec that sees bytes and knows nothing of what they stand for.


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat tensor; one of a GPU is copied here first."""
    return memoryview(to_host(tensor).view(torch.uint8).numpy())  # type: ignore[arg-type]


class ByteCodec(Codec):
    """Lossless. `grows` bounds how far its bytes expand."""

    lossless = True

    grows: ClassVar[int]
    """An encoded byte stands for so many bytes at most."""

    @abstractmethod
    def compress(self, data: memoryview) -> memoryview:
        """``data`` (one byte or more), encoded."""

    @abstractmethod
    def decompress(self, data: memoryview, nbytes: int) -> memoryview:
        """The ``nbytes`` bytes, writable. Raises ValueError, before more than that is allocated."""

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        return Coded(self.compress(bytes_of(tensor)))

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        if params:
            raise ValueError("it has no parameters")
        if elements * dtype.itemsize > self.grows * max(nbytes, 1):
            raise ValueError(f"{nbytes} bytes cannot stand for so much")

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        return self.decompress(data, elements * dtype.itemsize)


class Raw(Codec):
    """Copies nothing: received tensors are used where they lie, which may be memory that must not be written."""

    name = "raw"
    lossless = True

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        return Coded(bytes_of(tensor))

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        if params or elements * dtype.itemsize != nbytes:
            raise ValueError(f"{nbytes} bytes are not {elements} elements of {dtype}")

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        return data


RAW = Raw()


# Floats rounded to 16 bits: half the bytes of float32, a quarter of float64.


_WIDER = (torch.float32, torch.float64)


class Half(Codec):
    """To the nearest value of ``dtype``, ties to even. A finite value beyond the largest one makes it None: raw."""

    lossless = False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name  # type: ignore[misc]  # of the object: there are two
        self._dtype = dtype

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        if tensor.dtype not in _WIDER:
            return None
        found = tensor.to(self._dtype)
        # the largest is NaN where any is
        if not torch.isfinite(found.abs().amax()) and not torch.equal(found.isinf(), tensor.isinf()):
            return None
        return Coded(bytes_of(found))

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        if params or dtype not in _WIDER or nbytes != 2 * elements:
            raise ValueError(f"{nbytes} bytes are not {elements} elements of {self._dtype} for {dtype}")

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        return torch.frombuffer(bytearray(data), dtype=self._dtype).to(dtype)


# LZ4, block format (https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md), without its size in front.


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


# Bytes in another order before they are compressed: first the first byte of every element, then the second.
#
# Exponents are alike, mantissas are not; so the ones stand together, and the others do not come between them.


class Shuffled(Codec):
    """``inner``, after shuffling."""

    lossless = True

    def __init__(self, inner: ByteCodec) -> None:
        self._inner = inner
        self.name = f"shuffle-{inner.name}"  # type: ignore[misc]  # of the object: there is one for each inner one

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        flat = np.frombuffer(bytes_of(tensor), dtype=np.uint8)
        planes = np.empty_like(flat).reshape(tensor.itemsize, -1)
        for number, plane in enumerate(planes):
            plane[:] = flat[number :: tensor.itemsize]
        return Coded(self._inner.compress(planes.data.cast("B")))

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        self._inner.check(params, dtype, elements, nbytes)

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        planes = np.frombuffer(self._inner.decompress(data, elements * dtype.itemsize), dtype=np.uint8).reshape(
            dtype.itemsize, -1
        )
        flat = np.empty(planes.size, dtype=np.uint8)
        for number, plane in enumerate(planes):
            flat[number :: dtype.itemsize] = plane
        return flat.data


# Several runs of bytes as one, each as Zstandard makes it where that is smaller.
#
# In front of each run stands its size, doubled, and one more where it is compressed: little endian, seven bits a
# byte. How large each is when it is read again the reader knows, and no more is made.


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


# For maps with many zeros, as ReLU leaves them, bit by bit: where no zeros are, and what stands there.
#
# The zeros are a mask of one bit each. The other elements are turned left by one bit, so that the sign stands last,
# and cut into planes: the first byte of each (of a float32: its exponent), the second one, and so on. Mask and planes
# are compressed each alone, where that makes them smaller: exponents become few bits, and a sign that is always the
# same costs nothing. Any dtype; only an element whose bits are all zero is one.


_CHUNK = 1 << 18
"""Elements that are put in their places at a time: a place takes eight bytes, whatever an element takes."""
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Sparse(Codec):
    """One parameter: how many elements are not zero."""

    name = "sparse"
    lossless = True

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        words = np.frombuffer(bytes_of(tensor), dtype=_word(tensor.dtype))
        mask = words != 0
        kept = np.compress(mask, words)
        runs = [np.packbits(mask, bitorder="little")]
        if len(kept):
            bits = 8 * kept.itemsize
            kept = (kept << 1 | kept >> (bits - 1)).astype(kept.dtype, copy=False)
            planes = kept.astype(kept.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(len(kept), -1)
            runs += [np.ascontiguousarray(plane) for plane in planes.T]
        return Coded(joined(runs), (len(kept),))

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        if len(params) != 1 or type(params[0]) is not int:
            raise ValueError("its parameter is the number of elements that are not zero")
        count = _count(dtype, elements)
        if not 0 <= params[0] <= count:
            raise ValueError(f"{params[0]} of {count} elements are not zero")
        if nbytes < least(sum(_sizes(params[0], dtype, elements))):
            raise ValueError(f"{nbytes} bytes cannot stand for so much")

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        kept, count, word = int(params[0]), _count(dtype, elements), _word(dtype)
        mask, *planes = parted(data, _sizes(kept, dtype, elements))
        is_kept = np.unpackbits(mask, count=count, bitorder="little").view(np.bool_)
        if (places := int(np.count_nonzero(is_kept))) != kept:
            raise ValueError(f"{places} places for {kept} elements")
        found = np.zeros(count, dtype=word)
        at = 0
        for start in range(0, count if kept else 0, _CHUNK):
            where = np.flatnonzero(is_kept[start : start + _CHUNK])
            found[start : start + _CHUNK][where] = _turned_back([plane[at : at + len(where)] for plane in planes], word)
            at += len(where)
        return found.data.cast("B")


def _turned_back(planes: list[Bytes], word: type[np.unsignedinteger[npt.NBitBase]]) -> npt.NDArray[Any]:
    """The elements of these planes."""
    whole = np.empty((len(planes[0]), len(planes)), dtype=np.uint8)
    for number, plane in enumerate(planes):
        whole[:, number] = plane
    values = whole.reshape(-1).view(np.dtype(word).newbyteorder("<")).astype(word, copy=False)
    return values >> 1 | values << (8 * values.itemsize - 1)


def _word(dtype: torch.dtype) -> type[np.unsignedinteger[npt.NBitBase]]:
    """What is compared with zero: an element, or one of the two numbers of a complex one."""
    return _WORDS[dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize]  # type: ignore[return-value]


def _count(dtype: torch.dtype, elements: int) -> int:
    return 2 * elements if dtype.is_complex else elements


def _sizes(kept: int, dtype: torch.dtype, elements: int) -> list[int]:
    mask = -(-_count(dtype, elements) // 8)
    return [mask] + ([kept] * np.dtype(_word(dtype)).itemsize if kept else [])
