"""scikit-learn's handwritten digits as 32x32 gray images, split into training and held-out images.

The source is the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI Machine Learning
Repository, CC BY 4.0): 1797 images of 8x8 pixels with 17 gray levels, from 13 writers. scikit-learn carries it, so
nothing is downloaded. Only training needs scikit-learn; running the model does not.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

SIZE = 32
HELD_OUT = 360
"""Number of held-out images, one fifth of 1797."""


@dataclass(frozen=True)
class DigitImage:
    """One image: its index in the source, its truth (0 to 9) and its pixels, uint8 of shape (32, 32), ink is bright."""

    index: int
    truth: int
    pixels: npt.NDArray[np.uint8]

    @property
    def file_name(self) -> str:
        """The name the image is shipped under; it carries the truth."""
        return f"{self.index:04d}_label{self.truth}.png"


def upscale(gray17: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """8x8 gray values from 0 to 16 as 32x32 from 0 to 255, by Pillow's bicubic filter (integer arithmetic)."""
    small = Image.fromarray(np.rint(gray17 * (255.0 / 16.0)).astype(np.uint8))
    return np.asarray(small.resize((SIZE, SIZE), Image.Resampling.BICUBIC))


def fixed_order(count: int) -> list[int]:
    """A permutation of range(count) that is the same on every machine and with every library version."""
    return sorted(range(count), key=lambda index: hashlib.sha256(f"isthmus digits {index}".encode()).digest())


def load_images() -> tuple[list[DigitImage], list[DigitImage]]:
    """(training images, held-out images), each in the fixed order."""
    from sklearn.datasets import load_digits  # imported here: running the model must not need scikit-learn

    source = load_digits()
    images = [
        DigitImage(index, int(source.target[index]), upscale(source.images[index]))
        for index in fixed_order(len(source.target))
    ]
    return images[HELD_OUT:], images[:HELD_OUT]
