"""Median and quartiles of repeated measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Quartiles of ``n`` measurements, in their unit. ``middle``: the mean of the middle half, the median where it is
    not given.

    The middle is as robust as the median, and adds up: under a CPU quota a stage takes one of two times, and a sum of
    medians is not the median of the sum.
    """

    median: float
    q1: float
    q3: float
    n: int
    middle: float = math.nan

    def __post_init__(self) -> None:
        if math.isnan(self.middle):
            object.__setattr__(self, "middle", self.median)

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Raises ValueError for no values."""
        if not values:
            raise ValueError("no values to summarise")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3, len(values), statistics.fmean(middle_half(sorted(values))))

    def as_dict(self) -> dict[str, Any]:
        return {"median": self.median, "q1": self.q1, "q3": self.q3, "n": self.n, "middle": self.middle}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Quartiles:
        """Raises KeyError, TypeError or ValueError for what is none."""
        median = float(data["median"])
        return cls(median, float(data["q1"]), float(data["q3"]), int(data["n"]), float(data.get("middle", median)))


def middle_half(ordered: Sequence[Any]) -> Sequence[Any]:
    """Without a quarter at either end."""
    quarter = len(ordered) // 4
    return ordered[quarter : len(ordered) - quarter]
