"""A number followed through noisy observations: an exponentially weighted mean that believes a sudden change."""

from __future__ import annotations

import math
from typing import Final

WEIGHT: Final = 0.3
SURPRISE: Final = math.log(1.5)
"""How far from the mean (as a ratio) an observation is a surprise, in a calm series."""
CALM: Final = 4.0
"""... and in a noisy one: so many mean deviations."""


class Tracker:
    """Follows a positive number in its logarithm: half and double are equally far.

    One observation far off is noise and leaves the mean alone. A second one in a row on the same side is a change, and
    becomes the mean. ``offset`` is added to every value inside, for numbers that may be 0.
    """

    def __init__(self, value: float, offset: float = 0.0) -> None:
        self._offset = offset
        self._mean = self._log(value)
        self._deviation = SURPRISE / CALM / 2
        self._suspect: float | None = None
        self._stale = False

    @property
    def value(self) -> float:
        """The present belief."""
        return max(0.0, math.exp(self._mean) - self._offset)

    @property
    def stale(self) -> bool:
        """Whether the next observation replaces the belief."""
        return self._stale

    def observe(self, value: float) -> bool:
        """Take an observation in; whether it was believed to be a sudden change."""
        seen = self._log(value)
        if self._stale:
            self.reset(value)
            return False
        off = seen - self._mean
        if abs(off) <= max(SURPRISE, CALM * self._deviation):
            self._mean += WEIGHT * off
            self._deviation += WEIGHT * (abs(off) - self._deviation)
            self._suspect = None
            return False
        if self._suspect is None or (self._suspect - self._mean) * off < 0:
            self._suspect = seen
            return False
        agree = abs(seen - self._suspect) <= SURPRISE
        self._mean = (seen + self._suspect) / 2 if agree else seen  # the first may have seen half of the change
        self._suspect = None
        return True

    def acquit(self) -> None:
        """Something else showed that the last surprise was noise."""
        self._suspect = None

    def reset(self, value: float, stale: bool = False) -> None:
        """Forget the past. ``stale``: the next observation replaces this, whatever it is."""
        self._mean = self._log(value)
        self._suspect = None
        self._stale = stale

    def _log(self, value: float) -> float:
        return math.log(max(value + self._offset, 1e-9))
