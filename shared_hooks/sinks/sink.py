"""`Sink`: takes named values, step after step."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class Histogram:
    """``counts`` of elements in equal bins from ``low`` to ``high``."""

    low: float
    high: float
    counts: tuple[int, ...]

    @property
    def edges(self) -> list[float]:
        """One more than there are bins."""
        width = (self.high - self.low) / len(self.counts)
        return [self.low + number * width for number in range(len(self.counts))] + [self.high]


@dataclass(frozen=True)
class Picture:
    """A PNG file's bytes."""

    png: bytes

    def image(self) -> Image.Image:
        """Decoded. Raises OSError for what is no PNG."""
        from PIL import Image

        return Image.open(io.BytesIO(self.png), formats=["PNG"])


Value: TypeAlias = float | str | Histogram | Picture
"""Numbers may be NaN and infinite: that is what some are looked for. What a sink does not know, it leaves out."""


class Sink(Protocol):
    """Two methods. One thread calls them; what they raise is logged once, and goes no further than the sink."""

    def write(self, values: Mapping[str, Value], step: int) -> None:
        """Values of one step, by name; a name is a path with slashes, as "edge/activation/stem.0/mean". Steps go up."""

    def close(self) -> None:
        """Nothing more comes: what was written is to be on the disk when this returns."""
