"""`Codec`: what turns a tensor into fewer bytes, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shared_hooks.tensors import View

# `Grain`: how the elements of a flat tensor hang together, for codecs that treat channels or tokens alike.


_MAP_RANK = 4
"""(N, C, H, W) and beyond are feature maps; below, the last dimension holds a token's features."""


class Grain(NamedTuple):
    """In the order of memory: ``outer`` times ``channels`` times ``inner`` elements. ``is_map``: of a feature map,
    whose lines hold ``width`` of the inner ones.

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
        """The grain of a tensor whose elements fill one run of memory, in whatever order of dimensions."""
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
    """A tensor as bytes. ``params``: what `Codec.decode` needs to know beside dtype and number; JSON has them."""

    data: memoryview
    params: tuple[Param, ...] = ()


class Codec(ABC):
    """Without state: one object serves every thread.

    What is decoded comes from strangers. `check` sees what is announced, before anything is allocated; `decode` makes
    no more than the elements that are announced, and a small multiple of that while it works.
    """

    name: ClassVar[str]
    """On the wire and on the command line. Another version of a codec's bytes is another codec: "int8" and "int8/2"."""

    lossless: ClassVar[bool]
    """Whether `decode` gives back the very bits."""

    listed: ClassVar[bool] = True
    """Whether "all codecs" means this one, too: not one that is for one cut, or is there for something else than bytes.
    """

    shrinks: ClassVar[bool] = True
    """Whether it is there to make bytes fewer: what it does not make smaller is then sent raw."""

    def at(self, cut: str, number: int) -> Codec:
        """The codec for the ``number``-th piece of the cut after the layer ``cut``: this one, for any."""
        return self

    @abstractmethod
    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        """``tensor`` (flat and contiguous, one element or more, any dtype, on any device), encoded.

        None where it cannot be (another dtype, a value that would be lost): the caller sends it raw, as it does with
        what has not become smaller.
        """

    def bound(self, dtype: torch.dtype, elements: int) -> int | None:
        """The most bytes that `encode` makes of so many elements; None: not promised. Less than that is taken for an
        encoding, more never."""
        return None

    @abstractmethod
    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        """Raises ValueError where ``nbytes`` encoded bytes with ``params`` cannot stand for such a tensor."""

    @abstractmethod
    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        """The flat tensor on the CPU (or its bytes) that `encode` took: writable memory of its own.

        ``params``, ``dtype``, ``elements`` and the size of ``data`` have passed `check`. Raises ValueError for anything
        but an encoding of such a tensor.
        """


Bound = Sequence[Mapping[str, Codec]]
"""For each tensor, by name, codecs with what they need beside the bytes; others are those of the list."""


# Where a quantiser of few levels clips: the step with the least squared error, from a group's moments alone.
#
# After R. Banner, Y. Nahshan, D. Soudry, "Post training 4-bit quantization of convolutional networks for rapid-
# deployment" (NeurIPS 2019): values are taken for a Laplace or a normal distribution, whichever their moments are
# nearer to. Here zero is always a level, and stays zero. What ReLU leaves is the one half of such a distribution; its
# zeros do not count.


STEPS: Final = {
    1: (2.0000, 1.5341),
    3: (1.1621, 0.8156),
    7: (0.6885, 0.4429),
    15: (0.4065, 0.2422),
}
"""Levels beside zero, on one side -> the best step for a Laplace and for a normal distribution of mean magnitude 1."""

_LAPLACE, _NORMAL = 0.7071, 0.7979
"""Mean magnitude by root mean square."""


def best_step(magnitude: torch.Tensor, square: torch.Tensor, largest: torch.Tensor, levels: int) -> torch.Tensor:
    """The best step of each group, from the means of the magnitudes and squares, and the largest magnitude. The same
    shape.

    ``levels``: one of `STEPS`, or more: then nothing is clipped.
    """
    whole = largest / levels
    if levels not in STEPS:
        return whole
    laplace, normal = STEPS[levels]
    near = ((magnitude / square.sqrt() - _LAPLACE) / (_NORMAL - _LAPLACE)).clamp(0, 1).nan_to_num(0)
    return torch.minimum(magnitude * (laplace + (normal - laplace) * near), whole)


# Sizes of a quantiser's steps, one byte each: eighths of an octave below the largest.
#
# A step of 2**(n / 8) is named by its whole number n, so no stranger's step is NaN or infinite, and all machines work
# with the same float32: a power of two times one of eight constants. Rounded up, a step is 4 % wider than wanted on
# average.


OCTAVE: Final = 8
LARGEST: Final = 100 * OCTAVE
SMALLEST: Final = -90 * OCTAVE
"""Bounds of a tensor's largest step: no step is above 2**100, so that 255 of them are finite, and none
below 2**-90 * 2**-32, so that its inverse is.
"""
_SPAN = 255

# 2**(n/8), rounded to float32: written out, because libraries differ in their powers' last bits
_FRACTIONS = (1.0, 1.0905077, 1.1892071, 1.2968396, 1.4142135, 1.5422108, 1.6817929, 1.8340081)


def sized(top: int, below: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The steps of the numbers ``top - below``, as float32."""
    octaves, eighths = np.divmod(np.int32(top) - below.astype(np.int32), OCTAVE)
    return np.ldexp(np.array(_FRACTIONS, dtype=np.float32)[eighths], octaves)


def chosen(wanted: torch.Tensor) -> tuple[int, npt.NDArray[np.uint8]] | None:
    """The next larger steps: the largest one's number, and how far below it each is.

    ``wanted`` (groups): 0 or more, finite. What is far too small gets the smallest there is. None where one is too
    large, or all are too small, but not where all are 0.
    """
    if not bool(wanted.any()):
        return 0, np.zeros(len(wanted), dtype=np.uint8)
    eighths = (wanted.to("cpu", torch.float64).log2() * OCTAVE).ceil()
    largest = float(eighths.max())
    if not SMALLEST <= largest <= LARGEST:
        return None
    top = int(largest)
    return top, (top - eighths).clamp(0, _SPAN).to(torch.uint8).numpy()
