"""Sizes of a quantiser's steps, one byte each: eighths of an octave below the largest.

A step of 2**(n / 8) is named by its whole number n, so no stranger's step is NaN or infinite, and all machines work
with the same float32: a power of two times one of eight constants. Rounded up, a step is 4 % wider than wanted on
average.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

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
