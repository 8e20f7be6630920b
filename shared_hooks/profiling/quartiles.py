"""Median and quartiles of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Of ``n`` measurements, in their unit."""

    median: float
    q1: float
    q3: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Raises ValueError for no values."""
        if not values:
            raise ValueError("no values to summarise")
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3, len(values))

    def as_dict(self) -> dict[str, Any]:
        return {"median": self.median, "q1": self.q1, "q3": self.q3, "n": self.n}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Quartiles:
        """Raises KeyError, TypeError or ValueError for what is none."""
        return cls(float(data["median"]), float(data["q1"]), float(data["q3"]), int(data["n"]))
