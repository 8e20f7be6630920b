"""For maps with many zeros, as ReLU leaves them, bit by bit: where no zeros are, and what stands there.

The zeros are a mask of one bit each. The other elements are turned left by one bit, so that the sign stands last, and
cut into planes: the first byte of each (of a float32: its exponent), the second one, and so on. Mask and planes are
compressed each alone, where that makes them smaller: exponents become few bits, and a sign that is always the same
costs nothing. Any dtype; only an element whose bits are all zero is one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared_hooks.codecs.byte_codec import bytes_of
from shared_hooks.codecs.codec import Codec, Coded, Param
from shared_hooks.codecs.grain import Grain
from shared_hooks.codecs.sections import Bytes, joined, least, parted

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
