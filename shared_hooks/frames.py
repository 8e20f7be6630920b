"""Define frames of videos and cameras: pixels, and their origin. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shared_hooks.errors import InputMismatch

Pixels = npt.NDArray[np.uint8]
"""RGB: (height, width, 3)."""


@dataclass(frozen=True, slots=True)
class FrameId:
    """Identifies a frame: of a ``source`` (a file, a device, an address without its password), ``index`` from 0.

    A live source counts dropped frames, too. ``seconds``: its time in a video; None if unknown. ``truth`` is its label.
    """

    source: str
    index: int
    seconds: float | None = None
    truth: str | None = None

    @property
    def name(self) -> str:
        """Short name for tables and messages."""
        return f"{self.source if '://' in self.source else Path(self.source).name}#{self.index}"

    @property
    def origin(self) -> str:
        """Full origin."""
        return f"{self.source}#{self.index}"


@dataclass(frozen=True, slots=True, eq=False)  # arrays compare by element
class Frame:
    """A frame's pixels (`Pixels`), and its identity. Raises InputMismatch for another kind of array."""

    id: FrameId
    pixels: Pixels

    def __post_init__(self) -> None:
        array: Any = self.pixels
        if not isinstance(array, np.ndarray):
            raise InputMismatch(f"{self.id.name}: expected a numpy array of pixels, found {type(array).__name__}")
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
            found = f"{array.dtype} of {array.shape}"
            raise InputMismatch(f"{self.id.name}: expected RGB as uint8 of shape (height, width, 3), found {found}")

    def __repr__(self) -> str:
        return f"Frame({self.id.name}, {self.pixels.shape[1]} x {self.pixels.shape[0]})"
