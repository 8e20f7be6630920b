"""Define `Codec`, which encodes a tensor to fewer bytes and decodes it, and the lossless codecs that pack bytes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import lz4.block
import numpy as np
import numpy.typing as npt
import torch
import zstandard

from shared_hooks.tensors import View
from shared_hooks.tensors.staging import to_host

# `Grain`: the channels and tokens of a flat tensor, for codecs that treat them separately.


_MAP_RANK = 4
"""The rank from which a tensor is a feature map, (N, C, H, W); below it the last dimension holds a token's features."""


class Grain(NamedTuple):
    """A tensor's layout in memory: ``outer`` times ``channels`` times ``inner`` elements, slowest first.

    ``is_map``: whether it is a feature map, whose rows hold ``width`` of the inner elements.

    (N, C, H, W) is (N, C, H * W), in channels-last memory (N * H * W, C, 1); hidden states (N, T, D) are (N * T, D, 1).
    """

    outer: int
    channels: int
    inner: int
    is_map: bool
    width: int = 1

    @property
    def elements(self) -> int:
        return self.outer * self.channels * self.inner

    @classmethod
    def of(cls, shape: tuple[int, ...], stride: tuple[int, ...]) -> Grain:
        """Return the layout of a tensor whose elements fill one contiguous run of memory, in any order of
        dimensions.
        """
        count = View(shape, stride, 0).numel
        is_map = len(shape) >= _MAP_RANK
        axis = 1 if is_map else len(shape) - 1
        if axis < 0 or count == 0 or shape[axis] <= 1:
            if is_map and count and stride[-1] == 1 and stride[axis - 1] * shape[0] == count:
                return cls(shape[0], 1, count // shape[0], is_map, shape[-1])
            return cls(1, max(1, count), 1, is_map) if is_map else cls(count, 1, 1, is_map)
        channels, inner = shape[axis], stride[axis]
        if count % (channels * inner):  # not a run after all
            return cls(1, count, 1, is_map)
        width = shape[-1] if is_map and stride[-1] == 1 and inner % shape[-1] == 0 else 1
        return cls(count // (channels * inner), channels, inner, is_map, width)


Param = int | float | str
MAX_PARAMS: Final = 16
MAX_TEXT: Final = 64


class Coded(NamedTuple):
    """A tensor encoded as bytes. ``params``: JSON values that `Codec.decode` needs beside the dtype and
    element count.
    """

    data: memoryview
    params: tuple[Param, ...] = ()


class Codec(ABC):
    """Encodes tensors to bytes and decodes them. Stateless: all threads share one object.

    Encoded data is untrusted. `check` sees its announced sizes before anything is allocated; `decode` allocates no more
    than the announced elements, and a small multiple of that while it works.
    """

    name: ClassVar[str]
    """Name on the wire and on the command line. A new version of the format is a new codec: "int8" and "int8/2"."""

    lossless: ClassVar[bool]
    """Whether `decode` restores every bit."""

    listed: ClassVar[bool] = True
    """Whether "all codecs" includes it. False for a codec of a single cut, or one whose purpose is not to save
    bytes.
    """

    shrinks: ClassVar[bool] = True
    """Whether its purpose is to save bytes: a tensor that it does not shrink is then sent raw."""

    def at(self, cut: str, number: int) -> Codec:
        """Return the codec for the ``number``-th piece of the cut after the layer ``cut``. By default ``self``."""
        return self

    @abstractmethod
    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        """Encode ``tensor`` (flat and contiguous, one element or more, any dtype, on any device).

        Returns None where it cannot be encoded (an unsupported dtype, a value that would be lost). The caller then
        sends it raw, as it does where the encoding is no smaller.
        """

    def bound(self, dtype: torch.dtype, elements: int) -> int | None:
        """Return the maximum number of bytes that `encode` makes of so many elements, or None if there is no such
        bound.

        Fewer bytes are accepted as an encoding, more are not.
        """
        return None

    @abstractmethod
    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        """Raise ValueError if ``nbytes`` encoded bytes with ``params`` cannot be an encoding of such a tensor."""

    @abstractmethod
    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        """Return the flat tensor on the CPU (or its bytes) that was encoded, in writable memory of its own.

        ``params``, ``dtype``, ``elements`` and the size of ``data`` have passed `check`. Raises ValueError for data
        that is not an encoding of such a tensor.
        """


Bound = Sequence[Mapping[str, Codec]]
"""Codecs by tensor name, each with the parameters bound to it. Other tensors use the codecs of the list."""


# The clipping point of a quantiser of few levels: the step with the least squared error, from a group's moments
# alone.
#
# After R. Banner, Y. Nahshan, D. Soudry, "Post training 4-bit quantization of convolutional networks for rapid-
# deployment" (NeurIPS 2019): values are taken for a Laplace or a normal distribution, whichever their moments are
# nearer to. Here zero is always a level, and stays zero. The output of ReLU is one half of such a distribution; its
# zeros do not count.


STEPS: Final = {
    1: (2.0000, 1.5341),
    3: (1.1621, 0.8156),
    7: (0.6885, 0.4429),
    15: (0.4065, 0.2422),
}
"""Levels above zero on one side, mapped to the best step for a Laplace and for a normal distribution of mean magnitude
1.
"""

_LAPLACE, _NORMAL = 0.7071, 0.7979
"""Ratios of mean magnitude to root mean square."""


def best_step(magnitude: torch.Tensor, square: torch.Tensor, largest: torch.Tensor, levels: int) -> torch.Tensor:
    """Return the best step of each group from its mean magnitude, mean square and largest magnitude (all of one shape).

    ``levels``: one of `STEPS`, or more, in which case nothing is clipped.
    """
    whole = largest / levels
    if levels not in STEPS:
        return whole
    laplace, normal = STEPS[levels]
    near = ((magnitude / square.sqrt() - _LAPLACE) / (_NORMAL - _LAPLACE)).clamp(0, 1).nan_to_num(0)
    return torch.minimum(magnitude * (laplace + (normal - laplace) * near), whole)


# Sizes of a quantiser's steps, one byte each: eighths of an octave below the largest.
#
# A step of 2**(n / 8) is encoded as its whole number n, so no received step is NaN or infinite, and all machines
# compute with the same float32: a power of two times one of eight constants. Rounded up, a step is 4 % wider than
# wanted on average.


OCTAVE: Final = 8
LARGEST: Final = 100 * OCTAVE
SMALLEST: Final = -90 * OCTAVE
"""Bounds of a tensor's largest step: no step exceeds 2**100, so 255 of them stay finite, and none is below 2**-90 *
2**-32, so its inverse stays finite.
"""
_SPAN = 255

# 2**(n/8), rounded to float32: constants, because libraries differ in the last bits of their powers
_FRACTIONS = (1.0, 1.0905077, 1.1892071, 1.2968396, 1.4142135, 1.5422108, 1.6817929, 1.8340081)


def sized(top: int, below: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return the steps with the numbers ``top - below``, as float32."""
    octaves, eighths = np.divmod(np.int32(top) - below.astype(np.int32), OCTAVE)
    return np.ldexp(np.array(_FRACTIONS, dtype=np.float32)[eighths], octaves)


def chosen(wanted: torch.Tensor) -> tuple[int, npt.NDArray[np.uint8]] | None:
    """Round steps up to representable ones: the largest step's number, and each step's distance below it.

    ``wanted``: (groups,), finite, 0 or more. Steps that are too small become the smallest one. Returns None where a
    step is too large or all are too small, unless all are 0.
    """
    if not bool(wanted.any()):
        return 0, np.zeros(len(wanted), dtype=np.uint8)
    eighths = (wanted.to("cpu", torch.float64).log2() * OCTAVE).ceil()
    largest = float(eighths.max())
    if not SMALLEST <= largest <= LARGEST:
        return None
    top = int(largest)
    return top, (top - eighths).clamp(0, _SPAN).to(torch.uint8).numpy()


# `ByteCodec`: a codec for bytes, whatever their meaning.


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a flat tensor, copied to the CPU first if it is on a GPU."""
    return memoryview(to_host(tensor).view(torch.uint8).numpy())  # type: ignore[arg-type]


class ByteCodec(Codec):
    """A lossless codec of bytes. `grows` bounds how far they expand."""

    lossless = True

    grows: ClassVar[int]
    """Maximum expansion: decoded bytes for each encoded byte."""

    @abstractmethod
    def compress(self, data: memoryview) -> memoryview:
        """Compress ``data`` (one byte or more)."""

    @abstractmethod
    def decompress(self, data: memoryview, nbytes: int) -> memoryview:
        """Decompress to ``nbytes`` writable bytes. Raises ValueError before allocating more than that."""

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
    """Sends bytes as they are, without a copy: a received tensor may lie in memory that must not be written."""

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
    """Rounds to the nearest value of ``dtype``, ties to even. A finite value out of its range makes the tensor raw."""

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
# Exponents are alike, mantissas are not; so similar bytes stand together.


class Shuffled(Codec):
    """Shuffles bytes by their place in an element, then applies ``inner``."""

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


# Several runs of bytes as one, each compressed by Zstandard where that is smaller.
#
# In front of each run stands its size, doubled, plus one where it is compressed: little endian, seven bits a byte.
# The reader knows the decompressed size of each, and decompresses no more.


# Zstandard (RFC 8878), one frame with its content size.

GROWS = 1 << 15
"""Maximum expansion: a block of 4 bytes can encode 128 KiB."""
_LEVEL = 1  # a higher level costs three times the time for a few per cent: docs/decisions/0024-codecs.md
_FEW_PLACES = 8
"""Logarithm of the match table's size for symbols. Small: they hardly repeat, and a small table is faster."""


class _Tools(threading.local):
    """A thread's zstd compressors: each serves one thread, and making one takes longer than compressing a
    small tensor.
    """

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        few = zstandard.ZstdCompressionParameters.from_level(_LEVEL, hash_log=_FEW_PLACES)
        self.of_symbols = zstandard.ZstdCompressor(compression_params=few)
        self.decompressor = zstandard.ZstdDecompressor()


_tools = _Tools()


def compressed(data: memoryview) -> memoryview:
    """Compress ``data`` (one byte or more) to one frame."""
    return memoryview(_tools.compressor.compress(data))


def compressed_symbols(data: memoryview) -> memoryview:
    """Compress bytes by their frequencies alone (Huffman), without searching for repetitions."""
    return memoryview(_tools.of_symbols.compress(data))


def decompressed(data: memoryview, nbytes: int) -> memoryview:
    """Decompress to ``nbytes`` read-only bytes (one or more). Raises ValueError before allocating anything else."""
    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size != nbytes or frame.dict_id:
            raise ValueError(f"not a frame of {nbytes} bytes")
        # the result is the window: a frame that declares a larger one is refused
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
"""Minimum size in bytes that is worth compressing."""
_MOST_DIGITS = 7  # a size of up to 2^48 bytes


def joined(runs: Iterable[Bytes]) -> memoryview:
    """Join runs of bytes, compressing each where that helps. Each is contiguous and may be empty."""
    found: list[bytes | memoryview] = []
    for run in runs:
        plain = run.data.cast("B")
        packed = compressed_symbols(plain) if len(plain) >= _LEAST else plain
        smaller = len(packed) < len(plain)
        found.append(_number(2 * len(packed if smaller else plain) + smaller))
        found.append(packed if smaller else plain)
    return memoryview(b"".join(found))


def parted(data: memoryview, sizes: Sequence[int]) -> list[Bytes]:
    """Split ``data`` into runs of ``sizes`` bytes, which must not be written. Raises ValueError before making more."""
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
    """Return the minimum number of bytes that can encode ``total`` bytes."""
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


# For maps with many zeros, as ReLU gives them, lossless: where the non-zero elements are, and their values.
#
# The zeros are a mask of one bit each. The other elements are rotated left by one bit, so that the sign comes last,
# and cut into planes: the first byte of each (of a float32: its exponent), the second one, and so on. Mask and planes
# are compressed separately, where that makes them smaller: exponents become few bits, and a constant sign costs
# nothing. Any dtype; only an element whose bits are all zero is a zero.


_CHUNK = 1 << 18
"""Elements placed at a time: an index takes eight bytes, whatever an element takes."""
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Sparse(Codec):
    """Sends the elements that are not zero and their positions. One parameter: the count of these elements."""

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
    """Return the elements that these byte planes hold."""
    whole = np.empty((len(planes[0]), len(planes)), dtype=np.uint8)
    for number, plane in enumerate(planes):
        whole[:, number] = plane
    values = whole.reshape(-1).view(np.dtype(word).newbyteorder("<")).astype(word, copy=False)
    return values >> 1 | values << (8 * values.itemsize - 1)


def _word(dtype: torch.dtype) -> type[np.unsignedinteger[npt.NBitBase]]:
    """Return the integer type compared with zero: of an element, or of half a complex one."""
    return _WORDS[dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize]  # type: ignore[return-value]


def _count(dtype: torch.dtype, elements: int) -> int:
    return 2 * elements if dtype.is_complex else elements


def _sizes(kept: int, dtype: torch.dtype, elements: int) -> list[int]:
    mask = -(-_count(dtype, elements) // 8)
    return [mask] + ([kept] * np.dtype(_word(dtype)).itemsize if kept else [])
